"""Publishing on a local disk: one visible step, durable first, nothing left behind."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import earmill.pipeline.storage.local_store as local_store
from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.storage.fsspec_store import FsspecBackend, MemoryBackend
from earmill.pipeline.storage.local_store import (
    LocalBackend,
    files_below,
    make_folder,
    move_in,
    write_local,
)
from earmill.pipeline.storage.scratch import MKDIR_TRIES, make_below


def tree(root: Path) -> dict[str, bytes]:
    """Every file below a folder, hidden ones included."""
    files = (path for path in root.rglob("*") if path.is_file())
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in files}


def filled(root: Path, kind: str) -> Path:
    """A file, or a folder with files and folders in it."""
    root.mkdir(parents=True, exist_ok=True)
    if kind == "file":
        path = root / "made"
        path.write_bytes(b"content")
        return path
    folder = root / "made"
    (folder / "deep/er").mkdir(parents=True)
    (folder / "a").write_bytes(b"1")
    (folder / "deep/er/b").write_bytes(b"22")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was flushed and what was renamed, in order, by name."""
    log: list[str] = []
    real_sync, real_rename = os.fsync, os.rename

    def fsync(handle: int) -> None:
        log.append("sync " + os.path.basename(os.readlink(f"/proc/self/fd/{handle}")))
        real_sync(handle)

    def rename(source: Any, target: Any) -> None:
        log.append("rename " + os.path.basename(target))
        real_rename(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    return log


def failing(number: int, times: int = 1) -> Callable[..., None]:
    """`os.rename` that fails so many times, then works."""
    real, left = os.rename, [times]

    def rename(source: Any, target: Any) -> None:
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number))
        real(source, target)

    return rename


