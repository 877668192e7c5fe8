"""PTX on disk: compiled once, made again when it is stale or damaged, never from others' hands."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numba
import pytest

from amtcore.errors import KernelCacheError
from amtcore.kernels.vector import kernel_cache
from amtcore.kernels.vector.kernel_cache import cached_ptx

PTX = ".version 7.0\n.target sm_80\r\n// µ\n"


class Compiler:
    """Counts how often it is asked."""

    def __init__(self, ptx: str = PTX) -> None:
        self.ptx, self.calls = ptx, 0

    def __call__(self) -> str:
        self.calls += 1
        return self.ptx


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """NUMBA_CACHE_DIR of this test."""
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "cache"))
    kernel_cache._made_private.cache_clear()
    yield tmp_path / "cache" / "amtcore_kernels"
    kernel_cache._made_private.cache_clear()


def test_a_kernel_is_compiled_once(folder: Path) -> None:
    compiler = Compiler()
    assert cached_ptx("forward", "dau1997 f32", compiler) == PTX
    assert cached_ptx("forward", "dau1997 f32", compiler) == PTX
    assert compiler.calls == 1
    assert folder.stat().st_mode & 0o777 == 0o700
    other = Compiler("other")
    assert cached_ptx("forward", "dau1997 f64", other) == "other"
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("change", ["sources", "llvmlite", "numba"])
def test_changed_sources_and_compilers_compile_again(
    change: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached_ptx("forward", "dau1997", Compiler("old"))
    with monkeypatch.context() as changed:
        if change == "sources":
            changed.setattr(kernel_cache, "sources_digest", lambda: "another hash")
        else:
            changed.setattr(f"{change}.__version__", "0.0")
        assert cached_ptx("forward", "dau1997", Compiler("new")) == "new"
        assert cached_ptx("forward", "dau1997", Compiler("newer")) == "new"
    assert cached_ptx("forward", "dau1997", Compiler("newest")) == "old"


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "head", "binary"])
def test_a_damaged_file_is_made_again(damage: str, folder: Path) -> None:
    cached_ptx("forward", "dau1997", Compiler())
    (path,) = folder.iterdir()
    kept = path.read_bytes()
    broken = {
        "cut": kept[:-3],
        "bit": kept[:-5] + bytes([kept[-5] ^ 1]) + kept[-4:],
        "empty": b"",
        "head": kept[1:],
        "binary": b"\xff\x00" * 40,
    }
    path.write_bytes(broken[damage])
    compiler = Compiler()
    assert cached_ptx("forward", "dau1997", compiler) == PTX and compiler.calls == 1
    assert path.read_bytes() == kept


def test_an_unwritable_place_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path / "file"))
    compiler = Compiler()
    assert [cached_ptx("forward", "dau1997", compiler) for _ in range(2)] == [PTX, PTX]
    assert compiler.calls == 2


def test_a_write_that_fails_leaves_nothing(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_source: object, _target: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert cached_ptx("forward", "dau1997", Compiler()) == PTX
    assert list(folder.iterdir()) == []


def test_a_folder_of_others_is_refused(folder: Path) -> None:
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(KernelCacheError, match="everybody can write to it"):
        cached_ptx("forward", "dau1997", Compiler())


@pytest.mark.parametrize("writable", [True, False])
def test_without_numba_cache_dir_it_lies_where_numba_goes(
    writable: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", "")
    monkeypatch.setattr(kernel_cache, "KERNELS", tmp_path / "kernels")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.setattr("os.access", lambda *_: writable)
    cached_ptx("forward", "dau1997", Compiler())
    (path,) = tmp_path.rglob("*.ptx")
    at_home = tmp_path / "home" / "numba" / "amtcore_kernels"
    assert path.parent == (tmp_path / "kernels" / "__pycache__" if writable else at_home)


_RACE = """
import sys, numba
numba.config.CACHE_DIR = sys.argv[1]
from amtcore.kernels.vector.kernel_cache import cached_ptx, own_folder
for again in range(60):
    text = f"kernel {again % 7} " * 2000
    assert cached_ptx("forward", str(again % 7), lambda: text) == text
    for path in own_folder().glob("*.ptx"):
        path.unlink(missing_ok=True)
"""


def test_two_processes_write_the_same_kernel_at_once(folder: Path) -> None:
    """Neither reads half of a file that the other writes."""
    command = [sys.executable, "-c", _RACE, str(folder.parent)]
    running = [subprocess.Popen(command, stderr=subprocess.PIPE) for _ in range(2)]
    assert [(each.communicate()[1], each.returncode) for each in running] == [(b"", 0)] * 2
    assert list(folder.iterdir()) == []
