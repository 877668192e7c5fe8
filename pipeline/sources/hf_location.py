"""Opening of a Hugging Face dataset (a hub id, a saved folder, Parquet files); uris of its rows."""

from __future__ import annotations

import hashlib
import json
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import datasets
from datasets.exceptions import DataFilesNotFoundError
from datasets.packaged_modules.parquet.parquet import Parquet
from fsspec.implementations.local import LocalFileSystem
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import HfHubHTTPError

from earmill.pipeline.common import errors
from earmill.pipeline.common.byte_streams import check_regular
from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.common.text import named_line, nearest, one_line
from earmill.pipeline.sources.base import Item, filesystem, public_uri, stat_fields
from earmill.pipeline.sources.confinement import Confinement, Place
from earmill.pipeline.sources.files import walk
from earmill.pipeline.spec.source import AUDIO_EXTENSIONS, HfSpec
from earmill.pipeline.storage.backend import is_local, is_web
from earmill.pipeline.storage.fsspec_store import MAGIC_CHARACTERS

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_TIMEOUT_S = 10.0
TAG_CHARS = 16
ROW_MARK = re.compile(r"#(?:shard=(\d+)&)?row=(\d+)$")
AUDIO_FOLDER = "audiofolder"
AUDIO_ENDINGS = tuple(f".{ending}" for ending in AUDIO_EXTENSIONS)
# Tables of an audio folder that name its files.
AUDIO_LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


@dataclass(frozen=True)
class ParquetSet:
    """The Parquet files of one split; `features` are None if only the files tell them."""

    spec: HfSpec
    uris: tuple[str, ...]
    features: Any

    def options(self, uri: str) -> dict[str, Any]:
        """Return the fsspec options of one of the files."""
        own = dict(self.spec.storage_options)
        if uri.startswith("hf://") and not self.spec.uri.startswith("hf://"):
            return {"token": own.get("token"), "endpoint": datasets.config.HF_ENDPOINT}
        return {} if is_local(uri) else own


def open_dataset(
    spec: HfSpec,
) -> tuple[ParquetSet | datasets.Dataset | datasets.IterableDataset, str | None]:
    """Open the split that a job names, with audio cells as they are stored, and return a tag of its
    files, which changes with them. With `streaming`, a split of plain Parquet files is returned as
    these files, unread and without a tag."""
    try:
        dataset, tag = _opened(spec)
    except DataFilesNotFoundError as error:
        raise SourceError(
            f"source {spec.uri}: {one_line(error)}; of a folder of recordings take kind: files"
        ) from error
    except Exception as error:
        missing = next((one for one in errors.chain(error) if isinstance(one, ImportError)), None)
        if missing is None:
            raise
        raise errors.MissingPackageError(
            f"source {spec.uri}: {one_line(missing)} Or set source.streaming: true, which reads "
            "files where they are"
        ) from error
    column = spec.audio_column
    if not isinstance(dataset, datasets.IterableDataset) or dataset.features is None:
        return dataset, tag
    if not isinstance(dataset.features.get(column), datasets.Audio):
        return dataset, tag
    # Audio stays undecoded: with decoding, `datasets` needs torchcodec.
    if dataset.info.builder_name == AUDIO_FOLDER:  # its cells are paths before `datasets` encodes
        return dataset.cast_column(column, datasets.Value("string")), tag
    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    return dataset.cast_column(column, stored), tag


