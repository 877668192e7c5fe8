"""LIFExodus as a module: state between calls, leak modes, families, copies, compilation, errors."""

from __future__ import annotations

import copy
import json
import math
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from amtcore import LIFExodus
from amtcore.errors import BackendError, ParameterError, ShapeError
from amtcore.stages.lif import LEAK_MODES
from tests.short import drawn

from ..compare import FLOAT32, FLOAT64, assert_close
from .compiling import one_graph


def _layer(shape: tuple[int, int] = (6, 3), **options: object) -> LIFExodus:
    return LIFExodus(shape, **{"tau_mem": 0.01, "tau_syn": 0.005, "threshold": 0.7} | options)


def _data(batch: int = 2, steps: int = 50, inputs: int = 6) -> torch.Tensor:
    return 0.3 * torch.rand(batch, steps, inputs, generator=torch.Generator().manual_seed(0))


def test_one_neuron_by_hand() -> None:
    """alpha = beta = 1/2, threshold 1: currents and potentials are sums of powers of two."""
    layer = LIFExodus((1, 1), leak_mode="decays", alpha=0.5, beta=0.5, dtype=torch.float64)
    x = torch.tensor([[4.0], [0.0], [0.0], [0.0]], dtype=torch.float64)
    spikes, state, records = layer.evolve(x, record=True)
    assert records["isyn"].flatten().tolist() == [2.0, 1.0, 0.5, 0.25]
    assert spikes.flatten().tolist() == [2.0, 1.0, 0.0, 0.0]
    assert records["vmem"].flatten().tolist() == [0.0, 0.0, 0.5, 0.5]
    assert state["vmem"].tolist() == [[0.5]] and state["isyn"].tolist() == [[[0.25]]]


def test_synapses_belong_to_neighbouring_inputs() -> None:
    layer = _layer((6, 3))
    x = torch.zeros(1, 20, 6)
    x[..., 2] = 1.0
    assert layer.n_synapses == 2
    assert (layer(x).sum((0, 1)) > 0).tolist() == [False, True, False]
    assert (layer.isyn[0] > 0).flatten().tolist() == [False, False, True, False, False, False]


@drawn(20, derandomize=True)
@given(cuts=st.lists(st.integers(0, 50), max_size=4))
def test_calls_continue_where_the_last_one_ended(cuts: list[int]) -> None:
    layer, x = _layer(), _data()
    edges, state = [0, *sorted(cuts), 50], None
    whole, explicit, kept = layer(x).detach(), [], []
    after = {name: value.clone() for name, value in layer.state().items()}
    layer.reset_state()
    for begin, end in pairwise(edges):
        kept.append(layer(x[:, begin:end]).detach())
        part, state = layer.stream(x[:, begin:end], state)
        explicit.append(part.detach())
    assert torch.equal(torch.cat(kept, 1), whole)
    assert torch.equal(torch.cat(explicit, 1), whole)
    for name, value in after.items():
        assert torch.equal(getattr(layer, name), value), name


def test_stream_leaves_the_kept_state_alone() -> None:
    layer = _layer()
    layer(_data())
    before = {name: value.clone() for name, value in layer.state().items()}
    layer.stream(_data())
    assert all(torch.equal(layer.state()[name], value) for name, value in before.items())


def test_states_are_detached_and_reset() -> None:
    layer = _layer()
    rest = layer.state()
    assert rest["vmem"].shape == rest["spikes"].shape == (3,) and rest["isyn"].shape == (3, 2)
    for _ in range(2):  # a second backward would fail through an attached state
        layer(_data()).sum().backward()
        assert not any(value.requires_grad for value in layer.state().values())
    assert layer.vmem.shape == (2, 3) and layer.isyn.shape == (2, 3, 2) and layer.vmem.any()
    assert layer.reset_state() is layer
    assert layer.vmem.shape == (3,) and not any(value.any() for value in layer.state().values())


def test_batch_items_keep_their_own_state() -> None:
    together, x = _layer(), _data(3)
    spikes = torch.cat((together(x[:, :20]), together(x[:, 20:])), 1)
    for i in range(3):
        alone = _layer()
        one = torch.cat((alone(x[i : i + 1, :20]), alone(x[i : i + 1, 20:])), 1)
        assert torch.equal(one[0], spikes[i])
        assert torch.equal(alone.vmem[0], together.vmem[i])


