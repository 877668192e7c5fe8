"""Publish local files and folders: durable first, then visible in one step.

For outputs on a local disk. The source may be on another disk than the target; it is then copied
beside the target under a hidden name and renamed there. What was renamed outlives a power cut once
`sync_names` has returned: parts that are moved in one after the other share that.
"""

from __future__ import annotations

import errno
import os
import secrets
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.storage.atomic_create import make_folder, sync_folder

MKDIR_TRIES = 100


def new_folder(parent: Path, name: str) -> Path:
    """A new folder below `parent`, which another worker may remove at any time while empty."""
    return make_below(parent / f"{name}-{secrets.token_hex(4)}")


def make_below(folder: Path, *, exist_ok: bool = False) -> Path:
    """Make a folder whose parent another worker may remove at any time while empty."""
    for _ in range(MKDIR_TRIES):
        # pathlib reports a parent that vanishes under its hands as missing or as existing.
        with suppress(FileNotFoundError, FileExistsError):
            folder.mkdir(parents=True, exist_ok=exist_ok)
            return folder
    raise OutputError(f"{folder.parent} cannot be made: another process keeps removing it")


def move_in(source: Path, target: Path) -> None:
    """Publish a local file or folder at `target` in one visible step, its content durable first."""
    make_folder(str(target.parent))
    _sync_tree(source)
    try:
        os.rename(source, target)
    except OSError as err:
        if err.errno != errno.EXDEV:
            raise
        _copy_in(source, target)


def sync_names(targets: Iterable[str]) -> None:
    """Flush the folders that name these files or folders to the disk, each once."""
    for folder in dict.fromkeys(map(os.path.dirname, targets)):
        sync_folder(folder)


def remove(path: Path) -> None:
    """Remove a file or a folder, if it is there."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        shutil.rmtree(path, ignore_errors=True)


def files_below(folder: str | Path) -> list[str]:
    """Every file below a folder, as `a/b`, in the order of paths."""
    return sorted(_below(folder, ""), key=lambda name: name.split("/"))


def _below(folder: str | Path, prefix: str) -> Iterator[str]:
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _below(entry.path, f"{prefix}{entry.name}/")
            else:
                yield prefix + entry.name


def _copy_in(source: Path, target: Path) -> None:
    """The same across two disks: copy beside the target under a hidden name, then rename."""
    hidden = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        if source.is_dir():
            shutil.copytree(source, hidden)
        else:
            shutil.copyfile(source, hidden)
        _sync_tree(hidden)
        os.rename(hidden, target)
    except OSError:
        shutil.rmtree(hidden, ignore_errors=True)
        hidden.unlink(missing_ok=True)
        raise


def _sync_tree(path: Path) -> None:
    """Flush every file below `path`, and the folders that name them, to the disk."""
    for entry in [path, *(path.rglob("*") if path.is_dir() else ())]:
        sync_folder(str(entry))
