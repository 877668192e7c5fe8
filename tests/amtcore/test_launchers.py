"""The interpreter of the GPU's kernels is a distribution of its own, found by an entry point."""

from __future__ import annotations

import subprocess
import sys

import pytest

from amtcore.errors import BackendError
from amtcore.kernels import devices as chosen

IMPORTED = """
import sys, amtcore.features.registry as build
build.build_extractor("dau1997")
print(sorted(name for name in sys.modules if name.startswith("amtcore_interpreter")))
"""


def test_a_missing_interpreter_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen._interpreted.cache_clear()
    with monkeypatch.context() as patch:
        patch.setattr(chosen, "entry_points", lambda **_: ())
        with pytest.raises(BackendError, match="pip install amtcore-interpreter"):
            chosen.get_backend("interpreted")
    assert chosen.get_backend("interpreted").name == "interpreted"


def test_the_models_do_not_import_it() -> None:
    made = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, text=True, check=True
    )
    assert made.stdout.strip() == "[]"
