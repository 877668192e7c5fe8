"""What the models of this package share as feature models: parameters from their constructors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Generic, TypeVar

import torch

from amtcore.features.base import Params, StreamKind
from amtcore.features.feature_model import FeatureModel
from amtcore.features.parameters import Parameter, built, checked_params, parameters_of
from amtcore.models.base import TimeDomainModel
from amtcore.models.loudness import LoudnessModel

DTYPES = {"float32": torch.float32, "float64": torch.float64}
#: Constructor arguments that a job does not set.
INTERNAL = ("fs", "learnable", "return_stages", "dtype")

Module = TypeVar("Module", bound=TimeDomainModel | LoudnessModel)


class ModuleModel(FeatureModel, Generic[Module]):
    """A model of this package as a job runs it.

    Args:
        name: What jobs call it.
        constructor: The model's class.
        summary: One line of what it is.
        default_fs_hz: Sampling rate where a job names none.
        streams: Its streams by name.
    """

    def __init__(
        self,
        name: str,
        constructor: type[Module],
        summary: str,
        default_fs_hz: float,
        streams: Mapping[str, StreamKind],
    ) -> None:
        self.name, self.summary, self.default_fs_hz = name, summary, default_fs_hz
        self.constructor, self.streams = constructor, streams
        self.input_unit = constructor.input_unit

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """Constructor arguments a job may set."""
        return parameters_of(self.constructor, leave_out=INTERNAL)

    def module(self, fs_hz: float, params: Params, dtype: str = "float32") -> Module:
        """The model itself."""
        checked_params(self.name, self.parameters, params)
        return built(self.constructor, self.name, {"fs": fs_hz, "dtype": DTYPES[dtype], **params})
