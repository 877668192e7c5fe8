"""Compiled kernels are code: a folder that others can write to is refused before one is loaded."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from amtcore.errors import KernelCacheError
from amtcore.kernels.vector.kernel_cache import check_private

OTHER_USER = 12345
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")


def made(path: Path, mode: int) -> Path:
    path.mkdir(parents=True)
    path.chmod(mode)
    return path


@pytest.mark.parametrize("mode", [0o1777, 0o777, 0o702])
def test_a_folder_for_everybody_is_refused(mode: int, tmp_path: Path) -> None:
    with pytest.raises(KernelCacheError, match="everybody can write"):
        check_private(made(tmp_path / "cache", mode))


@pytest.mark.parametrize("mode", [0o700, 0o755])
def test_a_folder_of_ones_own_is_fine(mode: int, tmp_path: Path) -> None:
    made(tmp_path / "cache" / "chain_0a", mode)
    (tmp_path / "cache" / "chain_0a" / "run.nbi").write_bytes(b"")
    check_private(tmp_path / "cache")


def test_what_was_planted_while_it_was_open_is_found(tmp_path: Path) -> None:
    cache = made(tmp_path / "cache", 0o700)
    made(cache / "chain_0a", 0o777)
    with pytest.raises(KernelCacheError, match="chain_0a"):
        check_private(cache)
    (cache / "chain_0a").chmod(0o700)
    planted = cache / "chain_0a" / "run.nbi"
    planted.write_bytes(b"")
    planted.chmod(0o666)
    with pytest.raises(KernelCacheError, match=r"run\.nbi"):
        check_private(cache)


def test_a_parent_that_everybody_can_rename_in_is_refused(tmp_path: Path) -> None:
    cache = made(made(tmp_path / "open", 0o777) / "cache", 0o700)
    with pytest.raises(KernelCacheError, match="open: everybody can write"):
        check_private(cache)
    (tmp_path / "open").chmod(0o1777)  # as /tmp: only owners rename
    check_private(cache)
    link = tmp_path / "link"
    link.symlink_to(cache)
    (tmp_path / "open").chmod(0o777)
    with pytest.raises(KernelCacheError):
        check_private(link)


@as_root
def test_files_of_another_user_and_of_a_group_are_refused(tmp_path: Path) -> None:
    cache = made(tmp_path / "cache", 0o700)
    planted = cache / "run.nbi"
    planted.write_bytes(b"")
    os.chown(planted, OTHER_USER, 0)
    with pytest.raises(KernelCacheError, match=f"belongs to user {OTHER_USER}"):
        check_private(cache)
    planted.unlink()
    os.chown(cache, 0, OTHER_USER)
    cache.chmod(0o770)
    with pytest.raises(KernelCacheError, match="its group can write"):
        check_private(cache)
