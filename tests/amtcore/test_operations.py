"""Descriptions of operations: what has none, or a wrong one, has no kernel and no gradient."""

from __future__ import annotations

from dataclasses import replace
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels import registry
from amtcore.kernels.chain import (
    ChainStep,
    FilterBank,
    check_sizes,
    compile_chain,
    identity_bank,
    steps_of,
    text_of,
)
from amtcore.kernels.cpu.backend import CpuBackend
from amtcore.kernels.cpu.chain_loop import loop_of, picker
from amtcore.kernels.operation import ChainOperation, always
from amtcore.kernels.operations.compression import SQUARE
from amtcore.kernels.operations.fir import DECIMATE
from amtcore.kernels.operations.modulation_filters import BANK_IDENTITY, FILTERS
from amtcore.kernels.operations.sections import FIRST_ORDER
from amtcore.kernels.operators import run_step
from amtcore.kernels.pooling import STORE, STORE_BANK
from amtcore.kernels.registry import BUILT_IN, get_operation
from amtcore.kernels.vector.jit import part
from amtcore.kernels.vector.simd import LANES

UNKNOWN = (-1, len(BUILT_IN), 99)
WITHOUT_ADJOINT = [code for code, each in enumerate(BUILT_IN) if each.adjoint is None]
NO_FRAME = np.zeros(5, np.int64)
NOTHING = np.zeros((0, 4), np.int64)
CPU, LOOP = CpuBackend(), loop_of(())[0]


@njit
def _double(row: Any, values: Any) -> int:
    values[0] *= 2.0
    return 1


@njit
def _negate(row: Any, values: Any) -> int:
    values[0] *= -1.0
    return 2


def _callable(pick: Any) -> Any:
    """The part as a function that Python can call."""
    return njit(lambda row, values: pick(row, values))


def _picker(parts: dict[int, Any], missing: str) -> Any:
    return picker(parts, "row, values", "row, values", missing)


def _row(code: int) -> Any:
    one_to_one = 2**16 + 1  # as a decimation reads it
    return np.array([code, 0, 0, one_to_one], np.int64)


# --- the compiled functions that a table becomes ---


def test_a_part_of_kernels_is_not_for_python_to_call() -> None:
    with pytest.raises(TypeError, match="expected a call from a compiled function"):
        _picker({3: _double}, "none")(_row(3), np.array([5.0]))


def test_every_code_gets_its_own_function() -> None:
    run = _callable(_picker({3: _double, 8: _negate}, "none"))
    values = np.array([5.0])
    assert run(_row(3), values) == 1 and values[0] == 10.0
    assert run(_row(8), values) == 2 and values[0] == -10.0


@pytest.mark.parametrize("codes", [(3,), (3, 8)])
def test_an_unregistered_code_raises_and_changes_nothing(codes: tuple[int, ...]) -> None:
    run = _callable(_picker(dict.fromkeys(codes, _double), "there is no such thing"))
    for code in (0, 4, 99):
        values = np.array([5.0])
        with pytest.raises(ParameterError, match="there is no such thing"):
            run(_row(code), values)
        assert values[0] == 5.0


# --- descriptions ---


@part
def _wrong_block(a: Any, n: int) -> int:
    return n


def _described(**changes: Any) -> ChainOperation:
    given = {"name": "own", "coefficients": always(0), "states": always(0), "block": SQUARE.block}
    return ChainOperation(**(given | changes))


def test_an_operation_with_other_parameters_or_no_name_is_refused() -> None:
    with pytest.raises(ParameterError, match=r"operation own: expected a block with.*got \(a, n\)"):
        _described(block=_wrong_block)
    with pytest.raises(ParameterError, match="operation own: expected a adjoint with"):
        _described(adjoint=SQUARE.block)
    with pytest.raises(ParameterError, match="must be an identifier, got 'a,b:1'"):
        _described(name="a,b:1")


def test_steps_have_a_text_from_which_they_come_back() -> None:
    steps = ((FIRST_ORDER, 1), (DECIMATE, 3 * 2**16 + 2))
    assert text_of(steps) == "first_order:1,decimate:196610"
    assert steps_of(text_of(steps)) == steps and steps_of(steps) is steps


def test_an_unknown_name_is_refused_and_the_known_ones_are_named() -> None:
    with pytest.raises(ParameterError, match=r"no operation is called 'tripler'.*adaptation"):
        get_operation("tripler")


