"""Temporary folders of killed processes are removed, and no folder that is in use."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from earmill.pipeline.storage import scratch
from earmill.pipeline.storage.scratch import OwnedFolder, own_folder, sweep

OWNER = """
import sys, time
from earmill.pipeline.storage.scratch import OwnedFolder
print(OwnedFolder(parent=sys.argv[1]).path, flush=True)
time.sleep(600)
"""


def started(code: str, folder: Path) -> tuple[subprocess.Popen[str], list[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, process.stdout.readline().split()


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.wait()
    if process.stdout is not None:
        process.stdout.close()


def test_a_folder_goes_with_the_next_run_once_its_owner_is_dead(tmp_path: Path) -> None:
    process, (folder,) = started(OWNER, tmp_path)
    try:
        (Path(folder) / "fetch-1").write_bytes(b"x")
        sweep(parent=str(tmp_path))
        assert (Path(folder) / "fetch-1").exists()
    finally:
        end(process)
    sweep(parent=str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_our_lock_is_somebody_elses(tmp_path: Path) -> None:
    (tmp_path / f"{scratch.PREFIX}mine").mkdir()
    mine = OwnedFolder(parent=str(tmp_path))
    sweep(parent=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 2
    mine.remove()
    mine.remove()
    assert [path.name for path in tmp_path.iterdir()] == [f"{scratch.PREFIX}mine"]


def test_a_process_has_one_folder_that_nobody_takes() -> None:
    folder = own_folder()
    sweep()
    assert own_folder() == folder and os.path.isdir(folder)
