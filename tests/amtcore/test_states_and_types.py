"""States of something else are refused in one line; after loading a model works in one type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from amtcore import ButterworthFilter, Glasberg2002, ModulationFilterbank, Resampler
from amtcore.errors import AmtError, ShapeError, StateError

from ..compare import Tolerance, assert_close
from .constant_cases import CASES, FS
from .model_cases import leaves

STRANGE: tuple[Any, ...] = ({}, (), "rest", 5, [None], ({}, {}), {"filterbank": None})
SAME = Tolerance(1e-6, "the same constants in the same type", 1e-12)
LOADED = ("Paulick2024", "King2019-resampled", "Moore2016", "Glasberg2002")


def _streaming() -> Iterator[str]:
    """What can process chunks, one of each class."""
    for name, case in CASES.items():
        if "-" not in name or name in ("King2019-resampled", "HeadphoneFilter"):
            stage = case.kind
            if hasattr(stage, "stream") and name not in ("King2019", "IHCEnvelope-bernstein"):
                yield name


@pytest.mark.parametrize("name", [name for name in _streaming() if "King2019Mod" not in name])
def test_a_stream_takes_only_states_of_its_own_kind(name: str) -> None:
    case = CASES[name]
    model, chunk = case.build(), case.inputs[0]
    for strange in STRANGE:
        with pytest.raises(StateError, match=r"expected the state that .*stream.* got "):
            model.stream(chunk, strange)
    _, state = model.stream(chunk)
    model.stream(chunk, state)


@pytest.mark.parametrize("name", ["Dau1997", "Osses2021", "King2019-resampled", "Glasberg2002"])
def test_models_do_not_take_states_of_each_other(name: str) -> None:
    model, chunk = CASES[name].build(), CASES[name].inputs[0]
    for other in ("Dau1997", "Osses2021", "King2019-resampled", "Paulick2024", "Moore2016"):
        if other != name:
            _, state = CASES[other].build().stream(CASES[other].inputs[0])
            with pytest.raises((StateError, ShapeError)):
                model.stream(chunk, state)


@pytest.mark.parametrize(
    "stage",
    [Resampler(FS, 4000), ModulationFilterbank(FS, [500.0, 1000.0]), ButterworthFilter(FS, 300.0),
     CASES["HeadphoneFilter"].build()],
    ids=lambda stage: type(stage).__name__,
)  # fmt: skip
def test_a_stream_keeps_its_signals(stage: Any) -> None:
    """More of them in a later chunk have no past."""
    chunk = torch.zeros(1, 2, 50)
    _, state = stage.stream(chunk)
    with pytest.raises(AmtError, match="expected a"):
        stage.stream(torch.cat((chunk, chunk)), state)


@pytest.mark.parametrize("name", LOADED)
def test_all_stages_take_the_type_that_was_assigned(name: str) -> None:
    case = CASES[name]
    double, model = case.build(dtype=torch.float64), case.build()
    nested = torch.nn.Sequential(model)
    saved = torch.nn.Sequential(double).state_dict()
    nested.load_state_dict(saved, assign=True)
    x = case.inputs[0].double()
    assert model.dtype == torch.float64
    for got, wanted in zip(_floats(model(x)), _floats(double(x)), strict=True):
        assert_close(got, wanted, SAME, name)


def _floats(result: Any) -> list[Tensor]:
    """All tensors, which must be doubles."""
    assert {leaf.dtype for leaf in leaves(result)} == {torch.float64}
    return leaves(result)


@pytest.mark.parametrize("learnable", [False, True], ids=["fixed", "learnable"])
def test_checkpoints_in_half_precision_leave_the_type(learnable: bool) -> None:
    """Nothing here works in half precision: assigned values come to the module's type."""
    model = Glasberg2002(FS, learnable=learnable)
    half = {key: kept.bfloat16() for key, kept in model.state_dict().items()}
    model.load_state_dict(half, assign=True)
    assert {kept.dtype for kept in model.state_dict().values()} == {torch.float32}
    with torch.no_grad():
        assert model(torch.zeros(1, 100)).dtype == torch.float32