@pytest.mark.parametrize(
    ("name", "claims", "message"),
    [
        ("square", {"one": "x:SQUARE"}, "'square' is claimed by amtcore and x:SQUARE"),
        ("other", {"one": "x:A", "two": "y:B"}, "'other' is claimed by x:A and y:B"),
        ("other", {"one": "math:pi"}, "expected a ChainOperation called 'other', got 3.14"),
        ("other", {"one": "amtcore.kernels.operations.compression:SQUARE"}, "called 'other', got"),
    ],
)
def test_claims_of_distributions_are_checked(
    name: str, claims: dict[str, str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = EntryPoints(EntryPoint(name, value, registry.GROUP) for value in claims.values())
    monkeypatch.setattr(registry, "entry_points", lambda **query: found.select(**query))
    get_operation.cache_clear()
    with pytest.raises(ParameterError, match=message):
        get_operation(name)


# --- the kernels themselves, past every check in front of them ---


def _ones(rows: int) -> Any:
    return np.ones(rows * LANES, np.float32)


@pytest.mark.parametrize("code", UNKNOWN)
def test_the_kernel_raises_at_an_unknown_operation(code: int) -> None:
    x, out = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    rows = np.zeros((1, LANES), np.int64)
    ops = _row(code)[None]
    with pytest.raises(ParameterError, match="no such operation"):
        LOOP.run_chain(
            x, 4, False, 1, ops, _ones(9), _ones(9), STORE, NOTHING, rows, 0, NO_FRAME, out
        )
    assert not out.any()


@pytest.mark.parametrize("kind", [-1, max(FILTERS) + 1])
def test_the_kernel_raises_at_an_unknown_filter(kind: int) -> None:
    x, out = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    rows, filters = np.zeros((1, LANES), np.int64), _row(kind)[None]
    with pytest.raises(ParameterError, match="no such filter"):
        LOOP.run_chain(
            x, 4, False, 1, NOTHING, _ones(9), _ones(9), STORE_BANK, filters, rows, 0, NO_FRAME,
            out,
        )  # fmt: skip
    assert not out.any()


@pytest.mark.parametrize("code", [*UNKNOWN, *WITHOUT_ADJOINT])
def test_the_adjoint_kernel_raises_at_an_operation_without_one(code: int) -> None:
    x, gx = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    rows, ops = np.zeros((1, LANES), np.int64), _row(code)[None]
    with pytest.raises(ParameterError, match=r"no such operation|has no adjoint"):
        LOOP.run_adjoint(
            x, x, gx, False, 1, ops, _ones(9), _ones(9), _ones(9), _ones(9), NOTHING, rows, 300
        )
    assert not gx.any()


# --- the checks, which say which and what instead ---


def _op(operation: ChainOperation) -> ChainStep:
    return ChainStep(operation, 0, torch.zeros(2, 3), torch.zeros(2, 1))


@pytest.mark.parametrize(("part", "shape"), [("coef", (2, 4)), ("state", (2, 2))])
def test_an_operation_reads_no_rows_of_its_neighbour(part: str, shape: tuple[int, int]) -> None:
    check_sizes([_op(FIRST_ORDER)])
    other = replace(_op(FIRST_ORDER), **{part: torch.zeros(shape)})
    for ask in (
        lambda: check_sizes([other]),
        lambda: compile_chain([other], identity_bank(2, torch.zeros(1)), "mean", 16000.0, 100.0),
    ):
        with pytest.raises(ShapeError, match="first_order: expected 3 coefficients and 1 state"):
            ask()


def test_a_decimation_does_not_run_at_full_rate() -> None:
    none = torch.zeros(1, 2, 4), torch.zeros(2, 3), torch.zeros(1, 2, 3)
    with pytest.raises(ParameterError, match="keep it"):
        CPU.run_steps(((DECIMATE, 3 * 2**16 + 2),), *none)
    with pytest.raises(ParameterError, match="no operator at full rate"):
        run_step(DECIMATE, 3 * 2**16 + 2, *none)


def test_a_chain_lowers_the_rate_once() -> None:
    op = ChainStep(DECIMATE, 3 * 2**16 + 2, torch.zeros(2, 3), torch.zeros(2, 3))
    with pytest.raises(ParameterError, match="one operation at most"):
        compile_chain([op, op], identity_bank(2, torch.zeros(1)), "mean", 16000.0, 100.0)


@pytest.mark.parametrize("kind", [-1, max(FILTERS) + 1])
def test_unknown_filters_are_refused(kind: int) -> None:
    x, coef, state = torch.zeros(1, 1, 4), torch.zeros(1, 6), torch.zeros(1, 1, 2)
    with pytest.raises(ParameterError, match=f"no filter of kind {kind}"):
        CPU.run_bank(x, coef, state, [kind], [0, 1])
    with pytest.raises(ParameterError, match=f"no filter of kind {kind}"):
        compile_chain([], FilterBank((kind,), coef, (0, 1)), "mean", 16000.0, 100.0)


def test_an_operation_without_an_adjoint_has_the_gradient_of_its_plain_loop() -> None:
    x, gain = torch.randn(1, 2, 4, requires_grad=True), torch.full((2, 1), 3.0)
    run_step(SQUARE, 0, x, gain, torch.zeros(1, 2, 0))[0].sum().backward()
    assert x.grad is not None and torch.allclose(x.grad, 18.0 * x.detach())


def test_every_filter_is_named_and_has_a_gradient() -> None:
    assert all(each.name and each.adjoint is not None for each in FILTERS.values())
    assert BANK_IDENTITY in FILTERS
