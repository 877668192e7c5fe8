"""Another distribution adds an operation and a model by entry points, without touching amtcore.

Every built-in operation of `operation_examples` passes the same tests.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from amtcore.kernels.cpu.chain_loop import loop_of
from amtcore.kernels.operation import Example
from amtcore.kernels.registry import BUILT_IN, get_operation
from amtcore.testing.models import ModelConformance
from amtcore.testing.operations import OperationConformance

from .operation_examples import EXAMPLES

PLUGIN = Path(__file__).parents[1] / "plugin_distribution"


@pytest.fixture(scope="module", autouse=True)
def _installed() -> Iterator[None]:
    """The distribution is found as one that pip installed."""
    sys.path.insert(0, str(PLUGIN))
    get_operation.cache_clear()
    yield
    sys.path.remove(str(PLUGIN))
    get_operation.cache_clear()


def test_a_chain_with_a_plug_in_is_compiled_of_its_own_operations_alone() -> None:
    peak, cascade = map(get_operation, ("leaky_peak", "one_pole_cascade"))
    loop, table = loop_of(((cascade, 4), (peak, 0)))
    assert loop.operations == (peak, cascade) and table[:, 0].tolist() == [1, 0]
    assert loop_of(((cascade, 4),))[0].operations == BUILT_IN


class TestLeakyPeak(OperationConformance):
    operation = "leaky_peak"


class TestLeakyPeaks(ModelConformance):
    model = "leaky_peaks"
    other_params = {"tau": 0.02}


class TestBuiltIn(OperationConformance):
    """On the CPU; `test_warp_kernels` compares it with GPUs, `test_recurrences` compiles."""

    backends = ("cpu",)
    test_torch_func_and_a_compiler_give_the_same = None  # type: ignore[assignment]

    @pytest.fixture(autouse=True, params=EXAMPLES)
    def _named(self, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(type(self), "operation", request.param, raising=False)

    def examples(self) -> Sequence[Example]:
        return EXAMPLES[self.operation]()
