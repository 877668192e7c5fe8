"""Open the feature set of a job, or several of them as one.

`open_features(uri)` trusts only what commits name, so it works on a finished set and on one that is
still being written (it then shows the shards committed by now).
"""

from __future__ import annotations

import numbers
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from earmill.pipeline.dataset.history import Which
from earmill.pipeline.reader.catalog import load_catalog
from earmill.pipeline.reader.concat import ConcatenatedFeatures
from earmill.pipeline.reader.features import CachePlace, Features
from earmill.pipeline.reader.joined import JoinedFeatures, open_joined
from earmill.pipeline.storage.layout import Layout

Uri = str | os.PathLike[str]
CACHE_BYTES = 256 * 2**20
LOCAL_CACHE_BYTES, NO_LIMIT = 50 * 2**30, 2**62


@overload
def open_features(
    uri: Uri,
    *,
    additions: Literal[False] = ...,
    snapshot: Which | None = ...,
    format: str | None = ...,
    streams: Sequence[str] | None = ...,
    dtype: str | None = ...,
    storage_options: Mapping[str, Any] | None = ...,
    cache_bytes: int = ...,
    local_cache: Uri | None = ...,
    local_cache_bytes: int = ...,
) -> Features: ...
@overload
def open_features(
    uri: Uri,
    *,
    additions: Literal[True],
    snapshot: Which | None = ...,
    format: str | None = ...,
    streams: Sequence[str] | None = ...,
    dtype: str | None = ...,
    storage_options: Mapping[str, Any] | None = ...,
    cache_bytes: int = ...,
    local_cache: Uri | None = ...,
    local_cache_bytes: int = ...,
) -> JoinedFeatures: ...
@overload
def open_features(
    uri: list[Any] | tuple[Any, ...],
    *,
    snapshot: Which | None = ...,
    format: str | None = ...,
    streams: Sequence[str] | None = ...,
    dtype: str | None = ...,
    storage_options: Mapping[str, Any] | None = ...,
    cache_bytes: int = ...,
    local_cache: Uri | None = ...,
    local_cache_bytes: int = ...,
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
        uri: One place, or a list of places whose sets have the same streams; their rows follow each
            other.
        additions: Read the streams that `earmill add-features` put beside the rows as well; of one
            place. A stream whose name the set has already is called `<addition>.<stream>`.
        snapshot: One of before: its number in `earmill log`, "previous", a date (datetime.date,
            datetime or ISO 8601 text: what counted then), or its name. None takes the one that
            counts. Of a list of places, each by itself.
        format: One that the set is stored in; the values are the same. None takes Zarr where it is
            there: it reads parts of rows.
        streams: Which streams to read; None reads all. Others are never fetched.
        dtype: Type of the frames of every stream: float32 (None), float64 or float16. "stored"
            takes for each stream the one that it is stored in (the widest of several sets), float32
            where that has scales, as int8. Events are whole numbers; collates make float32 of them.
        storage_options: For the filesystem: credentials, endpoint.
        cache_bytes: Decoded blocks kept in each process, at most.
        local_cache: Folder on a local disk, where parts of 4 MB of the features of a remote set are
            kept as they are stored: of what was read once, nothing is fetched again. Processes and
            sets may share it. None for none; sets on this machine need none and use none.
        local_cache_bytes: Bytes of all files in that folder, at most; what was used longest ago
            goes first.
    Raises:
        SourceError: No feature set there, or nothing committed yet.
        OutputError: It has no such snapshot, or others may write into the local cache.
        CommitError: A mix of specs, or an index without its commits.
        ValueError: A format, stream or dtype that this set does not have.
        TypeError: No path, and no list of paths.
    Example:
        ds = open_features("s3://bucket/features")
        row = ds[0]
        row.features["modulation"]            # (n_frames, width), float32
        row.features["spikes"].dense()        # events: also their arrays, or .sparse_tensor()
        ds.slice(0, 1.5, 2.0)                 # frames from 1.5 s to 2 s only
        both = open_features(["s3://bucket/features", "more"])
        before = open_features("s3://bucket/features", snapshot="2026-05-01")
    """
    kept = _cache_place(local_cache, local_cache_bytes)

    def open_set(
        at: Uri,
        which: Which | None,
        names: Sequence[str] | None,
        wanted: Mapping[str, np.dtype] | str | None = dtype,
    ) -> Features:
        options = dict(storage_options or {})
        return _open(at, which, format, names, wanted, options, cache_bytes, kept)

    if additions:
        if isinstance(uri, list | tuple):
            raise ValueError("expected one place to read with its additions, got a list of places")
        return open_joined(uri, snapshot, streams, storage_options or {}, open_set)
    if isinstance(uri, str | os.PathLike):
        return open_set(uri, snapshot, streams)
    if not isinstance(uri, list | tuple):
        raise TypeError(
            f"expected the place of a feature set, or a list of places, got {uri!r}; "
            'open_features("features")'
        )
    sets = [open_set(place, snapshot, streams) for place in uri]
    if any(each.dtypes != sets[0].dtypes for each in sets):
        of_sets = [each.dtypes for each in sets]
        # Streams that a set lacks are refused below.
        widest = {k: np.result_type(*(of[k] for of in of_sets if k in of)) for k in of_sets[0]}
        sets = [open_set(place, snapshot, streams, widest) for place in uri]
    return ConcatenatedFeatures(sets)


def _open(
    uri: Uri,
    snapshot: Which | None,
    format: str | None,
    streams: Sequence[str] | None,
    dtype: Mapping[str, np.dtype] | str | None,
    storage_options: Mapping[str, Any],
    cache_bytes: int,
    local_cache: CachePlace | None,
) -> Features:
    _check_bytes("cache_bytes", cache_bytes)
    if not isinstance(uri, str | os.PathLike) or not os.fspath(uri):
        raise TypeError(f"expected a path or a URI of a feature set, got {uri!r}")
    layout = Layout.open(os.fspath(uri), storage_options)
    catalog = load_catalog(layout, snapshot)
    chosen = catalog.choose_streams(streams)
    return Features(
        # Absolute: a worker may start in another folder.
        layout.url() if layout.is_local else os.fspath(uri),
        catalog,
        format=catalog.choose_format(format),
        streams=chosen,
        dtypes=catalog.choose_dtypes(dtype, chosen),
        storage_options=storage_options,
        cache_bytes=cache_bytes,
        local_cache=local_cache,
    )


def _cache_place(folder: Uri | None, nbytes: int) -> CachePlace | None:
    """Where remote parts are kept; absolute, as a worker may start in another folder."""
    _check_bytes("local_cache_bytes", nbytes)
    if folder is None:
        return None
    if not isinstance(folder, str | os.PathLike) or not os.fspath(folder) or "://" in str(folder):
        raise TypeError(f"local_cache is a folder on this machine, or None, got {folder!r}")
    return Path(folder).expanduser().absolute(), int(min(nbytes, NO_LIMIT))


def _check_bytes(name: str, value: Any) -> None:
    if isinstance(value, bool) or not (isinstance(value, numbers.Real) and float(value) >= 0):
        raise ValueError(f"{name} must be a number of bytes from 0, got {value!r}")
