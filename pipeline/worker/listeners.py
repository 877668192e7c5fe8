"""Models of the listeners that a column of the source names: one model for each audiogram."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from earmill.pipeline.common.errors import BadListenerError
from earmill.pipeline.common.text import one_line
from earmill.pipeline.common.untrusted import loads_json
from earmill.pipeline.sources.base import Item
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.models import entries_of

if TYPE_CHECKING:
    from amtcore.features.feature_model import Extractor

MODELS_KEPT = 64  # Listeners whose models stay warm.


class ColumnListeners:
    """The models of one entry of `extract`, by the audiogram of a row. Threads may share it."""

    def __init__(self, entry: Mapping[str, Any], column: str, backend: str) -> None:
        from amtcore.features.registry import build_extractor

        def build(audiogram: str) -> Extractor:
            listener = entry["listener"] | {"audiogram": json.loads(audiogram)}
            return build_extractor(**{**entry, "listener": listener, "backend": backend})

        self._column, self._build = column, lru_cache(MODELS_KEPT)(build)

    def of(self, item: Item) -> Extractor:
        """Return the model of a row; BadListenerError if the row has no valid audiogram."""
        from amtcore.listener import checked_audiogram

        value = item.extra.get(self._column)
        try:
            given = loads_json(value) if isinstance(value, str) else value
            if given is None:
                raise ValueError("expected an audiogram, got nothing")
            if isinstance(given, Mapping):  # A struct of a table has all fields of all rows.
                given = {hz: loss for hz, loss in given.items() if loss is not None}
            return self._build(json.dumps(checked_audiogram("the audiogram", given)))
        except ValueError as error:
            text = f"{item.uri}: column {self._column!r}: {one_line(error)}"
            raise BadListenerError(text) from error


def column_listeners(spec: JobSpec, extractors: Sequence[Extractor]) -> dict[int, ColumnListeners]:
    """Return the listeners of the entries that take them from a column, by number of the entry."""
    entries = zip(spec.extract, entries_of(spec), extractors, strict=True)
    return {
        number: ColumnListeners(arguments, entry.listener.column, extractor.backend.name)
        for number, (entry, arguments, extractor) in enumerate(entries)
        if entry.listener is not None and entry.listener.column is not None
    }
