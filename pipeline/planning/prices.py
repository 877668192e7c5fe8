"""What a job costs in money, by the prices of a file that the user writes.

There is no price here: what a core, a GPU, a request and a gigabyte cost differs between providers,
regions and years.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, ValidationError

from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.spec.explain import explain
from earmill.pipeline.spec.job import read_mapping
from earmill.pipeline.spec.section import SpecModel

Price = Annotated[float, Field(ge=0, allow_inf_nan=False)]
SECONDS_PER_HOUR = 3600.0
BYTES_PER_GB = 1e9


class Prices(SpecModel):
    """What things cost. A key that is left out costs nothing.

    Args:
        currency: Printed behind sums.
        core_hour: A core for an hour, whether it computes or waits.
        gpu_hour: A GPU for an hour; its cores come on top.
        put_per_1000: Requests that write or list: PUT, COPY, POST, LIST.
        get_per_1000: Requests that read: GET, HEAD.
        storage_gb_month: A gigabyte (1e9 bytes) of features for a month.
        months: How long the features are kept.
        egress_gb: A gigabyte of audio out of the store where it lies.
    """

    currency: str = Field(default="", max_length=16)
    core_hour: Price = 0.0
    gpu_hour: Price = 0.0
    put_per_1000: Price = 0.0
    get_per_1000: Price = 0.0
    storage_gb_month: Price = 0.0
    months: Price = 1.0
    egress_gb: Price = 0.0

    @classmethod
    def load(cls, uri: str) -> Prices:
        """Read a YAML file; a path or any fsspec URI.

        Raises:
            SpecError: What is wrong with it, in one line.
        """
        name, data = read_mapping(uri, "price")
        wanted = ", ".join(cls.model_fields)
        if not isinstance(data, dict):
            raise SpecError(f"{name}: expected a mapping of prices ({wanted})")
        try:
            found = cls.model_validate(data)
        except ValidationError as error:
            raise SpecError(f"{name}: {explain(error, cls, data)}") from None
        if not any(getattr(found, key) for key in PRICED):
            raise SpecError(f"{name}: expected at least one price above 0 ({', '.join(PRICED)})")
        return found

    def of(
        self,
        *,
        core_s: float,
        gpu_s: float,
        puts: float,
        gets: float,
        stored_bytes: float,
        read_bytes: float,
    ) -> float:
        """What these amounts cost together.

        Args:
            core_s, gpu_s: Seconds for which cores and GPUs are held.
            puts: Requests that write or list. gets: Requests that read.
            stored_bytes: Of features. read_bytes: Of audio that leaves its store.
        """
        return (
            self.core_hour * core_s / SECONDS_PER_HOUR
            + self.gpu_hour * gpu_s / SECONDS_PER_HOUR
            + self.put_per_1000 * puts / 1000
            + self.get_per_1000 * gets / 1000
            + self.storage_gb_month * self.months * stored_bytes / BYTES_PER_GB
            + self.egress_gb * read_bytes / BYTES_PER_GB
        )


PRICED = tuple(name for name in Prices.model_fields if name not in ("currency", "months"))
