"""A missing module or a failing process is never reported as a damaged file."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import earmill
from earmill import CommitError, FeatureLoader, compute_statistics, open_features
from earmill.pipeline.common.errors import ExtensionError, MissingPackageError
from earmill.pipeline.common.missing_modules import missing_package, needed_modules
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.formats.parquet import format as parquet_format
from earmill.pipeline.formats.zarr import format as zarr_format
from earmill.pipeline.storage import documents
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.reader_data import write_set

KERNELS = "amtcore.kernels.vector"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("missing") / "features"
    write_set(
        path, n_rows=6, rows_per_shard=3, formats=("zarr", "parquet", "webdataset"), finalised=True
    )
    return path


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Take a module away, and what of ours has imported it."""

    def take(module: str) -> None:
        for name in [*sys.modules]:
            if name.split(".")[0] == module or name.startswith(LATE):
                parent, _, own = name.rpartition(".")
                # `from parent import own` takes the attribute of a module that was taken away.
                if hasattr(sys.modules.get(parent), own):
                    monkeypatch.delattr(sys.modules[parent], own)
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, module, None)

    return take


# Modules that are imported when a file is first read.
LATE = ("earmill.pipeline.formats.zarr.", "earmill.pipeline.formats.parquet.", f"{KERNELS}.")


@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_a_row_names_the_module_and_the_command(
    place: Path, without: Callable[[str], None], fmt: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ds = open_features(place, format=fmt)

    def fail(*_: Any, **__: Any) -> Any:
        raise ModuleNotFoundError("No module named 'numcodecs'", name="numcodecs")

    shard = {"zarr": zarr_format.ZarrShard, "parquet": parquet_format.ParquetShard}[fmt]
    monkeypatch.setattr(shard, "pieces", fail)
    for read in (lambda: ds[0], lambda: ds.slice(0, 0.0), lambda: compute_statistics(ds)):
        with pytest.raises(MissingPackageError) as told:
            read()
        text = str(told.value)
        assert "the module numcodecs is not installed here: run pip install 'numcodecs>=" in text
        assert "damaged" not in text and "\n" not in text
    with pytest.raises(MissingPackageError, match="run pip install 'numcodecs>="):
        next(iter(FeatureLoader(ds.iterable(batch_size=2))))


def test_an_opening_names_the_module_of_the_format(
    place: Path, without: Callable[[str], None]
) -> None:
    without("numcodecs")
    with pytest.raises(ExtensionError, match=r"'zarr'.* run pip install 'numcodecs>="):
        open_features(place, format="zarr")


def test_a_name_of_earmill_names_what_it_lacks(
    without: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(earmill.__dict__, "events", raising=False)
    monkeypatch.delitem(sys.modules, "earmill.pipeline.driver.events", raising=False)
    monkeypatch.setitem(sys.modules, "earmill.pipeline.driver", None)
    with pytest.raises(MissingPackageError, match=r"earmill\.events: a module cannot be imp"):
        earmill.events  # noqa: B018


@pytest.mark.parametrize(
    ("module", "command"),
    [
        ("gcsfs.core", "run pip install 'earmill[gcs]'"),
        ("numba.core", "run pip install 'earmill[extract]'"),
        ("ray", "run pip install 'earmill[ray]'"),
        ("datasets", "run pip install 'earmill[hf]'"),
        ("yaml", "run pip install 'pyyaml>=6.0'"),
        ("google_crc32c", "run pip install 'google-crc32c>=1.6'"),
        ("somebody_elses", "run pip install somebody-elses"),
    ],
)
def test_the_command_has_versions_and_extras(module: str, command: str) -> None:
    error = ModuleNotFoundError(f"No module named {module!r}", name=module)
    assert str(missing_package(error)).endswith(f"is not installed here: {command}")


def test_a_module_that_is_there_and_broken_is_installed_again() -> None:
    error = ImportError("Numba needs NumPy 2.4 or less. Got NumPy 2.9.", name="numba")
    said = str(missing_package(error, "row 'a'"))
    assert said.startswith("row 'a': the module numba cannot be imported here (Numba needs NumPy")
    assert said.endswith("run pip install --force-reinstall 'earmill[extract]'")
    with pytest.raises(MissingPackageError, match=r"a module cannot be imported here .*earmill"):
        with needed_modules():
            raise ImportError("cannot import name 'x' from 'earmill.y'", name="earmill.y")


FAULTS = {
    "memory": (MemoryError("no room"), MemoryError, "no room"),
    "memory of Arrow": (pa.ArrowMemoryError("malloc failed"), MemoryError, "malloc failed"),
    "a fault of the program": (
        AttributeError("'NoneType' object has no attribute 'x'"),
        CommitError,
        "holds what was committed, yet it cannot be read here .AttributeError",
    ),
    "a library that does not load": (
        OSError("Could not find shared object file"),
        CommitError,
        "this is a fault of a program, not of the file",
    ),
    "no right": (PermissionError(13, "Permission denied"), PermissionError, "Permission denied"),
    "stopped": (KeyboardInterrupt("now"), KeyboardInterrupt, "now"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("fmt", ["zarr", "parquet"])
def test_what_fails_here_is_no_damage(
    place: Path, fmt: str, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    raised, kind, message = FAULTS[fault]
    ds = open_features(place, format=fmt)

    def fail(*_: Any, **__: Any) -> Any:
        raise raised

    shard = {"zarr": zarr_format.ZarrShard, "parquet": parquet_format.ParquetShard}[fmt]
    monkeypatch.setattr(shard, "pieces", fail)
    with pytest.raises(kind, match=message) as told:
        ds[0]
    assert "damaged" not in str(told.value)


def test_a_fault_that_comes_of_damage_is_told_as_damage(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bytes decide: here they are not those that were committed."""
    copy = shutil.copytree(place, tmp_path / "copy")
    ds = open_features(copy, format="parquet")
    (file,) = (copy / "data").glob("00000-*.parquet")
    file.write_bytes(file.read_bytes()[:-1] + b"?")

    def fail(*_: Any, **__: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'x'")

    monkeypatch.setattr(parquet_format.ParquetShard, "__init__", fail)
    with pytest.raises(CommitError, match="is missing or damaged although it is committed"):
        ds[0]
    file.unlink()
    with pytest.raises(CommitError, match="is missing or damaged although it is committed"):
        ds[0]


def test_too_little_memory_for_a_table_is_no_problem_of_the_dataset(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full:
        def __init__(self, *_: Any, **__: Any) -> None:
            raise pa.ArrowMemoryError("malloc failed")

    monkeypatch.setattr(documents.pq, "ParquetFile", Full)
    with pytest.raises(MemoryError, match="malloc failed"):
        verify(Layout.open(place))
    with pytest.raises(MemoryError, match="malloc failed"):
        open_features(place)
