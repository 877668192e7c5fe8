"""Modules of frames as jobs run them: rate and streams of each."""

from __future__ import annotations

from amtcore import models
from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind

_CHANNELS = ("time", "channel")

CARFAC = FrameModuleModel(
    "carfac",
    models.CARFAC,
    "Lyon (2017), CARFAC v2: cascade of resonators, hair cells, coupled gain control",
    22050.0,
    {
        "nap": StreamKind("1", _CHANNELS, "mean firing rate of a frame, 0 at rest"),
        "bm": StreamKind("input unit", _CHANNELS, "RMS of the membrane's motion in a frame"),
        "agc": StreamKind("1", _CHANNELS, "mean of the gain control's memory in a frame"),
    },
)
SAI = FrameModuleModel(
    "sai",
    models.SAI,
    "Lyon (2017): stabilised auditory image of the firing rates of CARFAC",
    22050.0,
    {"sai": StreamKind("1", ("time", "channel_lag"), "stabilised auditory image: lags by channel")},
)
