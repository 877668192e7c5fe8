"""Where a Hugging Face dataset lies, how each kind is opened, and how uris name its rows.

A dataset is a hub id, a saved folder or Parquet files.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Mapping
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

from earmill.pipeline.common.byte_streams import check_regular
from earmill.pipeline.common.errors import (
    ErrorKind,
    MissingPackageError,
    NotRegularError,
    SourceError,
    UnreadableError,
    chain,
    classify,
    http_status,
)
from earmill.pipeline.common.text import named_line, nearest, one_line
from earmill.pipeline.sources.base import Item, filesystem, is_local, public_uri
from earmill.pipeline.sources.confine import Confinement, store_of
from earmill.pipeline.sources.files import Walk
from earmill.pipeline.spec.source import AUDIO_EXTENSIONS, HfSpec
from earmill.pipeline.storage.fsspec_store import MAGIC_CHARACTERS, is_web

HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
HUB_TIMEOUT_S = 10.0
AUDIO_FOLDER = "audiofolder"
AUDIO_ENDINGS = tuple(f".{ending}" for ending in AUDIO_EXTENSIONS)
# Tables of an audio folder that name its files.
AUDIO_LISTS = ("metadata.csv", "metadata.jsonl", "metadata.parquet")


def open_dataset(spec: HfSpec) -> Any:
    """The split a job names, map-style or streaming, with audio cells as they are stored."""
    try:
        dataset = _opened(spec)
    except DataFilesNotFoundError as error:
        raise SourceError(
            f"source {spec.uri}: {one_line(error)}; of a folder of recordings take kind: files"
        ) from error
    except Exception as error:
        missing = next((one for one in chain(error) if isinstance(one, ImportError)), None)
        if missing is None:
            raise
        raise MissingPackageError(
            f"source {spec.uri}: {one_line(missing)} Or set source.streaming: true, which reads "
            "files where they are"
        ) from error
    if isinstance(dataset, datasets.IterableDataset):
        return _with_stored_audio(dataset, spec.audio_column)
    return dataset


def _with_stored_audio(dataset: Any, column: str) -> Any:
    """A stream whose audio is not decoded: `datasets` would need torchcodec even to hand it out."""
    if dataset.features is None or not isinstance(dataset.features.get(column), datasets.Audio):
        return dataset
    if dataset.info.builder_name == AUDIO_FOLDER:  # its cells are paths before `datasets` encodes
        return dataset.cast_column(column, datasets.Value("string"))
    stored = {"bytes": datasets.Value("binary"), "path": datasets.Value("string")}
    return dataset.cast_column(column, stored)


def _opened(spec: HfSpec) -> Any:
    if is_local(spec.uri) and not local_exists(spec.uri):
        check_hub_id(spec)
        return _load(spec, spec.uri)
    fs, path = filesystem(spec.uri, spec.storage_options)
    if _is_saved(fs, path):
        return _load_saved(spec)
    name, options = _parquet_or_folder(spec, fs, path)
    return _load(spec, name, **options)


@dataclass(frozen=True)
class ParquetSet:
    """The Parquet files of one split.

    Args:
        spec: The dataset. uris: Its files in order; any fsspec uri.
        features: What the dataset's card says they hold; None where the files say it.
    """

    spec: HfSpec
    uris: tuple[str, ...]
    features: Any

    def options(self, uri: str) -> dict[str, Any]:
        """fsspec options of one of the files."""
        own = dict(self.spec.storage_options)
        if is_local(uri):
            return {}
        if uri.startswith("hf://") and not self.spec.uri.startswith("hf://"):
            return {"token": own.get("token"), "endpoint": datasets.config.HF_ENDPOINT}
        return own


def parquet_files(spec: HfSpec) -> ParquetSet | None:
    """The split's files if it is nothing but plain Parquet files; None for all other datasets.

    Nothing of them is read.
    """
    if is_local(spec.uri) and not local_exists(spec.uri):
        check_hub_id(spec)
        name, options = spec.uri, dict[str, Any]()
    else:
        fs, path = filesystem(spec.uri, spec.storage_options)
        if _is_saved(fs, path):
            return None
        name, options = _parquet_or_folder(spec, fs, path)
    builder = datasets.load_dataset_builder(name, **_arguments(spec, name, options))
    config = builder.config
    files = config.data_files or {}
    split = spec.split or _only(spec, [str(name) for name in files])
    uris = tuple(map(str, files.get(split, ())))
    plain = builder.dataset_name is not None and isinstance(builder, Parquet)
    if not plain or not all(uri.endswith(".parquet") and "::" not in uri for uri in uris):
        return None
    if not uris or config.columns is not None or config.filters is not None:
        return None
    return ParquetSet(spec, uris, builder.info.features or config.features)


def check_names(spec: HfSpec) -> None:
    """Refuse names that `datasets` reads otherwise, and files that it would wait for.

    `datasets` takes a path for a pattern, which may lead to another folder. It leaves out files
    with `::` in their names without a word.

    Raises:
        SourceError: A place or a file of such a name, or one that is no regular file.
    """
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
    names = [name for name, _ in Walk(path)] if os.path.isdir(path) else []
    files = [f"{path}/{name}" for name in names] or [str(file) for file in fs.glob(path)]
    listed = any(name.rpartition("/")[2] in AUDIO_LISTS for name in names)
    for file in files:
        is_audio = file.lower().endswith(AUDIO_ENDINGS)
        if "::" in file.removeprefix(path) and not (is_audio and listed):
            raise SourceError(
                f"source {spec.uri}: `datasets` leaves out files with :: in their names, as "
                f"{one_line(file)}; rename them, or take kind: files or manifest"
            )
        # Audio files are opened by us, row by row.
        if not is_audio and os.path.exists(file):
            try:
                check_regular(file)
            except NotRegularError as error:
                raise SourceError(f"source {spec.uri}: {error}; move it away") from error


def _is_saved(fs: Any, path: str) -> bool:
    """Whether `save_to_disk` wrote this folder."""
    return any(fs.exists(f"{path}/{name}") for name in ("dataset_dict.json", "state.json"))


def _parquet_or_folder(spec: HfSpec, fs: Any, path: str) -> tuple[str, dict[str, Any]]:
    """What `datasets` is asked for: a local folder as it is, else the Parquet files."""
    local = is_local(spec.uri)
    is_file = path.endswith(".parquet")  # a web server's folder is asked for by reading it
    folder = not is_file and fs.isdir(path)
    if folder and local:
        return path, {}
    pattern = f"{spec.uri.rstrip('/')}/**/*.parquet" if folder else spec.uri
    return "parquet", {"data_files": path if local else pattern}


def check_hub_id(spec: HfSpec) -> None:
    """Whether a uri that is nothing local is a dataset of the hub; decided here where that can be.

    A folder that is missing looks like a hub id. `datasets` would ask the hub six times for it, so
    what lies below an existing folder is told at once, and anything else costs one request.

    Raises:
        SourceError, FileNotFoundError: It is neither.
    """
    below = spec.uri.partition("/")[0]
    if not HUB_ID.fullmatch(spec.uri) or ("/" in spec.uri and os.path.isdir(below)):
        raise FileNotFoundError(spec.uri)
    if datasets.config.HF_HUB_OFFLINE:
        return  # the local cache decides, without a request
    hub = HfApi(endpoint=datasets.config.HF_ENDPOINT, token=spec.storage_options.get("token"))
    try:
        hub.dataset_info(spec.uri, revision=spec.revision, timeout=HUB_TIMEOUT_S)
    except HfHubHTTPError as error:
        if error.response is not None and error.response.status_code >= 500:
            return  # the hub is there and has trouble: loading tries for longer
        raise _neither(spec, error) from error
    except Exception as error:  # its HTTP library has its own roots: no route, no name, no answer
        raise _neither(spec, error) from error


def _neither(spec: HfSpec, error: Exception) -> SourceError:
    return SourceError(
        f"source {spec.uri}: no such file or folder in {os.getcwd()}, and no dataset of that name "
        f"on the hub ({named_line(error)}); check source.uri, or set HF_HUB_OFFLINE=1 for a copy "
        "in the local cache"
    )


def local_exists(uri: str) -> bool:
    """Whether a local path or glob names anything."""
    fs, path = filesystem(uri)
    return bool(fs.exists(path) or fs.glob(path))


def _arguments(spec: HfSpec, name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Of `load_dataset`, beside the name."""
    options = dict(options)
    if name != "parquet":
        options |= {"name": spec.config, "revision": spec.revision}
        options["token"] = spec.storage_options.get("token")
    elif not is_local(spec.uri):
        options["storage_options"] = dict(spec.storage_options)  # `datasets` writes into it
        # Without etags a file that was replaced in the bucket would come from the old download.
        options["download_config"] = datasets.DownloadConfig(
            use_etag=True, storage_options=dict(spec.storage_options)
        )
    return options


