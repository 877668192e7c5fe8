"""The tables of operations and filters: what is not in them has no kernel and no gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numba import njit

from amtcore.errors import ParameterError, ShapeError
from amtcore.kernels.fused.adjoint import run_adjoint
from amtcore.kernels.fused.cpu import STORE, STORE_BANK, run_chain
from amtcore.kernels.fused.dispatch import dispatcher
from amtcore.kernels.fused.filters import BANK_IDENTITY, FILTERS
from amtcore.kernels.fused.operations import (
    DECIMATE,
    FIRST_ORDER,
    OPERATIONS,
    SQUARE,
    Operation,
    adjoint_kernel,
    forward_kernel,
)
from amtcore.kernels.fused.program import Bank, BlockOp, compile_chain, identity_bank, lay_out
from amtcore.kernels.fused.runner import run_bank, run_op, run_op_adjoint
from amtcore.kernels.ops.autograd import differentiate
from amtcore.kernels.vector.simd import LANES

UNKNOWN = (-1, max(OPERATIONS) + 1, 99)
WITHOUT_ADJOINT = [code for code, each in OPERATIONS.items() if each.adjoint is None]
NO_FRAME = np.zeros(5, np.int64)
NOTHING = np.zeros((0, 4), np.int64)


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


def _row(code: int) -> Any:
    one_to_one = 2**16 + 1  # as a decimation reads it
    return np.array([code, 0, 0, one_to_one], np.int64)


def _operation(forward: Any, adjoint: Any) -> Operation:
    return Operation("one of a test", forward, lambda n: 0, lambda n: 0, adjoint)


# --- the compiled functions that a table becomes ---


def test_a_part_of_kernels_is_not_for_python_to_call() -> None:
    with pytest.raises(TypeError, match="expected a call from a compiled function"):
        dispatcher({3: _double}, "none")(_row(3), np.array([5.0]))


def test_every_code_gets_its_own_function() -> None:
    run = _callable(dispatcher({3: _double, 8: _negate}, "none"))
    values = np.array([5.0])
    assert run(_row(3), values) == 1 and values[0] == 10.0
    assert run(_row(8), values) == 2 and values[0] == -10.0


@pytest.mark.parametrize("codes", [(3,), (3, 8)])
def test_an_unregistered_code_raises_and_changes_nothing(codes: tuple[int, ...]) -> None:
    run = _callable(dispatcher(dict.fromkeys(codes, _double), "there is no such thing"))
    for code in (0, 4, 99):
        values = np.array([5.0])
        with pytest.raises(ParameterError, match="there is no such thing"):
            run(_row(code), values)
        assert values[0] == 5.0


def test_an_operation_that_is_registered_without_adjoint_gets_no_other_gradient() -> None:
    table = {0: _operation(_double, _negate), 1: _operation(_double, None)}
    run, adjoint = _callable(forward_kernel(table)), _callable(adjoint_kernel(table))
    values = np.array([5.0])
    run(_row(1), values)
    adjoint(_row(0), values)
    assert values[0] == -10.0
    with pytest.raises(ParameterError, match="has no adjoint"):
        adjoint(_row(1), values)
    assert values[0] == -10.0


# --- the kernels themselves, past every check in front of them ---


def _ones(rows: int) -> Any:
    return np.ones(rows * LANES, np.float32)


@pytest.mark.parametrize("code", UNKNOWN)
def test_the_kernel_raises_at_an_unknown_operation(code: int) -> None:
    x, out = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    rows = np.zeros((1, LANES), np.int64)
    ops = _row(code)[None]
    with pytest.raises(ParameterError, match="no such operation"):
        run_chain(x, 4, False, 1, ops, _ones(9), _ones(9), STORE, NOTHING, rows, 0, NO_FRAME, out)
    assert not out.any()


@pytest.mark.parametrize("kind", [-1, max(FILTERS) + 1])
def test_the_kernel_raises_at_an_unknown_filter(kind: int) -> None:
    x, out = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    rows, filters = np.zeros((1, LANES), np.int64), _row(kind)[None]
    with pytest.raises(ParameterError, match="no such filter"):
        run_chain(
            x, 4, False, 1, NOTHING, _ones(9), _ones(9), STORE_BANK, filters, rows, 0, NO_FRAME,
            out,
        )  # fmt: skip
    assert not out.any()


@pytest.mark.parametrize("code", [*UNKNOWN, *WITHOUT_ADJOINT])
def test_the_adjoint_kernel_raises_at_an_operation_without_one(code: int) -> None:
    x, gx = np.ones((1, 4), np.float32), np.zeros((1, 4), np.float32)
    rows, ops = np.zeros((1, LANES), np.int64), _row(code)[None]
    with pytest.raises(ParameterError, match=r"no such operation|has no adjoint"):
        run_adjoint(
            x, x, gx, False, 1, ops, _ones(9), _ones(9), _ones(9), _ones(9), NOTHING, rows, 300
        )
    assert not gx.any()


# --- the checks, which say which and what instead ---


def _op(code: int) -> BlockOp:
    return BlockOp(code, 0, torch.zeros(2, 3), torch.zeros(2, 1))


@pytest.mark.parametrize("code", UNKNOWN)
def test_unknown_operations_are_refused_when_they_are_built(code: int) -> None:
    with pytest.raises(ParameterError, match=f"no operation {code}"):
        lay_out([_op(code)])
    with pytest.raises(ParameterError, match=f"no operation {code}"):
        compile_chain([_op(code)], identity_bank(2, torch.zeros(1)), "mean", 16000.0, 100.0)
    with pytest.raises(ParameterError, match=f"no operation {code}"):
        run_op(code, 0, torch.zeros(1, 2, 4), torch.zeros(2, 3), torch.zeros(1, 2, 1))


@pytest.mark.parametrize(("part", "shape"), [("coef", (2, 4)), ("state", (2, 2))])
def test_an_operation_reads_no_rows_of_its_neighbour(part: str, shape: tuple[int, int]) -> None:
    assert lay_out([_op(FIRST_ORDER)])[0].tolist() == [[FIRST_ORDER, 0, 0, 0]]
    other = replace(_op(FIRST_ORDER), **{part: torch.zeros(shape)})
    with pytest.raises(
        ShapeError, match="first-order section: expected 3 coefficients and 1 state"
    ):
        lay_out([other])


def test_a_decimation_does_not_run_at_full_rate() -> None:
    with pytest.raises(ParameterError, match="keep it"):
        run_op(DECIMATE, 1, torch.zeros(1, 2, 4), torch.zeros(2, 3), torch.zeros(1, 2, 1))


@pytest.mark.parametrize("kind", [-1, max(FILTERS) + 1])
def test_unknown_filters_are_refused(kind: int) -> None:
    x, coef, state = torch.zeros(1, 1, 4), torch.zeros(1, 6), torch.zeros(1, 1, 2)
    with pytest.raises(ParameterError, match=f"no filter of kind {kind}"):
        run_bank(x, coef, state, [kind], [0, 1])
    with pytest.raises(ParameterError, match=f"no filter of kind {kind}"):
        compile_chain([], Bank((kind,), coef, (0, 1)), "mean", 16000.0, 100.0)


@pytest.mark.parametrize("code", WITHOUT_ADJOINT)
def test_operations_without_an_adjoint_are_refused(code: int) -> None:
    x, coef, state = torch.zeros(1, 2, 4), torch.zeros(2, 3), torch.zeros(1, 2, 1)
    with pytest.raises(ParameterError, match=rf"operation {code} \(.*\) has no adjoint"):
        run_op_adjoint(code, 0, x, coef, state, x, state)
    with pytest.raises(ParameterError, match=rf"operation {code} \(.*\) has no adjoint"):
        differentiate(None, code)
    assert SQUARE in WITHOUT_ADJOINT


def test_every_filter_is_named_and_has_a_gradient() -> None:
    assert all(each.name and each.adjoint is not None for each in FILTERS.values())
    assert BANK_IDENTITY in FILTERS
