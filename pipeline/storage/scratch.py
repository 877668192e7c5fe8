"""Where a shard is written before it is published: on the output's own disk where there is one.

Publishing is then a rename, and a full disk shows while encoding, before anything is visible. What
killed attempts leave there is removed by whoever comes next with the driver's lock.
"""

from __future__ import annotations

import os
import secrets
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_files import make_below, new_folder
from earmill.pipeline.storage.owned_folders import own_folder
from earmill.pipeline.storage.store_calls import store_call

SCRATCH_FOLDER = ".scratch"


@contextmanager
def private_scratch(layout: Layout, name: str) -> Iterator[Path]:
    """A local folder of one's own, removed at exit."""
    if not layout.is_local:
        with tempfile.TemporaryDirectory(prefix=f"{name}-", dir=own_folder()) as found:
            yield Path(found)
        return
    parent = Path(layout.root) / SCRATCH_FOLDER
    folder = new_folder(parent, name)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with suppress(OSError):  # not empty: somebody else works there
            parent.rmdir()


def shared_scratch(layout: Layout, name: str) -> Path | None:
    """The folder of this name, for all who know the name, until `clear_scratch`; None where the
    output has no disk.

    A folder for each shard is dear: a disk that has just removed many searches long for room for a
    new file.
    """
    if not layout.is_local:
        return None
    return make_below(Path(layout.root) / SCRATCH_FOLDER / name, exist_ok=True)


@store_call("cleared", None)
def clear_scratch(layout: Layout, name: str = "") -> None:
    """Remove what killed attempts left; of all only while holding the driver lock.

    Workers of a driver that was taken over may still publish out of it, and a deletion that has
    begun follows a folder through its rename. So it is moved out of their way first: what they try
    to publish afterwards is not found, and what they have published is not touched.

    Args:
        name: Of a shared folder, to remove this one alone.
    """
    if not layout.is_local:
        return
    root = Path(layout.root)
    with suppress(FileNotFoundError):
        aside = f"{SCRATCH_FOLDER}-{secrets.token_hex(4)}"
        os.rename(root / SCRATCH_FOLDER / name, root / aside)
    with suppress(OSError):  # not there, or somebody else works there
        os.rmdir(root / SCRATCH_FOLDER)
    for left in root.glob(f"{SCRATCH_FOLDER}-*"):
        shutil.rmtree(left, ignore_errors=True)