def _opened(spec: HfSpec) -> tuple[Any, str | None]:
    options: dict[str, Any] = {}
    if is_local(spec.uri) and not local_exists(spec.uri):
        check_hub_id(spec)
        name = spec.uri
    else:
        fs, path = filesystem(spec.uri, spec.storage_options)
        if _is_saved(fs, path):
            options = {} if is_local(spec.uri) else dict(spec.storage_options)
            loaded = datasets.load_from_disk(spec.uri, storage_options=options or None)
            if isinstance(loaded, Mapping):
                split = spec.split or _only(spec, list(loaded))
                if split not in loaded:
                    raise SourceError(
                        f"source {spec.uri}: no split {split!r}{nearest(split, list(loaded))} "
                        f"(splits: {', '.join(loaded)})"
                    )
                loaded = loaded[split]
            facts = [
                (name, *stat_fields(info).values())
                for name, info in sorted(fs.find(path, detail=True).items())
                if not posixpath.basename(name).startswith("cache-")  # of `map` and `filter`
            ]
            return (loaded.to_iterable_dataset() if spec.streaming else loaded), tag_of(facts)
        # A local folder is for `datasets` to read, of other places the Parquet files are. Asking a
        # web server for a folder reads it.
        folder = not path.endswith(".parquet") and fs.isdir(path)
        name, options = path, {}
        if not (folder and is_local(spec.uri)):
            pattern = f"{spec.uri.rstrip('/')}/**/*.parquet" if folder else spec.uri
            name, options = "parquet", {"data_files": path if is_local(spec.uri) else pattern}
    if name != "parquet":
        options |= {"name": spec.config, "revision": spec.revision}
        options["token"] = spec.storage_options.get("token")
    elif not is_local(spec.uri):
        options["storage_options"] = dict(spec.storage_options)  # `datasets` writes into it
        # Without etags, a file that was replaced in the bucket would come from the cache.
        options["download_config"] = datasets.DownloadConfig(
            use_etag=True, storage_options=dict(spec.storage_options)
        )
    # The builder resolves the data files, which takes a listing. `load_dataset` would repeat it.
    builder = datasets.load_dataset_builder(name, **options)
    split = spec.split or _only(spec, [str(split) for split in builder.config.data_files or {}])
    config = builder.config
    uris = tuple(map(str, (config.data_files or {}).get(split, ())))
    is_plain = (
        builder.dataset_name is not None
        and isinstance(builder, Parquet)
        and bool(uris)
        and all(uri.endswith(".parquet") and "::" not in uri for uri in uris)
        and config.columns is None
        and config.filters is None
    )
    if spec.streaming and is_plain:
        return ParquetSet(spec, uris, builder.info.features or config.features), None
    listed = (config.data_files or {}).get(split)
    # The facts of a file are its etag or its time, or its commit on the hub.
    tag = None if listed is None else tag_of(zip(listed, listed.origin_metadata, strict=False))
    # Audio in a local folder is read in place: there is nothing to build.
    if spec.streaming or (builder.name == AUDIO_FOLDER and os.path.isdir(name)):
        return builder.as_streaming_dataset(split=split), tag
    builder.download_and_prepare(
        download_config=options.get("download_config"),
        storage_options=options.get("storage_options"),
    )
    return builder.as_dataset(split=split), tag


def tag_of(facts: Iterable[Sequence[Any]]) -> str:
    """Return a short hash of facts about files."""
    return hashlib.sha256(json.dumps([*facts]).encode()).hexdigest()[:TAG_CHARS]


def check_names(spec: HfSpec) -> None:
    """Refuse files on which `datasets` would hang, and names that it misreads: it takes a path for
    a pattern, and leaves out files with `::` in their names without a message."""
    if is_web(spec.uri):
        return  # `?` begins a query there
    if is_local(spec.uri) and not local_exists(spec.uri):
        return  # a name on the hub
    fs, path = filesystem(spec.uri, spec.storage_options)
    local = isinstance(fs, LocalFileSystem)
    if ("::" in path or MAGIC_CHARACTERS.search(path)) and fs.exists(path):
        if "::" in path or not _is_saved(fs, path):
            raise SourceError(
                f"source {spec.uri}: `datasets` takes *, ?, [ and :: in a path for patterns; link "
                "it under a plain name (ln -s) and name that"
            )
    if not local:
        return
    names = [name for name, _ in walk(path)[0]] if os.path.isdir(path) else []
    files = [f"{path}/{name}" for name in names] or [str(file) for file in fs.glob(path)]
    listed = any(name.rpartition("/")[2] in AUDIO_LISTS for name in names)
    for file in files:
        is_audio = file.lower().endswith(AUDIO_ENDINGS)
        if "::" in file.removeprefix(path) and not (is_audio and listed):
            raise SourceError(
                f"source {spec.uri}: `datasets` leaves out files with :: in their names, as "
                f"{one_line(file)}; rename them, or take kind: files or manifest"
            )
        # earmill opens audio files itself, row by row.
        if not is_audio and os.path.exists(file):
            try:
                check_regular(file)
            except errors.NotRegularError as error:
                raise SourceError(f"source {spec.uri}: {error}; move it away") from error


