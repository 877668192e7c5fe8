"""Cores of this process: a container's quota counts, and nonsense does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from earmill.pipeline.common.machine import cores as usable_cores


@pytest.mark.parametrize(
    ("quota", "cores"),
    [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("", None), ("1 0", None)],
)
def test_a_quota_limits_the_cores(tmp_path: Path, quota: str, cores: int | None) -> None:
    file = tmp_path / "cpu.max"
    everything = usable_cores(file)
    assert everything >= 1
    file.write_text(quota)
    assert usable_cores(file) == (cores or everything)
