"""Modules of frames as jobs run them: rate and streams of each."""

from __future__ import annotations

from amtcore import models
from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind

_SCORE = ("clip", "statistic")

STOI = FrameModuleModel(
    "stoi",
    models.STOI,
    "Taal et al. (2011), Jensen and Taal (2016): intelligibility of a processed clip, STOI, ESTOI",
    16000.0,
    {
        "stoi": StreamKind("1", _SCORE, "one row a clip: correlation of band envelopes"),
        "estoi": StreamKind("1", _SCORE, "one row a clip: correlation of spectrograms"),
        "kept": StreamKind("1", ("time", "flag"), "1 for frames where the clean clip is audible"),
    },
)
