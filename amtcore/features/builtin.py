"""The models of this package as jobs run them: rates and feature streams of each."""

from __future__ import annotations

from amtcore.features.filterbank_model import FilterbankModel
from amtcore.features.loudness_model import LoudnessFeatureModel
from amtcore.features.loudness_pooling import LONG, SHORT, SPECIFIC, SUMMARY
from amtcore.features.stream_info import StreamKind
from amtcore.models import Dau1997, Glasberg2002, King2019, Moore2016, Osses2021, Paulick2024

_CHANNELS, _MODULATIONS = ("time", "channel"), ("time", "channel_modulation")
_MODULATION = StreamKind(
    "model units", _MODULATIONS, "modulation filter outputs, ragged by channel"
)
_ADAPTATION = StreamKind("model units", _CHANNELS, "after the adaptation loops")
_ENVELOPE = StreamKind("input unit", _CHANNELS, "hair-cell envelope: an auditory spectrogram")
_HEARD = "sparse spikes of integrate-and-fire neurons that hear another stream: SpikeEncoder"
_SPIKES = {"spikes": StreamKind("spikes", _CHANNELS, _HEARD, "events")}

_KING_MODULATION = StreamKind(
    "input unit", _MODULATIONS, "modulation filter outputs, equal in all channels"
)
_HIGH_PASSED = StreamKind("input unit", _CHANNELS, "after the adaptation's high-pass")
_POTENTIAL = StreamKind("V", _CHANNELS, "hair-cell receptor potential above rest")
_VELOCITY = StreamKind("m/s", _CHANNELS, "basilar-membrane velocity: pool its rms or max")

_TRACE = ("time", "loudness")
_LOUDNESS = {
    SHORT: StreamKind("sone", _TRACE, "short-term loudness: of a sound event, such as a syllable"),
    LONG: StreamKind("sone", _TRACE, "long-term loudness: of a stretch of sound"),
    SPECIFIC: StreamKind("sone/Cam", _CHANNELS, "specific loudness, both ears together"),
    SUMMARY: StreamKind(
        "sone", ("clip", "statistic"), "one row a clip: maxima and percentiles of the traces"
    ),
}

_DAU = {"modulation": _MODULATION, "adaptation": _ADAPTATION, "envelope": _ENVELOPE} | _SPIKES
DAU1997 = FilterbankModel(
    "dau1997",
    Dau1997,
    "Dau, Kollmeier and Kohlrausch (1997): gammatone, hair cell, adaptation, modulation",
    44100.0,
    _DAU,
)
OSSES2021 = FilterbankModel(
    "osses2021",
    Osses2021,
    "Osses Vecchi and Kohlrausch (2021): Dau (1997) behind headphones and middle ear",
    44100.0,
    _DAU,
)
KING2019 = FilterbankModel(
    "king2019",
    King2019,
    "King, Varnet and Lorenzi (2019): gammatone, compression, high-pass, modulation",
    44100.0,
    {"modulation": _KING_MODULATION, "adaptation": _HIGH_PASSED, "envelope": _ENVELOPE} | _SPIKES,
)
PAULICK2024 = FilterbankModel(
    "paulick2024",
    Paulick2024,
    "Paulick et al. (2024), CASP: nonlinear filters, hair cell, adaptation, modulation",
    44100.0,
    {"modulation": _MODULATION, "adaptation": _ADAPTATION, "envelope": _POTENTIAL}
    | {"velocity": _VELOCITY}
    | _SPIKES,
)
GLASBERG2002 = LoudnessFeatureModel(
    "glasberg2002",
    Glasberg2002,
    "Glasberg and Moore (2002): loudness over time, one signal for both ears",
    32000.0,
    _LOUDNESS,
)
MOORE2016 = LoudnessFeatureModel(
    "moore2016",
    Moore2016,
    "Moore, Glasberg and Schlittenlacher (2016): loudness over time at two ears",
    32000.0,
    _LOUDNESS,
)
