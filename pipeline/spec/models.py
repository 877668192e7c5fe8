"""The models of a job: built once to check the job, or described from the user's cache.

Building models imports torch and numba, which takes seconds and half a gigabyte, so a driver has
it done in a process that ends at once. A model's description depends only on its sources, versions
and entry in the job, under which it is cached. A model that names code of the user is not cached.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter, ValidationError

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.audio.channels import BINAURAL, EARS
from earmill.pipeline.common.errors import MissingPackageError, SpecError
from earmill.pipeline.common.machine import run_python
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.common.user_cache import keep, models_key, read_kept
from earmill.pipeline.spec.job import ExtractSpec, JobSpec, ListenerSpec, check_unique_streams
from earmill.pipeline.spec.source import reference_column
from earmill.pipeline.spec.spans import warm_up_s

if TYPE_CHECKING:
    from amtcore.features.feature_model import Extractor

# Units with values too small for float16, which ends at 6e-8: the velocity of the basilar membrane
# and the power of quiet sound are around 1e-7.
TINY_UNITS = ("m/s", "input unit^2")
_KIND = "description"


@dataclass(frozen=True)
class Description:
    fs_hz: float
    input_channels: tuple[int, ...]
    streams: tuple[StreamInfo, ...]
    memory_s: float | None
    grid_s: int

    @classmethod
    def of(cls, extractor: Extractor) -> Description:
        return cls(**{field.name: getattr(extractor, field.name) for field in fields(cls)})


_JSON = TypeAdapter(Description)


@dataclass(frozen=True)
class BuiltModel:
    description: Description
    record: Mapping[str, Any]


# A loss of 0 dB has the bits of normal hearing: it stands for the audiograms of a column.
NO_LOSS = {"1000": 0.0}


def entries_of(spec: JobSpec) -> list[dict[str, Any]]:
    """Return `build_extractor`'s arguments for every model of the job."""
    return [dict(entry) | {"listener": _listener(entry.listener)} for entry in spec.extract]


def _listener(spec: ListenerSpec | None) -> dict[str, Any] | None:
    if spec is None:
        return None
    return spec.model_dump(exclude={"column"}) | {"audiogram": spec.audiogram or NO_LOSS}


def _record(entry: ExtractSpec, extractor: Extractor) -> dict[str, Any]:
    """Return the provenance record of a model; a column stands for the audiograms of its rows."""
    record = extractor.describe()
    if entry.listener is not None and entry.listener.column is not None:
        record["params"] = record["params"] | {"audiogram": {"column": entry.listener.column}}
    return record


def validate_models(spec: JobSpec) -> list[Extractor]:
    """Build every model of the job once; SpecError if an entry cannot be built."""
    from amtcore.features.registry import build_extractor, get_model

    extractors = []
    for index, arguments in enumerate(entries_of(spec)):
        try:
            extractors.append(build_extractor(**arguments))
        except ValueError as error:
            raise SpecError(f"extract.{index}: {error}") from error
    described = [Description.of(extractor) for extractor in extractors]
    _check_together(spec, described)
    for key, entry, description in zip(_keys(spec), spec.extract, described, strict=False):
        if not get_model(entry.model).names_code and _cached(key) is None:
            keep(_KIND, key, asdict(description))
    return extractors


def built_models(spec: JobSpec) -> list[BuiltModel]:
    """Build every model of the job, with the checks of `validate_models`. A process without torch
    has another process do it; one that has torch saves nothing by that."""
    if "torch" in sys.modules:
        answer = _answer(spec)
    else:
        code = f"from {__name__} import serve; serve()"
        try:
            answer = pickle.loads(run_python("builds the models", code, pickle.dumps(spec)))
        except ChildProcessError as error:  # no outage of a store, though an OSError
            raise SpecError(f"extract: {error}") from error
    if isinstance(answer, Exception):
        raise answer
    return answer


def serve() -> None:
    """Answer `built_models`: a pickled job on standard input, the answer on standard output."""
    # Text that a model prints goes to standard error.
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)
        pickle.dump(_answer(pickle.load(sys.stdin.buffer)), out)


def _answer(spec: JobSpec) -> list[BuiltModel] | SpecError | MissingPackageError:
    try:
        extractors = validate_models(spec)
    except SpecError as error:
        return error
    except ImportError as error:
        return missing_package(error)
    pairs = zip(spec.extract, extractors, strict=True)
    return [BuiltModel(Description.of(model), _record(entry, model)) for entry, model in pairs]


def describe_models(spec: JobSpec) -> list[Description]:
    """Describe every model of the job, with the checks of `validate_models`. No model is built if
    the user's cache has descriptions of all models."""
    cached = [_cached(key) for key in _keys(spec)]
    known = [description for description in cached if description is not None]
    if len(known) < len(spec.extract):
        return [Description.of(extractor) for extractor in validate_models(spec)]
    _check_together(spec, known)
    return known


def _check_together(spec: JobSpec, models: Sequence[Description]) -> None:
    pairs = list(zip(spec.extract, models, strict=True))
    check_unique_streams(
        [(entry.model, each.name) for entry, made in pairs for each in made.streams]
    )
    warm_up_s(spec.audio.spans, models, [entry.model for entry in spec.extract])
    infos = [stream for made in models for stream in made.streams]
    tiny = [f"{info.model} {info.name}" for info in infos if info.unit in TINY_UNITS]
    if tiny and spec.output.dtype == "float16":
        raise SpecError(
            f"output.dtype: expected float32 for {', '.join(tiny)}, whose values lie below what "
            "float16 can hold, got float16"
        )
    if spec.audio.channels == BINAURAL and all(max(m.input_channels) < EARS for m in models):
        raise SpecError(
            "audio.channels: expected a model of two ears in the extract list for binaural, got "
            f"{', '.join(entry.model for entry in spec.extract)}; use mean, or each"
        )
    of_pairs = [entry.model for entry, made in pairs if takes_pairs(made)]
    has_references = reference_column(spec.source) is not None
    if of_pairs and not has_references and spec.audio.channels != BINAURAL:
        raise SpecError(
            "source.reference_column: expected the column of the reference recordings for "
            f"{', '.join(of_pairs)}, which compares two recordings, got none; for files with both "
            "recordings as channels (reference first) set audio.channels to binaural"
        )
    if of_pairs and not has_references and spec.audio.variants is not None:
        raise SpecError(
            "audio.variants: expected source.reference_column for "
            f"{', '.join(of_pairs)}, which compares two recordings, got both as channels of a "
            "file: a variant would change the reference too; write references to their own files"
        )


def takes_pairs(model: Extractor | Description) -> bool:
    """Return True for a model that takes two signals only: a reference and what became of it."""
    return min(model.input_channels) == EARS


def check_references_used(spec: JobSpec, models: Sequence[Description]) -> None:
    """Refuse reference recordings that no model of the job takes."""
    if reference_column(spec.source) is not None and not any(map(takes_pairs, models)):
        raise SpecError(
            "source.reference_column: expected a model that compares two recordings in the extract "
            f"list, got {', '.join(entry.model for entry in spec.extract)}; leave "
            "reference_column out"
        )


def _keys(spec: JobSpec) -> list[str]:
    """Return the cache key of each entry; none if descriptions must not be cached."""
    sources = models_key()
    entries = [] if sources is None else spec.canonical()["extract"]
    return [f"{sources} {json.dumps(entry, sort_keys=True)}" for entry in entries]


def _cached(key: str) -> Description | None:
    try:
        return _JSON.validate_python(read_kept(_KIND, key))
    except ValidationError:
        return None
