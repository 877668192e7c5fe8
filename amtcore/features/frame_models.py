"""Models of frames as jobs run them: rates and feature streams of each."""

from __future__ import annotations

from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind
from amtcore.models import Cochleagram

_CHANNELS = ("time", "channel")

COCHLEAGRAM = FrameModuleModel(
    "cochleagram",
    Cochleagram,
    "McDermott and Simoncelli (2011): compressed envelopes of half-cosine filters",
    20000.0,
    {
        "cochleagram": StreamKind("Pa^0.3", _CHANNELS, "compressed envelopes, 200 frames a second"),
        "envelope": StreamKind("Pa", _CHANNELS, "envelope of each filter at the audio's rate"),
        "subbands": StreamKind("Pa", _CHANNELS, "output of each filter at the audio's rate"),
    },
)
