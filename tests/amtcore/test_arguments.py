"""Every constructor argument of every public class: wrong units, ranges and kinds are refused.

Each argument belongs to a category, and a category has values that no argument in it may take.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import amtcore
from amtcore.errors import AmtError, ParameterError
from amtcore.features.registry import build_extractor
from amtcore.features.spike_encoder import SpikeOptions
from amtcore.models.frame_module import FrameModule
from amtcore.plain_numbers import plain_number
from tests.short import some

FS = 16000
_FC = [500.0, 1000.0]
_HZ = torch.tensor(_FC)
_RANGE = {"flow": 500.0, "fhigh": 1000.0}

#: Arguments that a class cannot be built without, and arguments that make it small.
NEEDS: dict[str, dict[str, Any]] = {
    "Calibration": {"rms1_db_spl": 100.0},
    "LIFExodus": {"shape": (4, 2)},
    **{name: {"fs": FS} for name in ("ProgrammeLoudness", "SRMR", "Cochleagram")},
    "Resampler": {"fs": FS, "fs_out": 4000},
    "ModulationSpectrum": {"fs": FS},
    **{name: {"fs": FS} for name in (
        "AuditoryModulationSpectrum", "AuditorySpectrogram", "RateScale", "STOI")},
    "ButterworthFilter": {"fs": FS, "fc": 100.0},
    "Paulick2024": {"fs": FS, **_RANGE, "n_channels": 2},
    **{name: {"fs": FS, **_RANGE} for name in ("Dau1997", "King2019", "Osses2021")},
    **{name: {"fs": FS, "fc": _FC} for name in (
        "GammatoneFilterbank", "DRNLFilterbank", "ModulationFilterbank",
        "FastModulationFilterbank")},
    **{name: {"frequencies": _HZ} for name in ("Moore2016ExcitationPattern", "ERBIntegration")},
    "ExcitationPattern": {"frequencies": _HZ, "fc_hz": _FC},
    **{name: {"fc_hz": _FC} for name in ("Moore2016SpecificLoudness", "SpecificLoudness")},
    **{name: {"fs": FS} for name in (
        "HeadphoneFilter", "MiddleEarFilter", "OuterMiddleEarFilter", "IHCEnvelope", "AdaptLoop",
         "IHCPaulick2024", "King2019ModulationFilterbank", "FastKing2019ModulationFilterbank",
         "LoudnessEar")},
}  # fmt: skip

_NO_NUMBER = [math.nan, math.inf, -math.inf, True, False, np.bool_(True), "1", "16k", b"1", 1j, {}]
#: Category -> values that are refused, beside None where the default is not None.
REFUSED: dict[str, list[Any]] = {
    "rate": [*_NO_NUMBER, 0, -1.0, 1e9, [100.0, 200.0]],
    "frame_rate": [*_NO_NUMBER, 0, -1.0, 1e-30, 1e9, [100.0, 200.0]],
    "rate_or_0": [*_NO_NUMBER, -1.0, 1e9],
    "rates": [*_NO_NUMBER, 0.0, [], [0.0], [-100.0, 200.0], [100.0, math.nan], [100.0, math.inf],
              ["100"], [True], [[100.0]]],
    "seconds": [*_NO_NUMBER, 0.0, -0.01, 50.0, 200.0],
    "length_s": [*_NO_NUMBER, 0.0, -0.01, 1e4],
    "list_of_seconds": [*_NO_NUMBER, [], [0.005, 0.0], [-0.1], [5.0, 50.0, 129.0], ["0.1"], [True]],
    "rate_per_ms": [*_NO_NUMBER, 0.0, 1.0, -0.1, 45.0],
    "level": [*_NO_NUMBER, 1e4, -1e4],
    "level_below_100": [*_NO_NUMBER, 100.0, 120.0, -1e4],
    "amplitude": [*_NO_NUMBER, 0.0, 1.0, -0.1, [0.1, 0.0], [True], [math.nan]],
    "positive": [*_NO_NUMBER, 0.0, -1.0],
    "constant_q": [*_NO_NUMBER, 0.0, -1.0, 1e-30, 1e9],
    "not_negative": [*_NO_NUMBER, -1.0],
    "exponent": [*_NO_NUMBER, 0.0, -0.3, 30.0, [0.3, -1.0], [True], [math.nan]],
    "share": [*_NO_NUMBER, -0.1, 1.0],
    "zero_or_one": [*_NO_NUMBER, -1, 2, 0.5],
    "factor": [*_NO_NUMBER, 0.0, -1.0, 1e3],
    "quality": [*_NO_NUMBER, 0.5, 0.0, -2.0],
    "limit": [*_NO_NUMBER, -1.0, 0.5, 1.0],
    "cam": [*_NO_NUMBER, 0.0, -1.0, 100.0],
    "slope": [*_NO_NUMBER, 0.0, -4.0, 27.0],
    "slope_per_db": [*_NO_NUMBER, 0.35, -0.4, -0.5],
    "zero": [*_NO_NUMBER, 0.1],
    "count": [*_NO_NUMBER, 0, -1, 1.5, [1], 10**30],
    "count_or_0": [*_NO_NUMBER, -1, 1.5, 1e308],
    "counts": [*_NO_NUMBER, [], [1024, 512.5], [0], [1023], ["1024"], [512, 1024]],
    "flag": [math.nan, 0, 1, 2, "yes", "True", [], None],
    "maybe_flag": [math.nan, 0, 1, "yes", []],
    "only_false": [True, 0, 1, "no", None],
    "name": ["no such name", 3, True, [], None, math.nan],
    "maybe_name": ["no such name", 3, True, []],
    "type": [torch.float16, torch.int32, "float32", np.float32, 32, None],
    "options": ["learnable", 3, [("learnable", True)], {3: True}, {"no_such_argument": 1}, True],
    "neurons": [math.nan, math.inf, True, "1", 1j, [True, True], [math.nan, 0.1], {}],
    "neurons_above_0": [math.nan, math.inf, True, "1", 1j, 0.0, -0.1, [0.1, -0.1], {}],
    "shape": [0, -1, (4, 0), (4.0, 2), (True, 1), "42", (5, 2), None, math.nan],
    "spikes": [math.nan, 0, -1, 1.5, True, "3", None],
    "audiogram": [*_NO_NUMBER, 3.0, [10], {0: 10}, {-250: 10}, {"low": 10}, {250: 131}, {250: -21},
                  {250: math.nan}, {250: True}, {math.inf: 10}, {250: 10, "250.0": 10}],
    "part": [*_NO_NUMBER, -0.1, 1.1, [0.5]],
    "db_spl": [math.nan, math.inf, True, "100", -200.0, 400.0],
}  # fmt: skip
_CATEGORIES = {
    "frame_rate": "fs_out frame_rate_hz",
    "constant_q": "qfactor modbank_qfactor",
    "rate": "fs fhigh adt_hp_fc mflow mfhigh basef subfs cutoff max_mfc lp_cutoff f_min "
    "f_max low_freq min_cf max_cf",
    "rate_or_0": "flow lowpass_cutoff",
    "rates": "fc fc_hz frequencies rates scales",
    "length_s": "win_s hop_s",
    "seconds": "tau_attack tau_release ltl_tau_attack ltl_tau_release",
    "list_of_seconds": "tau",
    "rate_per_ms": "attack_alpha release_alpha",
    "level": "knee_db compression_knee_db dboffset gain_db",
    "level_below_100": "minspl",
    "amplitude": "min_level",
    "positive": "sigma p C ir_length_ratio dt learning_window q_erb",
    "not_negative": "att_factor lra_pad skip",
    "share": "overlap",
    "zero_or_one": "bin_offset",
    "exponent": "n compression_n",
    "factor": "betamul erb_scale bandwidth_scale erb_step",
    "quality": "Q",
    "limit": "limit",
    "cam": "erb_lower erb_upper",
    "slope": "upper_slope_base lower_slope_base",
    "slope_per_db": "lower_slope_per_db",
    "zero": "upper_slope_per_db noise_std",
    "count": "order adt_hp_order n_channels n_windows hop_length nmod modbank_nmod "
    "bands_per_octave channels_per_octave n_filters",
    "count_or_0": "tolerance",
    "counts": "n_ffts",
    "flag": "learnable return_stages compensate_delay normalize_gain lp_150hz use_outerear "
    "fast norm relative",
    "maybe_flag": "use_upper_limit",
    "only_false": "has_rec",
    "name": "method btype model subject phase_type compression_type phase_insens compensation_type "
    "field_type filter_type leak_mode layout framing bandwidth field denominator weighting "
    "short hair_cell compression boundary",
    "maybe_name": "preset backend",
    "type": "dtype",
    "neurons": "bias",
    "neurons_above_0": "tau_mem tau_syn threshold alpha beta dash_mem dash_syn",
    "shape": "shape",
    "spikes": "max_spikes_per_dt",
    "audiogram": "audiogram",
    "part": "ohc_share",
    "db_spl": "rms1_db_spl level_db_spl",
}
CATEGORY = {name: kind for kind, names in _CATEGORIES.items() for name in names.split()}
#: Arguments that are something else in one class.
ELSEWHERE = {
    ("ButterworthFilter", "fc"): "rate",
    ("GammatoneFilterbank", "n"): "count",
    ("AdaptLoop", "preset"): "name",
}
#: Models of frames have arguments of their own, whose ranges their files test.
FRAME_MODELS = [
    n
    for n in amtcore.__all__
    if inspect.isclass(kind := getattr(amtcore, n)) and issubclass(kind, FrameModule)
]
CLASSES = [
    n for n in amtcore.__all__ if inspect.isclass(getattr(amtcore, n)) and n not in FRAME_MODELS
]


def _arguments(name: str) -> Iterator[tuple[str, inspect.Parameter]]:
    """Arguments of a class, those that it passes on to its base among them."""
    for base in getattr(amtcore, name).__mro__:
        parameters = inspect.signature(base).parameters
        yield from ((k, p) for k, p in parameters.items() if p.kind.name[:3] != "VAR")
        if not any(p.kind.name[:3] == "VAR" for p in parameters.values()):
            return


def _category(name: str, argument: str) -> str:
    if argument.endswith("_kwargs"):
        return "options"
    return ELSEWHERE.get((name, argument)) or CATEGORY[argument]


def build(name: str, **options: Any) -> Any:
    return getattr(amtcore, name)(**{**NEEDS.get(name, {}), **options})


EVERY = [(name, argument) for name in CLASSES for argument, _ in _arguments(name)]


@pytest.mark.parametrize(("name", "argument"), some(3, EVERY), ids=lambda part: part)
def test_wrong_units_ranges_and_kinds_are_refused(name: str, argument: str) -> None:
    """One line that names the argument, and nothing accepted without a word."""
    kind = _category(name, argument)
    values = list(REFUSED[kind])
    accepted = []
    for value in values:
        try:
            build(name, **{argument: value})
        except (AmtError, TypeError) as error:
            unknown = isinstance(error, TypeError)
            assert not unknown or "no_such_argument" in str(error), f"{value!r}: {error}"
            assert "\n" not in str(error)
        else:
            accepted.append(value)
    assert accepted == []


@pytest.mark.parametrize("name", FRAME_MODELS)
def test_models_of_frames_refuse_what_no_argument_may_be(name: str) -> None:
    """Arguments of a stage's own are passed on by name, so options are tried with the stage."""
    accepted = []
    for argument, parameter in _arguments(name):
        wrong: list[Any] = [math.nan, -math.inf, 1j, b"1", object(), [math.nan]]
        wrong += [True] * (not isinstance(parameter.default, bool))
        wrong += [None] * (parameter.default is not None and argument != "power_law_default")
        wrong += [1e9] * (argument == "fs")
        for value in wrong:
            try:
                build(name, **{argument: value})
            except AmtError as error:
                assert argument in str(error) and "\n" not in str(error)
            else:
                accepted.append((argument, value))
    assert accepted == []


