"""A chain is written once: signals, chunks and the fused kernel follow the `chain_stages`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from amtcore import Dau1997, Paulick2024
from amtcore.errors import ParameterError, ShapeError
from amtcore.features import builtin
from amtcore.features.filterbank_model import FilterbankModel
from amtcore.kernels.operations.fir import DECIMATE
from amtcore.kernels.operators import rest_state, run_ops, run_step
from amtcore.kernels.registry import BUILT_IN
from amtcore.models.time_domain import ChainStage, TimeDomainModel
from amtcore.stages import AdaptLoop, GammatoneFilterbank, IHCEnvelope, ModulationFilterbank
from amtcore.stages.butterworth import ButterworthFilter
from amtcore.stages.compression import BrokenStickCompression, SquaringExpansion
from amtcore.stages.hair_cells import IHCPaulick2024

from .model_cases import CASES, FS

MODELS = [name for name in CASES if issubclass(CASES[name].kind, TimeDomainModel)]
REGISTERED = [each for each in vars(builtin).values() if isinstance(each, FilterbankModel)]
STAGES: dict[str, Callable[..., Any]] = {
    "adaptation": AdaptLoop,
    "adaptation without limit": lambda fs, **o: AdaptLoop(fs, limit=0.0, **o),
    "butterworth": lambda fs, **o: ButterworthFilter(fs, 40.0, order=3, btype="high", **o),
    "broken stick": lambda fs, **o: BrokenStickCompression(**o),
    "square": lambda fs, **o: SquaringExpansion(20.0, **o),
    "five low-passes": lambda fs, **o: IHCEnvelope(fs, method="breebaart2001", **o),
    "second-order low-pass": lambda fs, **o: IHCEnvelope(fs, method="relanoiborra2019", **o),
    "membrane": IHCPaulick2024,
}


def _returned(model: TimeDomainModel, stream: str) -> str:
    """What the signal that ends a stream is called among the returned stages."""
    return [link.returned for link in model.chain_stages if link.stream == stream][-1]


def _after_front_end(model: TimeDomainModel, x: Tensor) -> Tensor:
    for stage in model.front_end():
        x = stage(x)
    return x


@pytest.mark.parametrize("name", MODELS)
def test_operations_of_a_stream_make_what_the_stages_make(name: str) -> None:
    """Bit for bit, for every stream but the modulation, whose bank comes after the operations."""
    model, x = CASES[name].build(return_stages=True), CASES[name].signal(2)
    stages = model(x)[1]
    streams = {link.stream for link in model.chain_stages} - {"", "modulation"}
    assert {"envelope", "adaptation"} <= streams
    for stream in streams:
        ops, bank = model.chain(stream)
        y, _ = run_ops(_after_front_end(model, x).unsqueeze(1), ops, rest_state(ops, 2))
        assert torch.equal(y, stages[_returned(model, stream)]), stream
        assert bank.offsets == tuple(range(model.num_channels + 1))


class _Smoothed(Dau1997):
    """A model of one more stage, which is said in one place."""

    chain_stages = (
        *Dau1997.chain_stages[:2],
        ChainStage("smooth", returned="smooth", stream="envelope"),
        *Dau1997.chain_stages[2:],
    )

    def __init__(self, fs: float, **options: Any) -> None:
        super().__init__(fs, **options)
        self.smooth = ButterworthFilter(fs, 50.0)


def test_a_stage_is_added_in_one_place() -> None:
    x = CASES["dau1997"].signal(1)
    plain = Dau1997(FS, 300.0, 1200.0, return_stages=True)
    model = _Smoothed(FS, flow=300.0, fhigh=1200.0, return_stages=True)
    (out, stages), (before, others) = model(x), plain(x)
    assert list(stages) == ["filterbank", "ihc", "smooth", "adaptation"]
    assert torch.equal(stages["smooth"], model.smooth(others["ihc"]))
    assert not torch.equal(out[0], before[0])
    first, state = model.stream(x[:, :700])
    second, _ = model.stream(x[:, 700:], state)
    assert torch.equal(torch.cat((first[0][0], second[0][0]), -1), out[0])
    ops, _ = model.chain("envelope")
    assert len(ops) == len(plain.chain("envelope")[0]) + 1
    y, _ = run_ops(x.unsqueeze(1), ops, rest_state(ops, 1))
    assert torch.equal(y, stages["smooth"])


def test_a_stage_that_is_not_there_passes_signals_on() -> None:
    model = Paulick2024(FS, 300.0, 1200.0, 3, use_outerear=False, return_stages=True)
    x = CASES["paulick2024"].signal(1)
    assert torch.equal(model(x)[1]["outerear"], x) and model.front_end() == []


def test_of_several_links_of_a_stream_the_last_counts() -> None:
    """The expansion of the model of 2008 belongs to its envelope."""
    model = CASES["jepsen2008"].build(return_stages=True)
    ops, _ = model.chain("envelope")
    assert ops[-1].operation is model.expansion.block_ops(3)[0].operation
    assert model(CASES["jepsen2008"].signal(1))[1]["ihc"].min() >= 0


@pytest.mark.parametrize("model", REGISTERED, ids=lambda each: each.name)
def test_every_registered_stream_is_a_link(model: FilterbankModel) -> None:
    frames = {name for name, kind in model.streams.items() if kind.layout != "events"}
    links = model.module(model.default_fs_hz, {}, "float32").chain_stages
    assert frames == {link.stream for link in links if link.stream}
    assert len(REGISTERED) == 4


def test_an_unknown_stream_is_named() -> None:
    with pytest.raises(ParameterError, match=r"Dau1997 has no stream 'envelop'.*envelope"):
        CASES["dau1997"].build().chain("envelop")


# --- a stage says once what it runs ---


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_is_its_operations(name: str) -> None:
    """Signals, the fused pass, and the operators one by one with gradients: the same numbers."""
    x = 0.1 * torch.randn(2, 3, 400, generator=torch.Generator().manual_seed(0))
    stage, learnt = STAGES[name](FS), STAGES[name](FS, learnable=True)
    ops = stage.block_ops(3)
    y, state = run_ops(x, ops, rest_state(ops, 2))
    plain, last = stage.stream(x)
    assert torch.equal(plain, y) and torch.equal(last, state)
    with_gradient = learnt(x)
    assert with_gradient.requires_grad and torch.equal(with_gradient.detach(), y)


def test_every_operation_with_an_adjoint_has_an_operator() -> None:
    assert all(each.reference for each in BUILT_IN if each.adjoint)
    none = torch.zeros(2, 3), torch.zeros(1, 2, 3)
    with pytest.raises(ParameterError, match="operation decimate has no operator at full rate"):
        run_step(DECIMATE, 3 * 2**16 + 2, torch.zeros(1, 2, 4), *none)


def test_a_state_of_other_operations_is_refused() -> None:
    x, ops = torch.zeros(1, 3, 4), AdaptLoop(FS).block_ops(3)
    with pytest.raises(ShapeError, match="state of 5 values a channel"):
        run_ops(x, ops, torch.zeros(1, 3, 4))
    with pytest.raises(ShapeError, match="state of shape"):
        run_ops(x, [replace(ops[0], coef=ops[0].coef)], torch.zeros(2, 3, 5))


def test_stages_refuse_channels_that_they_do_not_have() -> None:
    for stage in (GammatoneFilterbank([500.0], FS), ModulationFilterbank(FS, [500.0])):
        with pytest.raises(ParameterError, match="expected 1 channels, got 2"):
            stage.block_ops(2)
    with pytest.raises(ParameterError, match="2 minimum levels for 3 channels"):
        AdaptLoop(FS, min_level=[1e-5, 1e-4]).block_ops(3)
