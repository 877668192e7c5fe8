"""Open the feature set of a job, or its committed shards so far, or several sets as one."""

from __future__ import annotations

import numbers
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any, Literal, TypedDict, Unpack, overload

import numpy as np

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.snapshot import Which, find_snapshot, outdated_text
from earmill.pipeline.reader.catalog import Catalog, load_catalog
from earmill.pipeline.reader.combined import ConcatenatedFeatures, JoinedFeatures
from earmill.pipeline.reader.features import Features
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import addition_path

Uri = str | os.PathLike[str]
CACHE_BYTES = 256 * 2**20
LOCAL_CACHE_BYTES, NO_LIMIT = 50 * 2**30, 2**62


class _Options(TypedDict, total=False):
    snapshot: Which | None
    format: str | None
    streams: Sequence[str] | None
    dtype: str | None
    storage_options: Mapping[str, Any] | None
    cache_bytes: int
    local_cache: Uri | None
    local_cache_bytes: int


@overload
def open_features(
    uri: Uri, *, additions: Literal[False] = ..., **options: Unpack[_Options]
) -> Features: ...
@overload
def open_features(
    uri: Uri, *, additions: Literal[True], **options: Unpack[_Options]
) -> JoinedFeatures: ...
@overload
def open_features(
    uri: list[Any] | tuple[Any, ...], **options: Unpack[_Options]
) -> ConcatenatedFeatures: ...