_VALUES: dict[str, Any] = {
    "fs": 32000, "fs_out": 8000, "flow": 400, "fhigh": 1200, "basef": 700, "subfs": 4000,
    "cutoff": 900, "max_mfc": 100, "lp_cutoff": 3, "f_min": 100, "f_max": 4000, "fc": 200,
    "lowpass_cutoff": 120, "n": 2, "n_channels": 3, "order": 2, "nmod": 3, "modbank_nmod": 3,
    "hop_length": 64, "n_windows": 4, "tolerance": 3, "adt_hp_order": 2, "minspl": -10,
    "min_level": 0.001, "limit": 5, "Q": 1, "mflow": 3, "mfhigh": 90, "adt_hp_fc": 4,
    "attack_alpha": 0.03, "release_alpha": 0.02, "erb_lower": 2, "erb_upper": 30, "noise_std": 0,
    "upper_slope_per_db": 0, "lower_slope_per_db": -0.25, "max_spikes_per_dt": 3, "shape": 4,
    "frame_rate_hz": 100, "overlap": 0.25, "bin_offset": 1, "skip": 0.1,
    "level_db_spl": None, "rms1_db_spl": 90.0, "fc_hz": None, "frequencies": None, "alpha": None,
    "beta": None, "dash_mem": None, "dash_syn": None, "n_ffts": None, "tau": None,
}  # fmt: skip
_WHOLE = {"order", "n_channels", "nmod", "modbank_nmod", "hop_length", "n_windows", "tolerance"}


