"""Workers keep the memory of clips and features, in huge pages where the system has them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from earmill.pipeline.driver.executor import KEPT_MEMORY
from earmill.pipeline.driver.local_process import LocalProcess
from tests.pipeline.runners import MakeRunner

HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")
# Whether the heap asked for huge pages, once a clip's worth has come from it.
ASKED = """
held = [bytes(1 << 20) for _ in range(20)]
maps = open("/proc/self/smaps").read()
heap = maps[maps.index("[heap]"):]
print("hg" in heap[heap.index("VmFlags:"):].splitlines()[0].split())
"""


def asked(environment: dict[str, str]) -> str:
    env = {key: value for key, value in os.environ.items() if key not in KEPT_MEMORY}
    command = [sys.executable, "-c", ASKED]
    done = subprocess.run(
        command, env=env | environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.skipif(
    not HUGE_PAGES.exists() or "[madvise]" not in HUGE_PAGES.read_text(),
    reason="needs a Linux that gives huge pages to who asks for them",
)
def test_the_heap_of_a_worker_asks_for_huge_pages() -> None:
    assert asked({}) == "False"
    assert asked(KEPT_MEMORY) == "True"


def test_what_the_user_has_set_for_the_c_library_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in KEPT_MEMORY:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    worker = LocalProcess(MakeRunner(str(tmp_path)), {}, shards=1)
    try:
        worker.call("warm_up", ())
        assert worker.connection.poll(60.0)
        worker.read()
        given = Path(f"/proc/{worker.pid}/environ").read_bytes().split(b"\0")
    finally:
        worker.kill()
    assert b"GLIBC_TUNABLES=glibc.malloc.check=0" in given
    others = {f"{key}={value}".encode() for key, value in KEPT_MEMORY.items()}
    assert len(others & set(given)) == len(KEPT_MEMORY) - 1
