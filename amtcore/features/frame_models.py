"""Modules of frames as jobs run them: rate and streams of each."""

from __future__ import annotations

from amtcore import models
from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind

_SCORE = ("clip", "statistic")
_CHANNELS, _MODULATIONS = ("time", "channel"), ("time", "channel_modulation")

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
AUDITORY_SPECTROGRAM = FrameModuleModel(
    "auditory_spectrogram",
    models.AuditorySpectrogram,
    "Chi, Ru and Shamma (2005), early stage: constant-Q filters, hair cell, lateral inhibition",
    16000.0,
    {"spectrogram": StreamKind("input unit", _CHANNELS, "leaky integral, every 8 ms")},
)
MODULATION_SPECTRUM = FrameModuleModel(
    "modulation_spectrum",
    models.AuditoryModulationSpectrum,
    "Power of an auditory spectrogram in octave bands of modulation frequency",
    16000.0,
    {
        "energy": StreamKind("1", _MODULATIONS, "energy of each band relative to the mean squared"),
        "mean": StreamKind("input unit", _CHANNELS, "weighted mean of each channel in the window"),
    },
)
RATE_SCALE = FrameModuleModel(
    "rate_scale",
    models.RateScale,
    "Chi, Ru and Shamma (2005), cortical stage: ripples by rate, scale and direction",
    16000.0,
    {
        "rate_scale": StreamKind("input unit", ("time", "ripple"), "mean modulus over channels"),
        "rate_scale_mean": StreamKind("input unit", ("clip", "ripple"), "one row a clip: its mean"),
        "scale_frequency": StreamKind(
            "input unit", ("time", "channel_scale"), "mean modulus over directions and rates"
        ),
        "rate_frequency": StreamKind(
            "input unit", ("time", "channel_rate"), "mean modulus over scales"
        ),
    },
)
