"""Models of the listeners that a column of the source names: one model for each audiogram."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
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
ModelOfRow = Callable[[Item], "Extractor"]


def column_models(entry: Mapping[str, Any], column: str, backend: str) -> ModelOfRow:
    """Return a function that gives the model of a row, or BadListenerError if the row has no valid
    audiogram. `entry` has the arguments of `build_extractor`. Threads may share the function."""
    from amtcore.features.registry import build_extractor
    from amtcore.listener import checked_audiogram

    @lru_cache(MODELS_KEPT)
    def build(audiogram: str) -> Extractor:
        listener = entry["listener"] | {"audiogram": json.loads(audiogram)}
        return build_extractor(**{**entry, "listener": listener, "backend": backend})

    def model_of(item: Item) -> Extractor:
        value = item.extra.get(column)
        try:
            given = loads_json(value) if isinstance(value, str) else value
            if given is None:
                raise ValueError("expected an audiogram, got nothing")
            if isinstance(given, Mapping):  # A struct of a table has all fields of all rows.
                given = {hz: loss for hz, loss in given.items() if loss is not None}
            return build(json.dumps(checked_audiogram("the audiogram", given)))
        except ValueError as error:
            text = f"{item.uri}: column {column!r}: {one_line(error)}"
            raise BadListenerError(text) from error

    return model_of


def column_listeners(spec: JobSpec, extractors: Sequence[Extractor]) -> dict[int, ModelOfRow]:
    """Return the models of the entries with listeners from a column, by number of the entry."""
    entries = zip(spec.extract, entries_of(spec), extractors, strict=True)
    return {
        number: column_models(arguments, entry.listener.column, extractor.backend.name)
        for number, (entry, arguments, extractor) in enumerate(entries)
        if entry.listener is not None and entry.listener.column is not None
    }
