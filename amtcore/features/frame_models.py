"""Modules of frames as jobs run them: rates and feature streams of each."""

from __future__ import annotations

from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind
from amtcore.models import ZwickerLoudness

_TRACE, _CHANNELS = ("time", "loudness"), ("time", "channel")

ZWICKER = FrameModuleModel(
    "zwicker",
    ZwickerLoudness,
    "Zwicker loudness, ISO 532-1:2017: stationary and over time",
    48000.0,
    {
        "n": StreamKind("sone", _TRACE, "loudness"),
        "n_spec": StreamKind("sone/Bark", _CHANNELS, "specific loudness, 0.1 to 24 Bark"),
        "n_inst": StreamKind("sone", _TRACE, "loudness before its low-passes over time"),
        "level": StreamKind("phon", _TRACE, "loudness level"),
        "statistics": StreamKind(
            "sone", ("clip", "statistic"), "one row a clip: maximum and percentiles of loudness"
        ),
    },
)
