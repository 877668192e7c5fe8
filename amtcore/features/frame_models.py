"""Models of frames as jobs run them: rates and feature streams of each."""

from __future__ import annotations

from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind
from amtcore.models.programme_loudness import ProgrammeLoudness
from amtcore.models.srmr import SRMR

_BLOCKS, _CLIP = ("time", "loudness"), ("clip", "statistic")

PROGRAMME_LOUDNESS = FrameModuleModel(
    "programme_loudness",
    ProgrammeLoudness,
    "ITU-R BS.1770-5 and EBU R 128: loudness of a programme in LUFS, and true peak",
    48000.0,
    {
        "momentary": StreamKind("LUFS", _BLOCKS, "loudness of 0.4 s, every 0.1 s"),
        "short_term": StreamKind("LUFS", _BLOCKS, "loudness of 3 s, every 0.1 s"),
        "integrated": StreamKind("LUFS", _CLIP, "one row a clip: gated loudness"),
        "lra": StreamKind("LU", _CLIP, "one row a clip: loudness range; 0 below 3 s"),
        "true_peak": StreamKind("dBTP", _CLIP, "one row a clip: true peak of each channel"),
    },
)

_BANDS = "energy of 8 modulation filters in every channel"
SRMR_SCORE = FrameModuleModel(
    "srmr",
    SRMR,
    "Falk, Zheng and Chan (2010): speech-to-reverberation modulation energy ratio",
    16000.0,
    {
        "score": StreamKind("1", _CLIP, "one row a clip: SRMR, 0 for silence and short clips"),
        "energy": StreamKind("input unit^2", ("time", "channel_modulation"), _BANDS),
        "modulation_spectrogram": StreamKind(
            "input unit^2", ("clip", "channel_modulation"), f"one row a clip: mean {_BANDS}"
        ),
    },
)
