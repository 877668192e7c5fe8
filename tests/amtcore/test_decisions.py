"""The six decision methods: each against its statistic written out in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from amtcore import Paulick2024
from amtcore.errors import ParameterError, ShapeError

FS = 16000
COUNTS = (2, 3, 3)  # modulation filters of the channels
MODEL = Paulick2024(FS, 200.0, 3000.0, 3, dtype=torch.float64)


def _representation(batch: int | None = 2, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    lead = () if batch is None else (batch,)
    return [torch.randn(*lead, m, 50, generator=generator, dtype=torch.float64) for m in COUNTS]


def _tone(level_db: float, batch: int = 2) -> torch.Tensor:
    t = torch.arange(1600, dtype=torch.float64) / FS
    amplitude = 2e-5 * 10 ** (level_db / 20) * 2**0.5
    return (amplitude * torch.sin(2 * np.pi * 1000 * t)).repeat(batch, 1)


# --- region of interest ---


def test_region_in_time_channels_and_filters() -> None:
    full = _representation()
    region = MODEL.roi_selection(full, (0.0025, 0.0101), (1, 3), (1, 3))
    assert MODEL.fs_resampled == 4000.0
    assert len(region) == 2
    for got, channel in zip(region, full[1:], strict=True):
        assert torch.equal(got, channel[:, 1:3, 10:40])


def test_region_of_a_short_channel_keeps_what_there_is() -> None:
    region = MODEL.roi_selection(_representation(None), modulation_range=(2, 3))
    assert [tuple(y.shape) for y in region] == [(0, 50), (1, 50), (1, 50)]
    assert torch.equal(MODEL.roi_selection(_representation())[0], _representation()[0])


@pytest.mark.parametrize(
    ("region", "message"),
    [
        (
            {"time_window": (0.0, 1.0)},
            r"inside 0\.\.0\.0125 s, one sample \(0\.00025 s\).*got 0\.\.1 s",
        ),
        ({"time_window": (0.005, 0.002)}, r"inside 0\.\.0\.0125 s.*got 0\.005\.\.0\.002 s"),
        (
            {"time_window": (0.0051, 0.0052)},
            r"one sample \(0\.00025 s\) or longer, got 0\.0051\.\.",
        ),
        ({"time_window": (-0.001, 0.002)}, r"inside 0\.\.0\.0125 s.*got -0\.001\.\.0\.002 s"),
        ({"time_window": (0, float("nan"))}, "must be a pair .* of seconds"),
        ({"time_window": 0.1}, "must be a pair .* of seconds, got 0.1"),
        ({"time_window": (0, None)}, "must be a pair .* of seconds"),
        ({"channel_range": (2, 2)}, r"channel_range must be a range inside 0\.\.3.*got 2\.\.2"),
        ({"channel_range": (0, 1, 2)}, "must be a pair .* of whole numbers"),
        ({"channel_range": (0.5, 2)}, r"whole numbers, got \(0\.5, 2\)"),
        ({"channel_range": (0, True)}, "whole numbers"),
        ({"modulation_range": (-1, 2)}, r"modulation_range must be a range inside 0\.\.3"),
    ],
)
def test_a_region_that_is_none_is_refused_in_the_units_it_was_given_in(
    region: dict, message: str
) -> None:
    with pytest.raises(ParameterError, match=message):
        MODEL.roi_selection(_representation(), **region)


# --- template ---


def test_correlation_is_pearsons_r_over_everything() -> None:
    x, t = _representation(), _representation(seed=1)
    got = MODEL.template_correlation(x, t)
    for i in range(2):
        flat = [np.concatenate([y[i].numpy().ravel() for y in each]) for each in (x, t)]
        assert float(got[i]) == pytest.approx(np.corrcoef(*flat)[0, 1], rel=1e-12)
    assert MODEL.template_correlation(x, x) == pytest.approx(1.0)
    assert MODEL.template_correlation(x, [3.0 - 2 * y for y in x]) == pytest.approx(-1.0)


def test_correlation_without_normalisation_is_the_inner_product() -> None:
    x, t = _representation(), _representation(1, seed=1)
    got = MODEL.template_correlation(x, t, normalize=False)
    for i in range(2):
        expected = sum(float((y[i] * u[0]).sum()) for y, u in zip(x, t, strict=True))
        assert float(got[i]) == pytest.approx(expected, rel=1e-12)


def test_correlation_with_a_constant_is_zero_and_other_shapes_are_refused() -> None:
    x = _representation(None)
    assert float(MODEL.template_correlation(x, [torch.ones_like(y) for y in x])) == 0.0
    with pytest.raises(ShapeError, match="channels, filters and samples"):
        MODEL.template_correlation(x, x[:2])


# --- decision variable ---


def _expected(metric: str, full: list[np.ndarray], weights: list[np.ndarray]) -> float:
    total = sum(w.sum() for w in weights)
    pairs = list(zip(full, weights, strict=True))
    if metric == "max":
        return max((w[:, None] * y).max() for y, w in pairs)
    if metric == "mean":
        return sum((w * y.mean(-1)).sum() for y, w in pairs) / total
    if metric == "l2":
        return sum((w * (y**2).sum(-1)).sum() for y, w in pairs) ** 0.5
    return (sum((w * (y**2).mean(-1)).sum() for y, w in pairs) / total) ** 0.5


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("metric", ["rms", "mean", "max", "l2"])
def test_decision_variable(metric: str, weighted: bool) -> None:
    full = _representation()
    channels, filters = torch.tensor([1.0, 0.0, 3.0]), torch.tensor([1.0, 2.0, 0.5, 9.0])
    given = {"channel_weights": channels, "modulation_weights": filters} if weighted else {}
    got = MODEL.compute_decision_variable(full, metric, **given)
    for i in range(2):
        weights = [np.ones(m) for m in COUNTS]
        if weighted:
            weights = [
                float(w) * filters[:m].numpy() for w, m in zip(channels, COUNTS, strict=True)
            ]
        expected = _expected(metric, [y[i].numpy() for y in full], weights)
        assert float(got[i]) == pytest.approx(expected, rel=1e-12)


def test_decision_variable_of_one_sound_is_a_number_with_a_gradient() -> None:
    full = [y.requires_grad_() for y in _representation(None)]
    variable = MODEL.compute_decision_variable(full)
    assert variable.shape == ()
    variable.backward()
    assert all(y.grad.abs().max() > 0 for y in full)


def test_wrong_weights_and_metrics() -> None:
    with pytest.raises(ParameterError, match="metric must be one of"):
        MODEL.compute_decision_variable(_representation(), "median")
    with pytest.raises(ShapeError, match="3 channel weights"):
        MODEL.compute_decision_variable(_representation(), channel_weights=torch.ones(2))
    with pytest.raises(ShapeError, match="at least 3 modulation"):
        MODEL.compute_decision_variable(_representation(), modulation_weights=torch.ones(2))


# --- decisions and tasks ---


def test_decision_is_a_comparison() -> None:
    variable = torch.tensor([0.5, 1.0, 2.0])
    assert MODEL.make_decision(variable, 1.0).tolist() == [False, False, True]
    assert MODEL.make_decision(variable, 1.0, "less").tolist() == [True, False, False]
    with pytest.raises(ParameterError, match="criterion must be one of"):
        MODEL.make_decision(variable, 1.0, "equal")


def test_detection_compares_the_decision_variable_of_what_the_noise_does_not_explain() -> None:
    noise = 2e-3 * torch.randn(1, 1600, dtype=torch.float64)
    sound = torch.cat((noise, noise + _tone(70.0, 1)))
    variable = MODEL.detection_task(sound, noise)
    difference = [y - n for y, n in zip(MODEL(sound), MODEL(noise), strict=True)]
    assert torch.equal(variable, MODEL.compute_decision_variable(difference))
    assert float(variable[0]) == 0.0
    answer, again = MODEL.detection_task(sound, noise, threshold=1.0, return_decision_var=True)
    assert answer.tolist() == [False, True] and torch.equal(again, variable)
    assert MODEL.detection_task(sound, noise, threshold=1.0).dtype == torch.bool
    plain = MODEL.detection_task(sound, metric="max")
    assert torch.equal(plain, MODEL.compute_decision_variable(MODEL(sound), "max"))


def test_discrimination_is_true_where_the_first_is_chosen() -> None:
    """The page's keywords; its rule and its variable."""
    soft, loud = _tone(40.0), _tone(60.0)
    first = torch.cat((soft[:1], loud[:1]))
    second = first.flip(0)
    answer = MODEL.discrimination_task(stimulus1=first, stimulus2=second, metric="rms")
    assert answer.dtype == torch.bool and answer.tolist() == [False, True]
    for rule, expected in (("max", [False, True]), ("min", [True, False])):
        chosen, variable = MODEL.discrimination_task(
            first, second, decision_rule=rule, return_decision_var=True
        )
        assert chosen.tolist() == expected
        parts = [MODEL.compute_decision_variable(MODEL(x)) for x in (first, second)]
        assert torch.equal(variable, parts[0] - parts[1])
    assert MODEL.discrimination_task(soft, soft, "l2").tolist() == [False, False]
    assert MODEL.discrimination_task(first, second, "max", "less").tolist() == [True, False]
    with pytest.raises(ParameterError, match=r"decision_rule must be one of max, min.*'mean'"):
        MODEL.discrimination_task(soft, soft, decision_rule="mean")