def _is_saved(fs: Any, path: str) -> bool:
    """Return True if `save_to_disk` wrote this folder."""
    return any(fs.exists(f"{path}/{name}") for name in ("dataset_dict.json", "state.json"))


def check_hub_id(spec: HfSpec) -> None:
    """Refuse a uri that is neither local nor a dataset of the hub, by one request at most: for a
    missing folder, which looks like a hub id, `datasets` would ask the hub six times."""
    below = spec.uri.partition("/")[0]
    if not HUB_ID.fullmatch(spec.uri) or ("/" in spec.uri and os.path.isdir(below)):
        raise FileNotFoundError(spec.uri)
    if datasets.config.HF_HUB_OFFLINE:
        return  # loading looks into the local cache
    hub = HfApi(endpoint=datasets.config.HF_ENDPOINT, token=spec.storage_options.get("token"))
    try:
        hub.dataset_info(spec.uri, revision=spec.revision, timeout=HUB_TIMEOUT_S)
    except Exception as error:  # its HTTP library raises classes of its own
        response = error.response if isinstance(error, HfHubHTTPError) else None
        if response is not None and response.status_code >= 500:
            return  # the hub has an outage: loading retries for longer
        raise SourceError(
            f"source {spec.uri}: no such file or folder in {os.getcwd()}, and no dataset of that "
            f"name on the hub ({named_line(error)}); check source.uri, or set HF_HUB_OFFLINE=1 for "
            "a copy in the local cache"
        ) from error


def local_exists(uri: str) -> bool:
    """Return True if a local path or glob names something."""
    fs, path = filesystem(uri)
    return bool(fs.exists(path) or fs.glob(path))


def _only(spec: HfSpec, splits: list[str]) -> str:
    if len(splits) != 1:
        raise SourceError(f"source {spec.uri}: set source.split to one of {', '.join(splits)}")
    return splits[0]


@contextmanager
def quiet() -> Iterator[None]:
    """Hide the progress bars of `datasets`; the job has its own."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def dataset_place(spec: HfSpec) -> tuple[str, str | None, Confinement]:
    """Return the uri of a dataset for other processes, its folder or prefix, and its own places.
    Audio cells may name these places. A dataset of the hub has no folder."""
    uri, folder, store = spec.uri, None, None
    if is_local(uri) and not local_exists(uri):
        config, store = datasets.config, f"hf://datasets/{uri}"
        caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
        own = [store, *(os.path.abspath(cache) for cache in caches)]
    else:
        uri = folder = public_uri(*filesystem(uri)) if is_local(uri) else uri
        if not (is_local(uri) and os.path.isdir(uri)):
            scheme, separator, path = ("", "", uri) if is_local(uri) else uri.partition("://")
            # The folders before the first glob character and the file name, or else the bucket.
            plain = MAGIC_CHARACTERS.split(path, maxsplit=1)[0]
            inside = posixpath.dirname(plain) or path.partition("/")[0]
            folder = f"{scheme}{separator}{inside}"
        store = None if is_local(folder) else Place.read_at(folder).store
        own = [folder] if store is None else [folder, store]
    return uri, folder, Confinement(own, spec.allow, spec.storage_options, store=store)


@dataclass(frozen=True)
class RowPlace:
    """The file shard of a row when streaming, and its number in the shard or the dataset."""

    shard: int | None
    row: int

    def mark(self) -> str:
        return f"#row={self.row}" if self.shard is None else f"#shard={self.shard}&row={self.row}"

    @classmethod
    def of(cls, item: Item) -> RowPlace:
        found = ROW_MARK.search(item.uri)
        if found is None:
            raise errors.UnreadableError(f"{item.uri}: expected a uri ending in #row=N")
        return cls(None if found[1] is None else int(found[1]), int(found[2]))
