"""The interpreter of the GPU's kernels is a distribution of its own, found by an entry point."""

from __future__ import annotations

import pytest

from amtcore.errors import BackendError
from amtcore.kernels import devices as chosen


def test_a_missing_interpreter_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen._interpreted.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(chosen, "entry_points", lambda **_: ())
        with pytest.raises(BackendError, match="pip install amtcore-interpreter"):
            chosen.get_backend("interpreted")
    assert chosen.get_backend("interpreted").name == "interpreted"
