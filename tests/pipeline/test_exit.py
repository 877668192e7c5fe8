"""Reading leaves nothing behind that could end the process: no thread of Arrow's, no abort.

Arrow's threads may let go of a Python buffer while the interpreter shuts down; that race is lost
now and then, so the test that cannot miss it counts threads, and twenty real exits stand beside it.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.pipeline.reader_data import write_set

EXIT_CODE = 2
# Forked from a process that holds little more than Arrow: twenty exits for the price of one start.
EXITS = """
import os, sys
from earmill.pipeline.storage.documents import table_of

def leave():
    child = os.fork()
    if child == 0:
        table_of(open(sys.argv[1], "rb").read())
        sys.exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([leave() for _ in range(20)])
"""
THREADS = """
import os, sys
import earmill.pipeline.reader.open
before = len(os.listdir("/proc/self/task"))
features = earmill.pipeline.reader.open.open_features(sys.argv[1], format="parquet")
rows = [features[i].row_id for i in range(len(features))]
features.provenance(0)
print(len(os.listdir("/proc/self/task")) - before, len(rows))
"""


@pytest.fixture(scope="module")
def closed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("closed")
    write_set(folder, finalised=True)
    return folder


def run(script: str, *args: object) -> str:
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, args)], capture_output=True, text=True, check=True
    )
    return done.stdout.strip() + done.stderr.strip()


def test_twenty_exits_right_after_reading_give_the_code_that_was_asked_for(closed: Path) -> None:
    assert run(EXITS, *(closed / "index").iterdir()) == str([EXIT_CODE] * 20)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_reading_starts_no_thread_that_could_outlive_it(closed: Path) -> None:
    assert run(THREADS, closed) == "0 20"