def test_discrimination_in_the_form_of_the_pages_example() -> None:
    """`choice.item() + 1` is the number of the chosen interval."""
    soft, loud = _tone(40.0, 1), _tone(60.0, 1)
    choice = MODEL.discrimination_task(soft, loud, criterion="rms")
    assert choice.dtype == torch.int64 and choice.item() + 1 == 2
    assert MODEL.discrimination_task(loud, soft, criterion="rms").item() + 1 == 1
    assert MODEL.discrimination_task(soft, soft, criterion="rms").item() == 0
    least = MODEL.discrimination_task(soft, loud, decision_rule="min", criterion="max")
    assert least.item() == 0


def test_tasks_work_on_a_model_that_returns_stages() -> None:
    model = Paulick2024(FS, 200.0, 3000.0, 3, return_stages=True)
    chosen = model.discrimination_task(_tone(40.0)[0].float(), _tone(60.0)[0].float())
    assert chosen.shape == () and not bool(chosen)


def test_a_time_window_ends_where_its_seconds_say() -> None:
    """1.001 s at 4000 Hz is sample 4004, though 1.001 * 4000 is less in floats."""
    full = [torch.arange(5000.0).expand(m, 5000) for m in COUNTS]
    assert int(1.001 * 4000.0) == 4003
    region = MODEL.roi_selection(full, time_window=(0.01, 1.001))
    assert region[0][0, 0] == 40 and region[0][0, -1] == 4003


def test_what_the_decision_methods_cannot_use() -> None:
    full = _representation()
    with pytest.raises(ShapeError, match="one channel or more"):
        MODEL.compute_decision_variable([])
    for weights in (torch.zeros(3), torch.tensor([1.0, -1.0, 1.0]), torch.full((3,), torch.nan)):
        with pytest.raises(ParameterError, match="0 or more"):
            MODEL.compute_decision_variable(full, channel_weights=weights)
    with pytest.raises(ShapeError, match="a noise as long as the signal"):
        MODEL.detection_task(_tone(60.0), _tone(60.0)[:, :800])