class TestMoveIn:
    @pytest.mark.parametrize("kind", ["file", "folder"])
    @pytest.mark.parametrize("across", [False, True], ids=["one disk", "two disks"])
    def test_everything_arrives(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, across: bool
    ) -> None:
        source = filled(tmp_path / "scratch", kind)
        before = tree(source) if kind == "folder" else {"": source.read_bytes()}
        if across:
            monkeypatch.setattr(os, "rename", failing(errno.EXDEV))
        target = tmp_path / "new/place/target"
        move_in(source, target)
        after = tree(target) if kind == "folder" else {"": target.read_bytes()}
        assert after == before
        assert [path.name for path in target.parent.iterdir()] == ["target"]
        if kind == "folder":
            assert (target / "empty").is_dir()

    def test_flushed_before_it_is_seen_and_its_name_after(
        self, tmp_path: Path, synced: list[str]
    ) -> None:
        """A crash right behind the rename finds the content on the disk."""
        source = filled(tmp_path / "scratch", "folder")
        move_in(source, tmp_path / "out/target")
        at = synced.index("rename target")
        assert {"sync a", "sync b", "sync er", "sync deep", "sync made"} <= set(synced[:at])
        assert synced[at + 1 :] == []
        LocalBackend().settle([str(tmp_path / "out/target")])
        assert synced[at + 1 :] == ["sync out"]

    def test_a_folder_that_is_made_is_on_the_disk_before_what_goes_into_it(
        self, tmp_path: Path, synced: list[str]
    ) -> None:
        """Else a power cut could leave a commit, and not the folder of its files."""
        source = filled(tmp_path / "scratch", "file")
        move_in(source, tmp_path / "new/place/target")
        assert synced == [f"sync {tmp_path.name}", "sync new", "sync made", "rename target"]

    def test_a_folder_that_may_not_be_listed_is_no_obstacle(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Of /scratch on many clusters one may make folders and not read it."""
        real = os.open

        def refused(path: Any, *more: Any) -> int:
            if str(path) == str(tmp_path):
                raise PermissionError(errno.EACCES, "Permission denied")
            return real(path, *more)

        monkeypatch.setattr(os, "open", refused)
        make_folder(str(tmp_path / "new/place"))
        assert (tmp_path / "new/place").is_dir()

    def test_a_name_without_a_folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        make_folder("")
        make_folder("made")
        assert (tmp_path / "made").is_dir()

    def test_names_share_the_flush_of_their_folder(self, tmp_path: Path, synced: list[str]) -> None:
        for folder in ("one", "two"):
            (tmp_path / folder).mkdir()
        LocalBackend().settle([str(tmp_path / name) for name in ("one/a", "two/b", "one/c")])
        assert synced == ["sync one", "sync two"]

    def test_files_below_a_folder(self, tmp_path: Path) -> None:
        made = filled(tmp_path, "folder")
        (made / "deep-er").write_bytes(b"3")
        assert files_below(made) == ["a", "deep/er/b", "deep-er"]
        assert files_below(made / "empty") == []

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_across_disks_the_copy_is_flushed_under_a_hidden_name(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        seen: list[str] = []
        real = os.rename

        def rename(source: Any, target: Any) -> None:
            if not Path(source).name.startswith("."):
                raise OSError(errno.EXDEV, "Invalid cross-device link")
            seen.extend(path.name for path in Path(target).parent.iterdir())
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
        move_in(filled(tmp_path / "scratch", kind), tmp_path / "out/target")
        assert len(seen) == 1
        assert seen[0].startswith(".target.")

    @pytest.mark.parametrize("kind", ["file", "folder"])
    def test_a_copy_that_fails_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
    ) -> None:
        monkeypatch.setattr(os, "rename", failing(errno.EXDEV, times=2))
        source = filled(tmp_path / "scratch", kind)
        with pytest.raises(OSError, match="cross-device"):
            move_in(source, tmp_path / "out/target")
        assert list((tmp_path / "out").iterdir()) == []
        assert source.exists(), "what was made is still there for another try"

    def test_a_disk_that_is_full_while_copying(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def full(source: Any, target: Any) -> None:
            Path(target).write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "rename", failing(errno.EXDEV))
        monkeypatch.setattr(local_store.shutil, "copyfile", full)
        with pytest.raises(OSError, match="No space left"):
            move_in(filled(tmp_path / "scratch", "file"), tmp_path / "out/target")
        assert list((tmp_path / "out").iterdir()) == []

    @pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS, errno.ENOTEMPTY])
    def test_other_failures_are_no_reason_to_copy(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        monkeypatch.setattr(os, "rename", failing(number))
        with pytest.raises(OSError) as caught:
            move_in(filled(tmp_path / "scratch", "folder"), tmp_path / "out/target")
        assert caught.value.errno == number
        assert list((tmp_path / "out").iterdir()) == []


class TestNewFolder:
    def test_each_call_makes_another(self, tmp_path: Path) -> None:
        made = {make_below(tmp_path / f"deep/scratch/shard-{n}") for n in range(20)}
        assert len(made) == 20
        assert all(path.is_dir() and path.name.startswith("shard-") for path in made)

    @pytest.mark.parametrize("error", [FileNotFoundError, FileExistsError])
    def test_a_parent_that_vanishes_is_made_again(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[OSError]
    ) -> None:
        real, left = Path.mkdir, [5]

        def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
            if left[0]:
                left[0] -= 1
                raise error(str(self))
            real(self, *args, **kwargs)

        monkeypatch.setattr(Path, "mkdir", mkdir)
        assert make_below(tmp_path / "shard").is_dir()

    def test_one_that_always_vanishes_is_said(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tries = []

        def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
            tries.append(self)
            raise FileNotFoundError(str(self))

        monkeypatch.setattr(Path, "mkdir", mkdir)
        with pytest.raises(OutputError, match="another process keeps removing it"):
            make_below(tmp_path / "shard")
        assert len(tries) == MKDIR_TRIES

    def test_no_right_is_no_race(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def mkdir(self: Path, *args: Any, **kwargs: Any) -> None:
            raise PermissionError(errno.EACCES, "Permission denied")

        monkeypatch.setattr(Path, "mkdir", mkdir)
        with pytest.raises(PermissionError):
            make_below(tmp_path / "shard")


class TestWriteLocal:
    def test_new_and_replaced_content(self, tmp_path: Path) -> None:
        path = tmp_path / "a/b/current.json"
        for data in (b"one", b"", b"three" * 1000):
            write_local(str(path), data)
            assert path.read_bytes() == data
            assert list(path.parent.iterdir()) == [path]

    def test_it_obeys_the_umask(self, tmp_path: Path) -> None:
        """As any file of the user's; not the 0600 of temporary files."""
        old = os.umask(0o027)
        try:
            write_local(str(tmp_path / "x"), b"1")
            assert LocalBackend().create(str(tmp_path / "y"), b"1")
        finally:
            os.umask(old)
        for name in ("x", "y"):
            assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640

    def test_flushed_before_it_counts(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        log: list[str] = []
        real_sync, real_replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", lambda h: (log.append("sync"), real_sync(h))[1])
        monkeypatch.setattr(
            os, "replace", lambda a, b: (log.append("replace"), real_replace(a, b))[1]
        )
        write_local(str(tmp_path / "x"), b"1")
        assert log == ["sync", "replace", "sync"]

    @pytest.mark.parametrize("step", ["fsync", "replace"])
    def test_a_failure_keeps_the_old_content_and_leaves_nothing(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
    ) -> None:
        path = tmp_path / "x"
        write_local(str(path), b"old")

        def broken(*args: Any) -> None:
            raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(os, step, broken)
        with pytest.raises(OSError, match="Input/output"):
            write_local(str(path), b"new")
        assert tree(tmp_path) == {"x": b"old"}


class TestCreateLocal:
    def test_the_first_wins(self, tmp_path: Path) -> None:
        path = str(tmp_path / "commits/00000.json")
        assert LocalBackend().create(path, b"first")
        assert not LocalBackend().create(path, b"second")
        assert tree(tmp_path) == {"commits/00000.json": b"first"}

    @pytest.mark.parametrize("number", sorted(local_store._NO_LINKS))
    def test_without_links_it_is_exclusive_too(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
    ) -> None:
        def link(*args: Any) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "link", link)
        path = str(tmp_path / "x")
        assert LocalBackend().create(path, b"first")
        assert not LocalBackend().create(path, b"second")
        assert tree(tmp_path) == {"x": b"first"}

    def test_another_failure_of_a_link_is_raised(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def link(*args: Any) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "link", link)
        with pytest.raises(OSError, match="No space"):
            LocalBackend().create(str(tmp_path / "x"), b"first")
        assert tree(tmp_path) == {}

    def test_a_full_disk_leaves_no_half_of_a_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither beside the target nor, without links, in its place."""
        sync = os.fsync

        def link(*args: Any) -> None:
            raise OSError(errno.EPERM, "Operation not permitted")

        def full(handle: int) -> None:
            if not left:
                raise OSError(errno.ENOSPC, "No space left on device")
            left.pop()(handle)

        monkeypatch.setattr(os, "link", link)
        monkeypatch.setattr(os, "fsync", full)
        left: list[Any] = []
        for more in ([], [sync]):
            left[:] = more
            with pytest.raises(OSError, match="No space"):
                LocalBackend().create(str(tmp_path / "x"), b"first")
            assert tree(tmp_path) == {}


class TestCreateRemote:
    def test_memory(self) -> None:
        import fsspec

        fs = fsspec.filesystem("memory")
        assert MemoryBackend(fs).create("/test_local_files/x", b"first")
        assert not MemoryBackend(fs).create("/test_local_files/x", b"second")
        assert fs.cat_file("/test_local_files/x") == b"first"
        fs.rm("/test_local_files", recursive=True)

    @pytest.mark.parametrize("protocol", ["ftp", ("http", "https"), "sftp"])
    def test_a_store_without_a_create_is_refused(self, protocol: Any) -> None:
        class Store:
            pass

        store = Store()
        store.protocol = protocol  # type: ignore[attr-defined]
        name = protocol if isinstance(protocol, str) else protocol[0]
        with pytest.raises(OutputError, match=f"{name}:// has no atomic create-if-absent"):
            FsspecBackend(store).create("x", b"1")
