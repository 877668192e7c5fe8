"""Every model of this package passes the tests that a stranger's model must pass."""

from __future__ import annotations

from amtcore.testing.models import ModelConformance

FS_HZ = 16000


class TestDau1997(ModelConformance):
    model, fs_hz = "dau1997", FS_HZ
    other_params = {"flow": 90.0}


class TestOsses2021(ModelConformance):
    model, fs_hz = "osses2021", FS_HZ
    params, other_params = {"fhigh": 1000.0}, {"fhigh": 1000.0, "flow": 90.0}


class TestKing2019(ModelConformance):
    model, fs_hz = "king2019", FS_HZ
    params = {"basef": 1000.0, "phase_insens": "none"}
    other_params = {"basef": 1000.0, "phase_insens": "none", "compression_n": 0.4}
    streams = {"modulation": {}, "adaptation": {}, "envelope": {}, "spikes": {"gain": 1.0}}


class TestKing2019OfWholeClips(ModelConformance):
    model, fs_hz = "king2019", FS_HZ
    params, other_params = {"basef": 1000.0}, {"basef": 900.0}
    streams = {"modulation": {"pool": "rms"}}


class TestPaulick2024(ModelConformance):
    model, fs_hz = "paulick2024", FS_HZ
    params = {"n_channels": 5, "fhigh": 4000.0}
    other_params = {"n_channels": 6, "fhigh": 4000.0}
    streams = {"modulation": {}, "adaptation": {}, "envelope": {}, "velocity": {"pool": "rms"},
               "spikes": {}}  # fmt: skip


class TestGlasberg2002(ModelConformance):
    model = "glasberg2002"
    other_params = {"loudness_integration_kwargs": {"tau_attack": 0.03}}


class TestMoore2016(ModelConformance):
    model = "moore2016"
    other_params = {"binaural_loudness_kwargs": {"p": 1.0}}