def _load(spec: HfSpec, name: str, **given: Any) -> Any:
    """`load_dataset`, after finding the only split where none is named."""
    options = _arguments(spec, name, given)
    split = spec.split
    # A folder of files on this machine is read where it is: there is nothing to build.
    streaming = spec.streaming or (
        name != "parquet"
        and is_local(spec.uri)
        and local_exists(spec.uri)
        and datasets.load_dataset_builder(name, **options).name == AUDIO_FOLDER
    )
    if split is None:
        # A stream of every split costs listings only; without it all splits would be downloaded.
        split = _only(spec, list(datasets.load_dataset(name, streaming=True, **options)))
    return datasets.load_dataset(name, split=split, streaming=streaming, **options)


def _load_saved(spec: HfSpec) -> Any:
    options = {} if is_local(spec.uri) else spec.storage_options
    loaded = datasets.load_from_disk(spec.uri, storage_options=options or None)
    if isinstance(loaded, Mapping):
        split = spec.split or _only(spec, list(loaded))
        if split not in loaded:
            raise SourceError(
                f"source {spec.uri}: no split {split!r}{nearest(split, list(loaded))} "
                f"(splits: {', '.join(loaded)})"
            )
        loaded = loaded[split]
    return loaded.to_iterable_dataset() if spec.streaming else loaded


