"""Modules of frames as jobs run them: rates and feature streams of each."""

from __future__ import annotations

from amtcore import models
from amtcore.features.frame_module_model import FrameModuleModel
from amtcore.features.stream_info import StreamKind

_CLIP, _TRACE = ("clip", "statistic"), ("time", "value")
_CHANNELS, _MODULATIONS = ("time", "channel"), ("time", "channel_modulation")

PROGRAMME_LOUDNESS = FrameModuleModel(
    "programme_loudness",
    models.ProgrammeLoudness,
    "ITU-R BS.1770-5 and EBU R 128: loudness of a programme in LUFS, and true peak",
    48000.0,
    {
        "momentary": StreamKind("LUFS", _TRACE, "loudness of 0.4 s, every 0.1 s"),
        "short_term": StreamKind("LUFS", _TRACE, "loudness of 3 s, every 0.1 s"),
        "integrated": StreamKind("LUFS", _CLIP, "one row a clip: gated loudness"),
        "lra": StreamKind("LU", _CLIP, "one row a clip: loudness range; 0 below 3 s"),
        "true_peak": StreamKind("dBTP", _CLIP, "one row a clip: true peak of each channel"),
    },
)

_BANDS = "energy of 8 modulation filters in every channel"
SRMR_SCORE = FrameModuleModel(
    "srmr",
    models.SRMR,
    "Falk, Zheng and Chan (2010): speech-to-reverberation modulation energy ratio",
    16000.0,
    {
        "score": StreamKind("1", _CLIP, "one row a clip: SRMR, 0 for silence and short clips"),
        "energy": StreamKind("input unit^2", _MODULATIONS, _BANDS),
        "modulation_spectrogram": StreamKind(
            "input unit^2", ("clip", "channel_modulation"), f"one row a clip: mean {_BANDS}"
        ),
    },
)

ZWICKER = FrameModuleModel(
    "zwicker",
    models.ZwickerLoudness,
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
            "sone", _CLIP, "one row a clip: maximum and percentiles of loudness"
        ),
    },
)

ROUGHNESS = FrameModuleModel(
    "roughness",
    models.RoughnessDanielWeber,
    "Daniel and Weber (1997): roughness of frames of 0.2 s",
    48000.0,
    {
        "r": StreamKind("asper", _TRACE, "roughness"),
        "r_spec": StreamKind("asper", _CHANNELS, "roughness of 47 channels, half a Bark apart"),
    },
)

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

COCHLEAGRAM = FrameModuleModel(
    "cochleagram",
    models.Cochleagram,
    "McDermott and Simoncelli (2011): compressed envelopes of half-cosine filters",
    20000.0,
    {
        "cochleagram": StreamKind("Pa^0.3", _CHANNELS, "compressed envelopes, 200 frames a second"),
        "envelope": StreamKind("Pa", _CHANNELS, "envelope of each filter at the audio's rate"),
        "subbands": StreamKind("Pa", _CHANNELS, "output of each filter at the audio's rate"),
    },
)
AUDITORY_NERVE = FrameModuleModel(
    "auditory_nerve",
    models.AuditoryNerve,
    "Saddler and McDermott (2024): rates and spikes of a nerve with a phase-locking limit",
    20000.0,
    {
        "rates": StreamKind("spikes/s", _CHANNELS, "rate of each kind of fibre, high, medium, low"),
        "spikes": StreamKind("spikes", _CHANNELS, "spike counts of each kind of fibre, seeded"),
        "envelope": StreamKind("Pa", _CHANNELS, "pressure whose level drives the fibres"),
        "ihc": StreamKind("Pa", _CHANNELS, "rectified and low-passed subbands"),
        "subbands": StreamKind("Pa", _CHANNELS, "gammatone filters at the audio's rate"),
    },
)

STOI = FrameModuleModel(
    "stoi",
    models.STOI,
    "Taal et al. (2011), Jensen and Taal (2016): intelligibility of a processed clip, STOI, ESTOI",
    16000.0,
    {
        "stoi": StreamKind("1", _CLIP, "one row a clip: correlation of band envelopes"),
        "estoi": StreamKind("1", _CLIP, "one row a clip: correlation of spectrograms"),
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
