"""Reading leaves nothing behind that could end the process: no thread of Arrow's, no abort.

Arrow's threads may let go of a Python buffer while the interpreter shuts down; that race is lost
now and then, so the test that cannot miss it counts threads, and twenty real exits stand beside it.
"""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.pipeline.reader_data import write_set

EXIT_CODE = 2
# The children are forked from a process that has imported little more than Arrow, and has read
# nothing yet: twenty exits for the price of one start. Then the process reads, and counts threads.
SCRIPT = """
import os, sys
from earmill.pipeline.storage.documents import table_of

index, folder = sys.argv[1:]

def leave():
    child = os.fork()
    if child == 0:
        table_of(open(index, "rb").read())
        sys.exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

print([leave() for _ in range(20)], flush=True)
import earmill.pipeline.reader.open
before = len(os.listdir("/proc/self/task"))
features = earmill.pipeline.reader.open.open_features(folder, format="parquet")
rows = [features[i].row_id for i in range(len(features))]
features.provenance(0)
print(len(os.listdir("/proc/self/task")) - before, len(rows))
"""


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Lines of the script, which writes nothing to standard error."""
    folder = tmp_path_factory.mktemp("closed")
    write_set(folder, finalised=True)
    command = [sys.executable, "-c", SCRIPT, *map(str, (folder / "index").iterdir()), str(folder)]
    # OpenBLAS ends its threads in a fork and starts them again when it is used.
    environment = os.environ | {"OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.stderr == ""
    return done.stdout.splitlines()


def test_twenty_exits_right_after_reading_give_the_code_that_was_asked_for(
    lines: list[str],
) -> None:
    assert lines[0] == str([EXIT_CODE] * 20)


@pytest.mark.skipif(sys.platform != "linux", reason="counts threads in /proc")
def test_reading_starts_no_thread_that_could_outlive_it(lines: list[str]) -> None:
    assert lines[1:] == ["0 20"]
