"""LIFExodus by name: families, states and settings, assignment, files, what its inputs may be."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from amtcore import LIFExodus
from amtcore.errors import ParameterError, ShapeError
from amtcore.stages.lif import LEAK_MODES

from ..compare import FLOAT32, assert_close


def _layer(shape: tuple[int, int] = (6, 3), **options: object) -> LIFExodus:
    return LIFExodus(shape, **{"tau_mem": 0.01, "tau_syn": 0.005, "threshold": 0.7} | options)


def _data(batch: int = 2, steps: int = 50, inputs: int = 6) -> torch.Tensor:
    return 0.3 * torch.rand(batch, steps, inputs, generator=torch.Generator().manual_seed(0))


def test_attributes_of_the_page() -> None:
    layer = _layer()
    assert (
        layer.spiking_input
        and layer.spiking_output
        and layer.w_rec is None
        and layer.noise_std == 0.0
    )
    assert (layer.shape, layer.size_in, layer.size_out, layer.dt) == ((6, 3), 6, 3, 1e-3)
    count = layer.spike_generation_fn(torch.tensor([2.5]), torch.ones(1), torch.ones(1), 9.0)
    assert float(count) == 2.0
    assert layer.size == layer.size_out == 3
    assert (layer.name, layer.class_name, layer.full_name) == ("", "LIFExodus", "LIFExodus ''")
    layer.name = "hidden"
    assert layer.full_name == "LIFExodus 'hidden'"
    assert layer.to_torch() is layer
    with pytest.raises(ParameterError, match="use_torch_call must be True"):
        layer.to_torch(use_torch_call=False)
    assert LIFExodus((4,)).shape == (4, 4)
    assert LIFExodus((np.int64(4), np.int32(2))).shape == (4, 2)
    assert "n_synapses=2" in repr(layer) and "leak_mode=taus" in repr(layer)


def test_set_attributes_is_all_or_nothing() -> None:
    layer = _layer()
    assert layer.set_attributes({}) is layer
    layer.set_attributes({"tau_mem": [0.1, 0.2, 0.3], "threshold": 2.0, "vmem": [0.1, 0.2, 0.3],
                          "isyn": torch.zeros(2, 3, 2), "learning_window": 0.1,
                          "max_spikes_per_dt": 3})  # fmt: skip
    assert isinstance(layer.leak.tau_mem_raw, torch.nn.Parameter) and layer.tau_mem.shape == (3,)
    assert layer.learning_window == 0.1 and layer.max_spikes_per_dt == 3.0
    assert layer(torch.zeros(2, 1, 6)).sum() == 0
    expected = torch.tensor([0.1, 0.2, 0.3]) * layer.alpha.detach()
    assert_close(layer.vmem, expected.expand(2, 3), FLOAT32)
    for wrong, message in (
        ({"bias": 5.0, "tau_mem": -1.0}, "tau_mem must be finite and above 0"),
        ({"bias": 5.0, "alpha": 1.0}, "alpha has no finite tau_mem"),
        ({"bias": 5.0, "w_rec": 0.5}, "no attribute 'w_rec'"),
        ({"bias": 5.0, "vmem": [0.1]}, "vmem must have shape"),
        ({"bias": 5.0, "isyn": torch.full((3, 2), math.nan)}, "isyn must be finite"),
    ):
        with pytest.raises((ParameterError, ShapeError), match=message):
            layer.set_attributes(wrong)
        assert float(layer.bias.detach()) == 0.0


def test_parameters_by_family_and_as_torch_has_them() -> None:
    layer = _layer()
    assert set(layer.parameters("taus")) == {"tau_mem", "tau_syn"}
    assert torch.equal(layer.parameters("thresholds")["threshold"], layer.threshold)
    assert layer.parameters("bias")["bias"] is layer.bias and layer.parameters("weights") == {}
    for several in (("taus", "bias"), ["taus", "bias"]):
        assert list(layer.parameters(several)) == ["tau_mem", "tau_syn", "bias"]
    for wrong in ("tau", ("bias", "gains"), ["leak"]):
        with pytest.raises(ParameterError, match="family of parameters must be of weights, taus"):
            layer.parameters(wrong)
    assert [id(p) for p in layer.parameters()] == [id(p) for _, p in layer.named_parameters()]
    assert len(list(torch.nn.Sequential(layer).parameters())) == 4
    torch.optim.SGD(layer.parameters(), lr=0.1)
    fixed = _layer(learnable=False)
    assert not list(fixed.parameters()) and len(dict(fixed.named_buffers())) == 4 + 3
    assert torch.equal(fixed(_data()), layer(_data()))


def test_both_names_of_the_family_of_biases() -> None:
    layer = _layer()
    assert torch.equal(layer.parameters("biases")["bias"], layer.parameters("bias")["bias"])


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int32, torch.int64])
def test_spikes_as_integers_and_booleans(dtype: torch.dtype) -> None:
    spikes = _data() > 0.2
    expected = _layer()(spikes.float())
    assert expected.sum() > 0
    for counts in (spikes.to(dtype), spikes.to(dtype).numpy()):
        layer = _layer()
        assert torch.equal(layer.evolve(counts)[0], expected)
    assert torch.equal(_layer().stream(spikes.to(dtype))[0], expected)


@pytest.mark.parametrize("mode", LEAK_MODES)
@pytest.mark.parametrize("name", [name for names in LEAK_MODES.values() for name in names])
def test_constants_of_the_leak_are_assignable_in_every_mode(mode: str, name: str) -> None:
    """The parameter stays the one an optimizer holds; other modes state the same leak."""
    layer = LIFExodus((4, 2), leak_mode=mode, dtype=torch.float64)
    held = list(layer.leak.parameters())
    value = {"tau": [0.03, 0.01], "alp": 0.9, "bet": 0.8, "das": [3.0, 4.0]}[name[:3]]
    if name.endswith("syn") and isinstance(value, list):
        value = [value, value]
    for assigned in (value, torch.tensor(value), torch.nn.Parameter(torch.tensor(value))):
        setattr(layer, name, assigned)
        assert_close(getattr(layer, name).detach(), np.array(value), FLOAT32)
        assert all(a is b for a, b in zip(layer.leak.parameters(), held, strict=True))
    layer(torch.ones(1, 30, 4)).sum().backward()
    assert all(p.grad is not None for p in layer.leak.parameters())
    with pytest.raises(ParameterError, match=f"{name} must be finite and above 0"):
        setattr(layer, name, -1.0)


def test_other_constants_are_assignable() -> None:
    layer = _layer()
    bias = layer.bias
    layer.bias, layer.threshold = 0.1, np.array([1.0, 2.0, 3.0])
    assert layer.bias is bias and layer.threshold.tolist() == [1.0, 2.0, 3.0]
    with pytest.raises(ParameterError, match="threshold must be finite and above 0"):
        layer.threshold = 0.0


def test_states_and_settings_by_name() -> None:
    layer = _layer(max_spikes_per_dt=3)
    layer(_data())
    assert list(layer.state()) == ["vmem", "isyn", "spikes"]
    assert list(layer.state(("isyn", "vmem"))) == ["isyn", "vmem"]
    settings = layer.simulation_parameters()
    assert settings["dt"] == 1e-3 and settings["max_spikes_per_dt"] == 3.0
    assert settings["leak_mode"] == "taus" and callable(settings["spike_generation_fn"])
    assert layer.simulation_parameters("dt") == {"dt": 1e-3}
    for ask in (layer.state, layer.simulation_parameters):
        with pytest.raises(ParameterError, match=r"must be of .* got 'taus'"):
            ask("taus")
    named = layer.attributes_named(["tau_mem", "vmem", "dt", "w_in"])
    assert list(named) == ["tau_mem", "vmem", "dt"] and torch.equal(named["tau_mem"], layer.tau_mem)
    assert layer.attributes_named("bias")["bias"] is layer.bias


@pytest.mark.parametrize("mode", LEAK_MODES)
def test_parameters_go_back_to_what_they_were_built_with(mode: str) -> None:
    layer, fresh = (_layer(leak_mode=mode, threshold=[0.5, 0.6, 0.7]) for _ in range(2))
    held = list(layer.parameters())
    layer.set_attributes({"threshold": 2.0, "bias": [0.1, 0.2, 0.3], "tau_mem": 0.03})
    assert layer.reset_parameters() is layer
    for name, value in fresh.attributes_named(list(fresh.constants)).items():
        assert torch.equal(getattr(layer, name), value)
    assert all(a is b for a, b in zip(held, layer.parameters(), strict=True))


def test_what_is_kept_does_not_hold_on_to_the_output() -> None:
    layer = _layer()
    layer(_data(2, 500))
    for value in layer.state().values():
        assert value.untyped_storage().nbytes() == value.nbytes


def test_save_and_load(tmp_path: Path) -> None:
    layer = _layer(leak_mode="decays", max_spikes_per_dt=2, threshold=[0.5, 0.6, 0.7])
    layer.alpha, layer.bias = [0.9, 0.8, 0.7], 0.01
    assert layer.save(tmp_path / "layer.json") is None
    other = _layer(leak_mode="decays")
    held = list(other.parameters())
    assert other.load(str(tmp_path / "layer.json")) is other
    assert other.to_json() == layer.to_json()
    assert all(a is b for a, b in zip(held, other.parameters(), strict=True))
    assert torch.equal(other(_data()), layer(_data()))
    for wrong, name in ((_layer(), "leak_mode"), (LIFExodus((2, 2), leak_mode="decays"), "shape"),
                        (_layer(leak_mode="decays", dt=2e-3), "dt")):  # fmt: skip
        with pytest.raises(ParameterError, match=f"expected a layer with {name}"):
            wrong.load(tmp_path / "layer.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ParameterError, match="expected what to_json wrote"):
        layer.load(tmp_path / "bad.json")