def _only(spec: HfSpec, splits: list[str]) -> str:
    if len(splits) != 1:
        raise SourceError(f"source {spec.uri}: set source.split to one of {', '.join(splits)}")
    return splits[0]


def public_dataset_uri(spec: HfSpec) -> str:
    """The dataset's uri as other processes see it: absolute for local paths."""
    if not is_local(spec.uri) or not local_exists(spec.uri):
        return spec.uri
    return public_uri(*filesystem(spec.uri))


@contextmanager
def quiet() -> Iterator[None]:
    """No progress bars while loading: the job has its own."""
    shown = not datasets.are_progress_bars_disabled()
    datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def dataset_folder(spec: HfSpec) -> str | None:
    """The folder or prefix that a dataset lies in; None for one of the hub."""
    uri = public_dataset_uri(spec)
    if is_local(uri):
        if not local_exists(uri):
            return None
        return uri if os.path.isdir(uri) else _before_magic(uri)
    scheme, separator, path = uri.partition("://")
    return f"{scheme}{separator}{_before_magic(path)}"


def _before_magic(path: str) -> str:
    """The folders in front of the first glob character and of the file's name."""
    return posixpath.dirname(MAGIC_CHARACTERS.split(path, maxsplit=1)[0])


def dataset_confinement(spec: HfSpec) -> Confinement:
    """Audio cells without bytes may name what belongs to the dataset."""
    folder = dataset_folder(spec)
    if folder is None:
        hub = f"hf://datasets/{spec.uri}"
        config = datasets.config
        caches = (config.HF_DATASETS_CACHE, config.DOWNLOADED_DATASETS_PATH, HF_HUB_CACHE)
        own = [hub, *(os.path.abspath(cache) for cache in caches)]
        return Confinement(own, spec.allow, spec.storage_options, store=hub)
    if is_local(folder):
        return Confinement([folder], spec.allow, spec.storage_options)
    store = store_of(folder)
    return Confinement([folder, store], spec.allow, spec.storage_options, store=store)


ROW_MARK = re.compile(r"#(?:shard=(\d+)&)?row=(\d+)$")


@dataclass(frozen=True)
class Place:
    """Where a row is: its file shard when streaming, and its number there or in the dataset."""

    shard: int | None
    row: int

    def mark(self) -> str:
        return f"#row={self.row}" if self.shard is None else f"#shard={self.shard}&row={self.row}"

    @classmethod
    def of(cls, item: Item) -> Place:
        found = ROW_MARK.search(item.uri)
        if found is None:
            raise UnreadableError(f"{item.uri}: expected a uri ending in #row=N")
        return cls(None if found[1] is None else int(found[1]), int(found[2]))


def is_away(error: Exception) -> bool:
    """Whether the dataset's files could not be had, as against what is in them."""
    if isinstance(error, ValueError | IndexError | KeyError) and http_status(error) is None:
        return False  # a damaged or shorter file
    return classify(error) in (ErrorKind.REFUSED, ErrorKind.OUTAGE)
