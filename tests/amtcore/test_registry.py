"""Models of other distributions: found by entry points, imported when asked for, never trusted."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from amtcore.errors import ModelLoadError, ParameterError, ShapeError, UnknownModelError
from amtcore.features.registry import (
    BUILT_IN,
    GROUP,
    build_extractor,
    get_model,
    list_models,
    registrations,
)

from ..pipeline.strangers import install

PEAK = '''
"""A model of one number a hop."""
from dataclasses import dataclass
import numpy as np
from amtcore.features import FrameDesign, FrameGrid, FrameModel, StreamKind

@dataclass(frozen=True)
class PeakParams:
    """Parameters.

    Args:
        hop_length: Samples from one
            frame to the next.
    """
    hop_length: int = 100

class Peak(FrameModel[PeakParams]):
    name, summary, default_fs_hz = "peak", "Largest sample of each hop", 16000.0
    streams = {"peak": StreamKind("input unit", ("time", "channel"), "largest sample")}
    params_class = PeakParams

    def design(self, fs_hz, params):
        hop = params.hop_length
        def compute(signal):
            frames = len(signal) // hop
            return {"peak": np.abs(signal[: frames * hop]).reshape(frames, hop).max(1)[:, None]}
        return FrameDesign({"peak": FrameGrid(1, hop)}, compute)
'''


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path; what is imported from it is forgotten."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def _peak(place: Path, distribution: str = "loud-things", **points: str) -> None:
    found = points or {"peak": "peak_model:Peak"}
    install(place, distribution, {GROUP: found}, {"peak_model": PEAK})


def test_a_model_of_another_distribution(place: Path) -> None:
    _peak(place)
    assert "peak_model" not in sys.modules and "peak" in registrations()
    assert "peak_model" not in sys.modules, "listing names imports nothing"
    clip = np.linspace(-1, 1, 1650, dtype=np.float32)
    extractor = build_extractor("peak", fs_hz=16000, params={"hop_length": 400})
    (frames,) = (made["peak"] for made in extractor.extract([clip]))
    np.testing.assert_array_equal(frames[:, 0], np.abs(clip[:1600]).reshape(4, 400).max(1))
    (info,) = extractor.streams
    assert (info.frame_rate_hz, info.width, info.axes) == (40.0, 1, ("time", "channel"))
    assert extractor.n_frames(1650) == {"peak": 4}
    described = extractor.describe()
    assert described["distribution"] == "loud-things 1.0"
    assert described["params"] == {"hop_length": 400}
    other = build_extractor("peak", fs_hz=16000)
    assert other.buffers_sha256() != extractor.buffers_sha256()
    assert "distribution" not in build_extractor("dau1997", fs_hz=16000).describe()


def test_it_is_listed_with_its_parameters(place: Path) -> None:
    _peak(place)
    (listed,) = [model.to_dict() for model in list_models() if model.name == "peak"]
    hop = {"type": "whole number", "doc": "Samples from one frame to the next.", "default": 100}
    assert json.loads(json.dumps(listed))["params"] == {"hop_length": hop}
    assert listed["distribution"] == "loud-things 1.0" and listed["error"] is None


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"hop_lenght": 1}, "no parameter 'hop_lenght': did you mean 'hop_length'"),
        ({"hop_length": "fast"}, "'hop_length': expected whole number, got 'fast'"),
        ({"hop_length": 1.5}, "expected whole number, got 1.5"),
        ({"hop_length": True}, "expected whole number, got True"),
        ({"hop_length": 0}, "a hop above 0"),
    ],
)
def test_wrong_parameters(place: Path, params: dict[str, object], message: str) -> None:
    _peak(place)
    with pytest.raises(ParameterError, match=message):
        build_extractor("peak", params=params)


def test_wrong_requests(place: Path) -> None:
    _peak(place)
    with pytest.raises(UnknownModelError, match="did you mean 'peak'"):
        get_model("peek")
    with pytest.raises(ParameterError, match="no stream 'peaks': did you mean 'peak'"):
        build_extractor("peak", streams={"peaks": {}})
    with pytest.raises(ParameterError, match="no option 'pool': it has none"):
        build_extractor("peak", streams={"peak": {"pool": "mean"}})
    with pytest.raises(ParameterError, match="float32 only"):
        build_extractor("peak", dtype="float64")
    with pytest.raises(ParameterError, match="needs whole clips"):
        build_extractor("peak").open_stream()


def test_two_distributions_of_one_name(place: Path) -> None:
    _peak(place)
    install(place / "other", "other-things", {GROUP: {"peak": "peak_model:Peak"}}, {})
    sys.path.insert(0, str(place / "other"))
    try:
        with pytest.raises(ModelLoadError, match=r"loud-things 1\.0 .*other-things 1\.0|"
                           r"other-things 1\.0 .*loud-things 1\.0"):  # fmt: skip
            get_model("peak")
        (listed,) = [model for model in list_models() if model.name == "peak"]
        assert listed.error is not None and "uninstall or rename one" in listed.error
    finally:
        sys.path.remove(str(place / "other"))


def test_a_name_of_this_package_is_not_taken_over(place: Path) -> None:
    _peak(place, "impostor", dau1997="peak_model:Peak")
    with pytest.raises(ModelLoadError, match=r"amtcore \(.*\) and impostor 1\.0"):
        get_model("dau1997")
    assert get_model("osses2021").name == "osses2021"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("no_such_module:Peak", "cannot be loaded: ModuleNotFoundError"),
        ("peak_model:Peek", "cannot be loaded: AttributeError"),
        ("peak_model:PEAK_IS_NOT_HERE.x", "cannot be loaded: AttributeError"),
        ("peak_model:PeakParams", "expected a FeatureModel or a class of one, got PeakParams"),
        ("peak_model:np", "expected a FeatureModel or a class of one, got module"),
    ],
)
def test_a_broken_one_hurts_no_other(place: Path, value: str, message: str) -> None:
    _peak(place, broken=value)
    with pytest.raises(ModelLoadError, match=rf"'broken' of loud-things 1\.0 .*{message}"):
        build_extractor("broken")
    listed = {model.name: model for model in list_models()}
    assert message.split(":")[0] in str(listed["broken"].error)
    assert {*BUILT_IN, "broken"} <= set(listed) and listed["dau1997"].error is None


def test_a_model_has_the_name_it_is_registered_by(place: Path) -> None:
    _peak(place, trough="peak_model:Peak")
    with pytest.raises(ModelLoadError, match="expected a model of the entry point's name"):
        get_model("trough")


def test_frames_of_another_shape_are_refused(place: Path) -> None:
    wrong = PEAK.replace("[:, None]", "[:, None].repeat(2, 1)")
    install(place, "loud-things", {GROUP: {"peak": "peak_model:Peak"}}, {"peak_model": wrong})
    extractor = build_extractor("peak")
    with pytest.raises(
        ShapeError, match=r"'peak'.*expected .*\(2, 1\) for 200 samples, got \(2, 2"
    ):
        extractor.extract([np.zeros(200, np.float32)])
    (empty,) = extractor.extract([np.zeros(99, np.float32)])
    assert empty["peak"].shape == (0, 1) and empty["peak"].dtype == np.float32
