"""Modules of frames as jobs run them: rates and feature streams of each."""

from __future__ import annotations

from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind
from amtcore.models import RoughnessDanielWeber, ZwickerLoudness

_TRACE, _CHANNELS = ("time", "value"), ("time", "channel")

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
        "sharpness": StreamKind(
            "acum", ("time", "weighting"), "sharpness, DIN 45692 and three other weightings"
        ),
        "statistics": StreamKind(
            "sone", ("clip", "statistic"), "one row a clip: maximum and percentiles of loudness"
        ),
    },
)

ROUGHNESS = FrameModuleModel(
    "roughness",
    RoughnessDanielWeber,
    "Daniel and Weber (1997): roughness of frames of 0.2 s",
    48000.0,
    {
        "r": StreamKind("asper", _TRACE, "roughness"),
        "r_spec": StreamKind("asper", _CHANNELS, "roughness of 47 channels, half a Bark apart"),
    },
)
