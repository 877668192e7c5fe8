"""A module of frames as a job runs it: streams, chunks, clip values, ears, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from amtcore.errors import NonFiniteError, ParameterError, ShapeError
from amtcore.features import FrameGrid, StreamKind
from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.models.frame_module import FrameModule, Outputs
from amtcore.testing.models import ModelConformance
from amtcore.units import Calibration

HOP = 160


class Peaks(FrameModule):
    """Largest magnitude of each hop, and of the clip.

    Args:
        fs: Sampling rate in Hz.
        gain: Factor of every value.
        dtype: Working type.
    """

    input_unit = "digital"
    input_channels = (1, 2)
    memory_s = 0.0

    def __init__(self, fs: float, gain: float = 1.0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fs, self.gain, self.dtype = fs, gain, dtype
        self.grids = {"peaks": FrameGrid(1, HOP), "peak": FrameGrid(1, None, columns=("peak",))}

    def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
        """Peaks over both ears."""
        found, _ = self.stream(signal, None, True, names)
        return found

    def stream(
        self,
        chunk: Tensor,
        state: Any = None,
        last: bool = False,
        names: tuple[str, ...] | None = None,
    ) -> tuple[Outputs, Any]:
        """Keep what fills no hop."""
        mono = self.gain * (chunk.abs().amax(0) if chunk.ndim > 1 else chunk.abs())
        waiting, peak = (mono[:0], mono[:0]) if state is None else state
        known = torch.cat((waiting, mono))
        frames = len(known) // HOP
        peak = torch.cat((peak, mono)).amax(0, keepdim=True) if len(mono) else peak
        made = {
            "peaks": known[: frames * HOP].reshape(frames, HOP).amax(1, keepdim=True),
            "peak": peak[None] if last and len(peak) else peak.new_empty(0, 1),
        }
        return {k: made[k] for k in names or made}, (known[frames * HOP :], peak)


def model(constructor: type[FrameModule] = Peaks) -> FrameModuleModel:
    """The module as a job sees it."""
    kinds = {
        "peaks": StreamKind("input unit", ("time", "channel"), "largest magnitude of a hop"),
        "peak": StreamKind("input unit", ("clip", "statistic"), "largest magnitude of the clip"),
    }
    return FrameModuleModel("peaks", constructor, "Peaks", 16000.0, kinds)


class TestPeaks(ModelConformance):
    """It passes everything, chunk by chunk too."""

    model = model()
    other_params = {"gain": 2.0}  # noqa: RUF012


class TestPeaksOfHops(ModelConformance):
    """Without a value of the clip, a long recording may be cut."""

    model = model()
    streams = {"peaks": {}}  # noqa: RUF012
    other_params = {"gain": 2.0}  # noqa: RUF012


class WholePeaks(Peaks):
    """A module that does not run chunk by chunk."""

    can_stream = False
    whole_clips_reason = "a test says so"


def test_a_module_of_whole_clips_says_why() -> None:
    extractor = model(WholePeaks).build(16000.0, {}, {"peaks": {}})
    with pytest.raises(ParameterError, match="a test says so"):
        extractor.open_stream()


def test_digital_samples_are_not_scaled() -> None:
    for calibration in (Calibration(rms1_db_spl=90.0), Calibration(level_db_spl=60.0)):
        assert calibration.gain_for_rms(0.3, "digital") == 1.0


def test_work_in_double_precision() -> None:
    extractor = model().build(16000.0, {"gain": 1.5}, {"peaks": {}, "peak": {}}, "float64")
    (made,) = extractor.extract([np.full((2, 2 * HOP), 0.1)])
    np.testing.assert_array_equal(made["peaks"], np.full((2, 1), 1.5 * 0.1))
    np.testing.assert_array_equal(made["peak"], [[1.5 * 0.1]])


@pytest.mark.parametrize(
    ("clip", "error"),
    [
        (np.zeros((3, HOP)), ShapeError),
        (np.zeros(HOP, int), ShapeError),
        (np.full(HOP, np.nan), NonFiniteError),
    ],
)
def test_refused_clips(clip: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        model().build(16000.0, {}, {"peaks": {}}).extract([clip])


def test_outputs_of_a_wrong_shape_are_refused() -> None:
    class Wrong(Peaks):
        def outputs(self, signal: Tensor, names: tuple[str, ...] | None = None) -> Outputs:
            return {"peaks": torch.zeros(3, 2)}

    with pytest.raises(ShapeError, match=r"expected .* \(2, 1\) .* got \(3, 2\)"):
        model(Wrong).build(16000.0, {}, {"peaks": {}}).extract([np.zeros(2 * HOP)])


def test_streams_that_the_parameters_leave_out_are_refused() -> None:
    class Fewer(Peaks):
        def __init__(self, fs: float, dtype: torch.dtype = torch.float32) -> None:
            super().__init__(fs, dtype=dtype)
            del self.grids["peak"]

    with pytest.raises(ParameterError, match="with these parameters no stream 'peak'"):
        model(Fewer).build(16000.0, {}, {"peak": {}})