def test_another_batch_starts_from_the_state_of_the_first_item() -> None:
    """The last batch of an epoch may be smaller, or the next one larger."""
    x = _data(3)
    for batch in (1, 2, 5):
        layer, alone = _layer(), _layer()
        layer(x)
        alone(x[:1])
        more = _data(batch, 20)
        expected = torch.cat([copy.deepcopy(alone)(item.unsqueeze(0)) for item in more])
        assert torch.equal(layer(more), expected)
        assert layer.vmem.shape == (batch, 3) and layer.isyn.shape == (batch, 3, 2)


def test_a_signal_without_batch_axis() -> None:
    layer, x = _layer(), _data()
    output, _, records = layer.evolve(x[0].numpy(), record=True)
    layer.reset_state()
    expected, _, batched = layer.evolve(x[:1], record=True)
    assert torch.equal(output, expected[0])
    assert all(torch.equal(records[name], value[0]) for name, value in batched.items())
    assert torch.equal(layer.reset_state().stream(x[0])[0], output)


def test_evolve_without_record_records_nothing() -> None:
    output, state, records = _layer().evolve(_data())
    assert records == {} and list(state) == ["vmem", "isyn", "spikes"]
    assert torch.equal(state["spikes"], output[:, -1])


@pytest.mark.parametrize("mode", LEAK_MODES)
def test_leak_modes_agree(mode: str) -> None:
    tau_mem, tau_syn = [0.01, 0.02, 0.03], [[0.004, 0.005]] * 3
    options = {"tau_mem": tau_mem, "tau_syn": tau_syn, "dtype": torch.float64}
    plain = LIFExodus((6, 3), **options)
    layer = LIFExodus((6, 3), leak_mode=mode, **options)
    assert layer.leak_mode == mode and list(layer.parameters(mode)) == list(LEAK_MODES[mode])
    for names in LEAK_MODES.values():
        for name in names:
            got, expected = getattr(layer, name).detach(), getattr(plain, name).detach()
            assert_close(got, expected, FLOAT64, name)
    assert_close(plain.alpha.detach(), np.exp(-1e-3 / np.array(tau_mem)), FLOAT64)
    assert_close(plain.alpha.detach(), 1 - 2.0 ** -plain.dash_mem.detach().numpy(), FLOAT64)
    x = _data().double()
    assert torch.equal(layer(x), plain(x))
    layer.evolve(x, record=True)[2]["vmem"].sum().backward()
    for name in LEAK_MODES[mode]:
        assert getattr(layer, name).grad.shape == getattr(plain, name).shape


def test_leak_constants_of_their_own_mode() -> None:
    decays = LIFExodus((2, 2), leak_mode="decays", alpha=0.9, beta=[0.8, 1.0], dtype=torch.float64)
    assert decays.beta.tolist() == [0.8, 1.0] and math.isinf(decays.tau_syn.detach()[1])
    shifts = LIFExodus((2, 2), leak_mode="bitshifts", dash_mem=3, dash_syn=1, dtype=torch.float64)
    assert float(shifts.alpha.detach()) == 0.875 and float(shifts.beta.detach()) == 0.5


def test_constants_per_neuron_and_synapse_act_on_their_own() -> None:
    own = {"tau_mem": [0.01, 0.02, 0.04], "threshold": [0.5, 1.0, 2.0], "bias": [0.0, 0.01, -0.01]}
    tau_syn = torch.tensor([[0.002, 0.004], [0.006, 0.008], [0.01, 0.012]])
    x = _data()
    together = LIFExodus((6, 3), tau_syn=tau_syn.flatten(), **own)(x)
    for i in range(3):
        alone = LIFExodus((2, 1), tau_syn=tau_syn[i], **{k: v[i] for k, v in own.items()})
        assert torch.equal(alone(x[..., 2 * i : 2 * i + 2])[..., 0], together[..., i])