def open_features(
    uri: Uri | list[Any] | tuple[Any, ...],
    *,
    additions: bool = False,
    snapshot: Which | None = None,
    format: str | None = None,
    streams: Sequence[str] | None = None,
    dtype: str | None = None,
    storage_options: Mapping[str, Any] | None = None,
    cache_bytes: int = CACHE_BYTES,
    local_cache: Uri | None = None,
    local_cache_bytes: int = LOCAL_CACHE_BYTES,
) -> Features | ConcatenatedFeatures | JoinedFeatures:
    """Open the feature set at a local path or fsspec URI, or several as one.

    Args:
        uri: One place, or a list of places. The sets of a list have the same streams, and their
            rows follow one another.
        additions: True reads the streams that `earmill add-features` put beside the rows too, for
            one place. A stream whose name is in use is called `<addition>.<stream>`.
        snapshot: An earlier snapshot: its number in `earmill log`, "previous", a date
            (datetime.date, datetime or ISO 8601 text), or its name. A date takes the snapshot that
            was current then. None takes the current snapshot. It applies to each place of a list.
        format: A stored format; values do not depend on it. None takes a format that reads parts of
            rows, as Zarr, if there is one.
        streams: Streams to read; None reads all. Other streams are never fetched.
        dtype: Type of the frames of every stream: float32 (None), float64 or float16. "stored"
            takes the stored type of each stream (the widest of several sets), or float32 if the
            stored type has scales, as int8. Events are whole numbers; collates make them float32.
        storage_options: Options of the filesystem: credentials, endpoint.
        cache_bytes: Maximum bytes of decoded blocks cached in each process.
        local_cache: Folder on a local disk for stored parts (4 MB) of the features of remote sets,
            which are then fetched once. Processes and sets may share it. None caches nothing on
            disk. Sets on this machine do not use it.
        local_cache_bytes: Maximum bytes of all files in that folder; the least recently used part
            is removed first.
    Warns:
        UserWarning: The job has not finished, so rows are missing; or added streams are of earlier
            rows.
    Raises:
        SourceError: There is no feature set, or no shard is committed yet.
        OutputError: The set has no such snapshot, or other users can write into the local cache.
        CommitError: Shards have different specs, or the index does not match its commits.
        ValueError: The set has no such format, stream or dtype.
        TypeError: The uri is neither a path nor a list of paths.
    Example:
        ds = open_features("s3://bucket/features")
        row = ds[0]
        row.features["modulation"]            # (n_frames, width), float32
        row.features["spikes"].dense()        # events: also their arrays, or .sparse_tensor()
        ds.slice(0, 1.5, 2.0)                 # frames from 1.5 s to 2 s only
        both = open_features(["s3://bucket/features", "more"])
        before = open_features("s3://bucket/features", snapshot="2026-05-01")
    """
    options = dict(storage_options or {})
    _check_bytes("cache_bytes", cache_bytes)
    _check_bytes("local_cache_bytes", local_cache_bytes)
    cache_place = None
    if local_cache is not None:
        text = os.fspath(local_cache) if isinstance(local_cache, str | os.PathLike) else ""
        if not text or "://" in text:
            raise TypeError(
                f"local_cache is a folder on this machine, or None, got {local_cache!r}"
            )
        # Absolute, here and for local sets: a worker may start in another folder.
        cache_place = Path(text).expanduser().absolute(), int(min(local_cache_bytes, NO_LIMIT))

    def load(place: Uri, which: Which | None) -> tuple[str, Catalog]:
        if not isinstance(place, str | os.PathLike) or not os.fspath(place):
            raise TypeError(f"expected a path or a URI of a feature set, got {place!r}")
        layout = Layout.open(os.fspath(place), options)
        catalog = load_catalog(layout, which)
        if not catalog.finished:
            text = (
                f"{layout.url()}: the job has not finished; the rows of its "
                f"{len(catalog.records):,} committed shards are read, the others are missing; "
                "`earmill inspect` shows how far it is"
            )
            warnings.warn(text, stacklevel=3)
        return layout.url() if layout.is_local else os.fspath(place), catalog

    def open_set(place: str, catalog: Catalog, chosen: Sequence[str]) -> Features:
        return Features(
            place,
            catalog,
            format=catalog.choose_format(format),
            streams=chosen,
            dtypes=catalog.choose_dtypes(dtype, chosen),
            storage_options=options,
            cache_bytes=cache_bytes,
            local_cache=cache_place,
        )

    if additions:
        if isinstance(uri, list | tuple):
            raise ValueError("expected one place to read with its additions, got a list of places")
        loaded = {"": load(uri, snapshot)}
        _, catalog = loaded[""]
        if catalog.outdated:
            where = Layout.open(os.fspath(uri), options).url()
            warnings.warn(outdated_text(catalog.outdated, where), stacklevel=2)
        for name, file in catalog.additions.items():
            place = f"{os.fspath(uri).rstrip('/')}/{addition_path(name)}"
            stem = PurePosixPath(file.path).stem
            there = Layout.open(place, options)
            if find_snapshot(there, stem).snapshot.sha256 != file.sha256:
                raise CommitError(f"{there.url()}: snapshot {stem} is another than the one added")
            loaded[name] = load(place, stem)
        # For each set, its streams and their names here.
        named: dict[str, dict[str, str]] = {}
        called = list[str]()
        for key, (_, of_set) in loaded.items():
            named[key] = {k: f"{key}.{k}" if k in called else k for k in of_set.streams}
            called += named[key].values()
        if streams is not None and (not streams or set(streams) - set(called)):
            raise ValueError(f"expected streams out of {called}, got {list(streams)}")
        joined, names = list[Features](), list[dict[str, str]]()
        for key, here in named.items():
            read = [k for k, v in here.items() if streams is None or v in streams]
            # The rows are the dataset's own: an added set has the columns of its time.
            if read or not key:
                joined.append(open_set(*loaded[key], read))
                names.append(here)
        return JoinedFeatures(joined, names)
    if isinstance(uri, str | os.PathLike):
        place, catalog = load(uri, snapshot)
        return open_set(place, catalog, catalog.choose_streams(streams))
    if not isinstance(uri, list | tuple):
        raise TypeError(
            f"expected the place of a feature set, or a list of places, got {uri!r}; "
            'open_features("features")'
        )
    places = [load(place, snapshot) for place in uri]
    sets = [open_set(*each, each[1].choose_streams(streams)) for each in places]
    of_sets = [each.dtypes for each in sets]
    for each in sets:
        # All sets get the widest dtypes. `ConcatenatedFeatures` refuses sets that lack a stream.
        each.dtypes = {
            name: np.result_type(*{of.get(name, own) for of in of_sets})
            for name, own in each.dtypes.items()
        }
    return ConcatenatedFeatures(sets)


def _check_bytes(name: str, value: Any) -> None:
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) and float(value) >= 0):
        raise ValueError(f"{name} must be a number of bytes from 0, got {value!r}")