def _numeric(name: str) -> Iterator[tuple[str, int | float]]:
    """Numeric arguments of a class with a valid value, not the default where another is known."""
    for argument, parameter in _arguments(name):
        value = _VALUES.get(argument, parameter.default)
        if (name, argument) not in SINGLE and plain_number(value) is not None:
            yield argument, value


#: At 100 Hz the spectrogram's rate resolves no band.
NO_BANDS = {("AuditoryModulationSpectrum", "f_min")}
SINGLE = (
    {(name, "fc") for name in CLASSES if name != "ButterworthFilter"}
    | {("Moore2016", "fs")}
    | NO_BANDS
)
NUMBERS = [(name, argument, value) for name in CLASSES for argument, value in _numeric(name)]


@pytest.mark.parametrize(("name", "argument", "value"), some(4, NUMBERS))
def test_numbers_of_numpy_and_torch_are_numbers(name: str, argument: str, value: float) -> None:
    kinds: list[Callable[[Any], Any]] = [np.float64, lambda v: torch.tensor(v, dtype=torch.float64)]
    if isinstance(value, int):
        kinds += [np.int64]
    plain = build(name, **{argument: value})
    for kind in kinds if argument != "shape" else [np.int64]:
        other = build(name, **{argument: kind(value)})
        assert repr(other) == repr(plain)
        if isinstance(plain, torch.nn.Module):
            mine, theirs = plain.state_dict(), other.state_dict()
            assert all(torch.equal(mine[key], theirs[key]) for key in mine)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        *((name, {"flow": 1000.0, "fhigh": fhigh}, "flow < fhigh") for fhigh in (1000.0, 500.0)
          for name in ("Dau1997", "King2019", "Osses2021", "Paulick2024", "OuterMiddleEarFilter")),
        *((name, {"fhigh": 8001.0}, "fhigh <= half the sampling rate")
          for name in ("Dau1997", "King2019", "Osses2021", "Paulick2024")),
        ("GammatoneFilterbank", {"fc": [500.0, 8000.0]}, "below half the sampling rate"),
        ("DRNLFilterbank", {"fc": [500.0, 8000.0]}, "below half the sampling rate"),
        ("ButterworthFilter", {"fc": 8000.0}, "below half the sampling rate"),
        ("IHCEnvelope", {"cutoff": 8000.0}, "below half the sampling rate"),
        ("ModulationFilterbank", {"lp_cutoff": 8000.0}, "below half the sampling rate"),
        ("ModulationFilterbank", {"lowpass_cutoff": 8000.0}, "below half the sampling rate"),
        ("ModulationFilterbank", {"max_mfc": 9000.0}, "below half the sampling rate"),
        ("King2019", {"basef": 7900.0}, "below half the sampling rate"),
        ("King2019", {"adt_hp_fc": 8000.0}, "below half the sampling rate"),
        ("King2019", {"mflow": 200.0}, "mflow <= mfhigh"),
        ("King2019", {"mfhigh": 9000.0}, "below half the sampling rate"),
        ("Dau1997", {"basef": 2000.0}, "must lie in 500..1000 Hz"),
        ("Moore2016ExcitationPattern", {"erb_lower": 30.0, "erb_upper": 20.0}, "lower <= upper"),
        ("ERBIntegration", {"f_min": 4000.0, "f_max": 100.0}, "lower <= upper"),
        ("ERBIntegration", {"f_max": 16001.0}, "half the sampling rate"),
        ("ExcitationPattern", {"fc_hz": [1000.0, 500.0]}, "ascend"),
        ("ExcitationPattern", {"frequencies": [1000.0, 500.0]}, "ascend"),
        ("MultiResolutionFFT", {"fs": 30.0}, "no frequency above 20 Hz"),
        ("Calibration", {"level_db_spl": 60.0}, "exactly one"),
    ],
)  # fmt: skip
def test_arguments_that_do_not_go_together(name: str, options: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build(name, **options)


STAGES = [(name, argument) for name, argument in EVERY if argument.endswith("_kwargs")]


@pytest.mark.parametrize(("name", "argument"), some(3, STAGES), ids=lambda part: part)
def test_a_stage_cannot_contradict_its_model(name: str, argument: str) -> None:
    """One truth about rate, type and learning; the same again is no contradiction."""
    for given in ({"learnable": True}, {"dtype": torch.float64}, {"fs": 22050.0}):
        if argument == "compression_kwargs" and "fs" in given:
            continue  # has no rate
        (key,) = given
        with pytest.raises(ParameterError, match=f"{argument}: {key} is the model's"):
            build(name, **{argument: given})
    model = build(name, **{argument: {"learnable": False, "dtype": torch.float32}})
    assert not list(model.parameters()) and model.dtype == torch.float32


def test_slopes_in_dB_per_erb_are_refused_with_the_conversion() -> None:
    """27 dB per ERB and -0.4 dB per ERB and dB are the old page's; roex slopes are 4 and -0.35."""
    for key, value, here in (
        ("upper_slope_base", 27.0, "27 dB per ERB is 6.22 here"),
        ("lower_slope_base", 27, "27 dB per ERB is 6.22 here"),
        ("lower_slope_per_db", -0.4, "-0.4 dB per ERB is -0.695 here"),
    ):
        for model in (
            lambda **k: amtcore.Glasberg2002(excitation_kwargs=k),
            lambda **k: amtcore.Moore2016(excitation_kwargs=k),
            lambda **k: build("ExcitationPattern", **k),
        ):
            with pytest.raises(ParameterError, match=here):
                model(**{key: value})
    slopes = {"upper_slope_base": 6.2, "lower_slope_base": 6.2, "lower_slope_per_db": -0.5}
    assert build("ExcitationPattern", **slopes).lower_slope_base.item() == pytest.approx(6.2)


def test_the_conversion_of_slopes_is_that_of_the_filter() -> None:
    """Two filters' weights 8 and 9 ERB away differ by about 4.34 b dB."""
    from amtcore.stages.excitation import DB_PER_ERB

    b = 27.0 / DB_PER_ERB
    near, far = ((1 + b * d) * math.exp(-b * d) for d in (8.0, 9.0))
    assert 10 * math.log10(near / far) == pytest.approx(27.0, rel=0.03)


@pytest.mark.parametrize("wrong", [True, 1.5, "2", math.nan, -1, None])
def test_settings_of_the_process_are_whole_numbers(wrong: Any) -> None:
    for setting in (amtcore.set_num_threads, amtcore.set_buffer_limit):
        with pytest.raises(ParameterError, match="whole number"):
            setting(wrong)
    amtcore.set_num_threads(np.int64(amtcore.get_num_threads()))


def test_options_of_a_spike_stream_and_an_extractors_rate() -> None:
    """Counts of numpy are counts; True is none; a rate of 0 is not the default rate."""
    options = SpikeOptions(neurons_per_channel=np.int64(2), max_spikes_per_step=np.int32(3))
    assert options == SpikeOptions(neurons_per_channel=2, max_spikes_per_step=3)
    for wrong in ({"neurons_per_channel": True}, {"max_spikes_per_step": "3"},
                  {"step_rate_hz": True}, {"step_rate_hz": math.nan}):  # fmt: skip
        with pytest.raises(ParameterError, match=next(iter(wrong))):
            SpikeOptions(**wrong)
    with pytest.raises(ParameterError, match="fs must be"):
        build_extractor("dau1997", fs_hz=0)
    assert build_extractor("dau1997", fs_hz=np.float32(16000)).fs_hz == 16000.0