def test_learning_moves_the_rates_to_their_targets() -> None:
    layer, x = _layer(threshold=[0.5, 0.7, 0.9]), _data(1, 200)
    target = torch.tensor([0.5, 1.0, 2.0])
    optimizer = torch.optim.Adam([layer.bias, layer.threshold_raw], lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        rate = layer.reset_state()(x).mean((0, 1))
        loss = (rate - target).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize("how", ["json", "deepcopy"])
def test_copies_compute_the_same(how: str) -> None:
    layer = LIFExodus(
        (6, 3), [0.01, 0.02, 0.03], 0.005, [0.5, 0.6, 0.7], 0.3, 0.01, leak_mode="bitshifts",
        dt=2e-3, max_spikes_per_dt=2,
    )  # fmt: skip
    if how == "json":
        twin = LIFExodus.from_json(layer.to_json())
        assert twin.to_json() == layer.to_json()
        assert (twin.dt, twin.learning_window, twin.max_spikes_per_dt) == (2e-3, 0.3, 2.0)
    else:
        layer(_data())
        twin = copy.deepcopy(layer)
        assert torch.equal(twin.vmem, layer.vmem)
        twin.reset_state()
        layer.reset_state()
    assert torch.equal(twin(_data()), layer(_data()))


def test_json_says_what_is_wrong_with_it() -> None:
    unlimited = json.loads(_layer().to_json())
    assert unlimited["max_spikes_per_dt"] is None
    assert LIFExodus.from_json(_layer().to_json()).max_spikes_per_dt == math.inf
    for text in ("{", "[]", "{}", json.dumps(unlimited | {"class": "LIF"}),
                 json.dumps(unlimited | {"dtype": "float7"})):  # fmt: skip
        with pytest.raises(ParameterError, match="expected"):
            LIFExodus.from_json(text)


def test_float32_against_float64_below_the_threshold() -> None:
    """Potentials agree to rounding as long as rounding decides no spike."""
    records = []
    for dtype in (torch.float32, torch.float64):
        layer = _layer(threshold=100.0, dtype=dtype)
        records.append(layer.evolve(_data(steps=400), record=True)[2])
    assert not records[0]["spikes"].any()
    for name in ("vmem", "isyn"):
        assert_close(records[0][name].detach(), records[1][name].detach(), FLOAT32, name)


def test_compiled_equals_eager_and_keeps_state() -> None:
    """The first chunk is not compiled: its state has no batch. The other chunks share one graph."""
    results = []
    for compiled in (False, True):
        layer = _layer(dtype=torch.float64)
        call = one_graph(layer) if compiled else layer
        first, *others = _data().double().split([20, 15, 15], 1)
        outputs = [layer(first), *(call(part) for part in others)]
        torch.cat(outputs, 1).square().sum().backward()
        results.append([*outputs, *layer.state().values(), *(p.grad for p in layer.parameters())])
    for got, expected in zip(*results, strict=True):
        assert torch.equal(got, expected)
    before = {name: value.clone() for name, value in layer.state().items()}
    bad = _data().double()
    bad[1, 3, 4] = math.nan
    with pytest.raises(ParameterError, match=r"data must be finite, got nan at .*1, 3, 4"):
        call(bad[:, :15])  # strided as the other chunks, for which the graph is
    for name, value in layer.state().items():
        assert torch.equal(value, before[name]), "a refused call must not touch the kept state"


def test_a_kept_state_cannot_be_mapped() -> None:
    layer, x = _layer(learnable=False), _data(4)
    with pytest.raises(ParameterError, match=r"cannot map; map stream\(\)"):
        torch.func.vmap(layer)(x)
    assert torch.equal(torch.func.vmap(layer.stream)(x)[0], layer(x))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shape": (5, 2)}, r"shape .* got \(5, 2\); 5 is no multiple of 2"),
        ({"shape": (2, 4)}, "no multiple"),
        ({"shape": (4, 0)}, "integers of 1 or more"),
        ({"shape": (4.0, 2)}, "integers of 1 or more"),
        ({"shape": (4, 2, 1)}, "integers of 1 or more"),
        ({"tau_mem": 0.0}, "tau_mem must be finite and above 0, got 0"),
        ({"tau_syn": [0.01, -0.02, 0.01, 0.01]}, "tau_syn must be finite and above 0, got -0.02"),
        ({"tau_mem": [0.1, 0.1, 0.1]}, r"tau_mem must have shape \(\) or \(2,\), got \(3,\)"),
        ({"tau_syn": math.nan}, "tau_syn must be finite .* got nan"),
        ({"tau_mem": "fast"}, "tau_mem must be a number or an array, got 'fast'"),
        ({"threshold": [1.0, 0.0]}, "threshold must be finite and above 0, got 0"),
        ({"bias": math.inf}, "bias must be finite, got inf"),
        ({"learning_window": 0.0}, "learning_window must be finite and above 0"),
        ({"dt": 0.0}, "dt must be finite and above 0, got 0"),
        ({"dt": -1e-3}, "dt must be finite and above 0, got -0.001"),
        ({"max_spikes_per_dt": 0}, "whole number of 1 or more, or inf, got 0"),
        ({"max_spikes_per_dt": 1.5}, "whole number of 1 or more, or inf, got 1.5"),
        ({"max_spikes_per_dt": math.nan}, "whole number"),
        ({"tau_mem": True}, "tau_mem must be a number or an array, got True"),
        ({"threshold": [1.0, True]}, "threshold must be a number or an array"),
        ({"bias": 1j}, "bias must be a number or an array"),
        ({"max_spikes_per_dt": True}, "whole number"),
        ({"shape": (True, True)}, "integers of 1 or more"),
        ({"leak_mode": "tau"}, "leak_mode must be one of taus, decays, bitshifts, got 'tau'"),
        ({"alpha": 0.5}, "alpha does not go with leak_mode 'taus', got 0.5"),
        ({"leak_mode": "decays", "dash_mem": 2}, "dash_mem does not go with leak_mode 'decays'"),
        ({"leak_mode": "decays", "alpha": 1.1}, "alpha must be .* at most 1, got 1.1"),
        ({"leak_mode": "bitshifts", "dash_syn": 0}, "dash_syn must be finite and above 0"),
        ({"has_rec": True}, "has_rec must be False, got True"),
        ({"noise_std": 0.1}, "Exodus does not support noise injection: .* got 0.1"),
        ({"dtype": torch.float16}, "dtype must be"),
    ],
)
def test_bad_arguments(options: dict[str, object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        LIFExodus(**({"shape": (4, 2)} | options))


def test_bad_inputs() -> None:
    layer = _layer()
    with pytest.raises(ShapeError, match=r"data must have 6 inputs on its last axis, got \(2, 5\)"):
        layer(torch.zeros(2, 5))
    with pytest.raises(ShapeError, match="floating-point"):
        layer(torch.zeros(2, 5, 6, dtype=torch.complex64))
    with pytest.raises(ShapeError, match="got a tensor of shape"):
        layer(torch.zeros(6))
    bad = _data()
    bad[1, 3, 4] = math.nan
    for call in (layer, layer.stream, layer.evolve):
        with pytest.raises(ParameterError, match=r"data must be finite, got nan at .*1, 3, 4"):
            call(bad)
    assert layer.vmem.shape == (3,), "a refused call must not touch the kept state"


class _Nir:
    """Stands in for the `nir` package: keeps what it was given."""

    @staticmethod
    def CubaLIF(**arguments: object) -> dict[str, object]:
        return arguments

    class NIRGraph:
        """Graph of one node."""

        from_list = staticmethod(lambda node: node)


def test_nir_export_solves_its_own_equations(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exported equations, integrated in small steps, give our potentials below threshold.

    Within a step first the current follows the held input, then the potential the held current.
    """
    monkeypatch.setitem(sys.modules, "nir", _Nir)
    layer = LIFExodus((2, 2), [0.01, 0.02], 0.03, 1e6, bias=0.1, dtype=torch.float64)
    node = layer.to_nir()
    assert node["metadata"]["reset"] == "subtract" and node["metadata"]["dt"] == layer.dt
    x = _data(1, 40, 2).double()
    vmem = layer.evolve(x, record=True)[2]["vmem"].detach()
    v, current, fine = np.zeros(2), np.zeros(2), 500
    for t in range(40):
        for _ in range(fine):
            slope = node["w_in"] * x[0, t].numpy() - current
            current = current + layer.dt / fine / node["tau_syn"] * slope
        for _ in range(fine):
            slope = node["v_leak"] - v + node["r"] * current
            v = v + layer.dt / fine / node["tau_mem"] * slope
        np.testing.assert_allclose(v, vmem[0, t], rtol=1e-3)


def test_nir_export_with_the_package_itself() -> None:
    import nir

    graph = LIFExodus((3, 3), [0.01, 0.02, 0.03]).to_nir()
    (node,) = [node for node in graph.nodes.values() if isinstance(node, nir.CubaLIF)]
    np.testing.assert_allclose(node.tau_mem, [0.01, 0.02, 0.03], rtol=1e-6)
    assert graph.input_type["input"].tolist() == [3]


def test_nir_export_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "nir", None)
    with pytest.raises(BackendError, match="pip install nir"):
        LIFExodus((2, 2)).to_nir()
    with pytest.raises(ParameterError, match="one synapse, this layer's have 2"):
        LIFExodus((4, 2)).to_nir()
    with pytest.raises(ParameterError, match="below 1"):
        LIFExodus((2, 2), leak_mode="decays", alpha=1.0).to_nir()
