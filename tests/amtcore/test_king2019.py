"""King2019 against the stored reference arrays, scipy, and the tones of its paper."""

from __future__ import annotations

import functools
import math
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import scipy.signal
import torch

from amtcore import (
    FastKing2019ModulationFilterbank,
    FastModulationFilterbank,
    King2019,
    King2019ModulationFilterbank,
    ModulationFilterbank,
    Resampler,
)
from amtcore.errors import ParameterError
from amtcore.features.registry import build_extractor
from amtcore.kernels.operations.envelope import HILBERT_ENVELOPE
from amtcore.kernels.operators import operator

from ..compare import FLOAT32, FLOAT64, KERNEL32, KERNEL64, Tolerance, assert_close
from ..short import spread
from .compiling import one_graph
from .golden_files import DTYPES, load, names

hilbert_envelope = operator(HILBERT_ENVELOPE)

FILES = names("king2019")
STAGES = {"compressed": "compressed_response", "ihc": "ihc", "adapted": "adapted_response"}
BANKS = {"out_bandpass": "none", "out_hilbert": "hilbert"}
FS = 16000
#: The reference program runs fourth-order polynomials; its 2 Hz band is 3.5 % off.
BAND = Tolerance(1e-3, "direct-form band-passes of the reference program", 1e-12)
SLOWEST_BAND = Tolerance(5e-2, "direct-form 2 Hz band-pass of the reference program", 1e-12)
SECTIONS = Tolerance(1e-8, "scipy's sections at 2 Hz and 44.1 kHz")


@functools.cache
def _outputs(name: str, dtype: torch.dtype, phase: str) -> tuple[Any, dict[str, torch.Tensor]]:
    golden = load(name)
    fs, flow, fhigh = (float(golden[key]) for key in ("fs", "flow", "fhigh"))
    model = King2019(fs, flow, fhigh, return_stages=True, dtype=dtype, phase_insens=phase)
    return model((torch.from_numpy(golden["input"].ravel()) / 2).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", FILES)
def test_stored_stage(name: str, stage: str, dtype: str) -> None:
    golden = load(name)
    _, stages = _outputs(name, DTYPES[dtype], "none")
    got = stages[STAGES[stage]][golden["sel"].ravel().astype(int)].double().numpy().T[::10]
    tolerance = FLOAT64 if dtype == "float64" else FLOAT32
    assert_close(got, golden[f"{stage}@10"], tolerance, f"{name} {stage}")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bank", BANKS)
@pytest.mark.parametrize("name", FILES)
def test_stored_modulation(name: str, bank: str, dtype: str) -> None:
    golden = load(name)
    out, _ = _outputs(name, DTYPES[dtype], BANKS[bank])
    got = out.double().numpy()[::10, golden["sel"].ravel().astype(int)]
    for m, mfc in enumerate(golden["mfc"].ravel()):
        tolerance = SLOWEST_BAND if mfc < 3 else BAND
        assert_close(got[..., m], golden[f"{bank}@10"][..., m], tolerance, f"{name} {mfc:.0f} Hz")


@pytest.mark.parametrize("name", FILES)
def test_stored_frequencies(name: str) -> None:
    golden = load(name)
    model = King2019(float(golden["fs"]), float(golden["flow"]), float(golden["fhigh"]))
    np.testing.assert_allclose(model.fc.numpy(), golden["fc"].ravel(), rtol=1e-6)
    np.testing.assert_allclose(model.mfc.numpy(), golden["mfc"].ravel(), rtol=1e-6)


def test_files_are_there() -> None:
    assert len(FILES) == 5


# --- the modulation filterbank ---


@pytest.mark.parametrize("fs", [FS, 44100])
@pytest.mark.parametrize("q", [0.5, 1.0, 3.0])
def test_bands_are_scipys_sections(q: float, fs: int) -> None:
    x = torch.randn(1, 2, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bank = King2019ModulationFilterbank(fs, qfactor=q, phase_insens="none", dtype=torch.float64)
    y = bank(x)
    for m, mfc in enumerate(bank.mfc.tolist()):
        middle, half = mfc * math.sqrt(4 + 1 / q**2) / 2, mfc / (2 * q)
        edges = [middle - half, middle + half]
        sos = scipy.signal.butter(2, edges, "bandpass", fs=fs, output="sos")
        assert_close(y[:, :, m], scipy.signal.sosfilt(sos, x.numpy()), SECTIONS, f"{mfc:.1f} Hz")


def test_neighbouring_bands_meet_at_their_edges() -> None:
    bank = King2019ModulationFilterbank(FS, dtype=torch.float64)
    low, high = bank.edges()
    assert torch.allclose(high[:-1], low[1:], rtol=1e-9)
    assert torch.allclose(bank.mfc, (low * high).sqrt())


def test_number_of_filters_and_range() -> None:
    bank = King2019ModulationFilterbank(FS, mflow=4.0, mfhigh=64.0, nmod=5, dtype=torch.float64)
    assert torch.allclose(bank.mfc, torch.tensor([4.0, 8, 16, 32, 64], dtype=torch.float64))
    ratio = (math.sqrt(5) + 1) / (math.sqrt(5) - 1)
    exact = King2019ModulationFilterbank(FS, mflow=2.0, mfhigh=2.0 * ratio**3)
    assert len(exact.mfc) == 4


@pytest.mark.parametrize("samples", [1, 2, 3, 441, 1000, 1009])
def test_hilbert_envelope_is_scipys(samples: int) -> None:
    """Also where the length is a prime, which takes the folded convolution."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, samples))
    expected = np.abs(scipy.signal.hilbert(x))
    expected *= np.sqrt(np.mean(x**2, -1) / np.mean(expected**2, -1))[:, None]
    assert_close(hilbert_envelope(torch.from_numpy(x)), expected, KERNEL64)


def test_envelope_of_silence_and_gradients() -> None:
    silent = torch.zeros(2, 20, dtype=torch.float64, requires_grad=True)
    envelope = hilbert_envelope(silent)
    envelope.sum().backward()
    assert (envelope < 1e-300).all() and (silent.grad == 0).all()
    for samples in (11, 13):
        x = torch.randn(2, samples, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(hilbert_envelope, (x,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize(("rows", "samples"), [(1, 441), (5, 1009), (4, 4096)])
def test_envelope_kernel_equals_torch(rows: int, samples: int, dtype: str) -> None:
    kind, tolerance = {"float32": (torch.float32, KERNEL32), "float64": (torch.float64, KERNEL64)}[
        dtype
    ]
    x = torch.randn(rows, samples, generator=torch.Generator().manual_seed(0), dtype=kind)
    expected = hilbert_envelope(x, "reference")
    assert_close(hilbert_envelope(x), expected, tolerance)
    if rows == 5 and kind == torch.float32:  # the compiler looks at shapes alone
        assert torch.equal(one_graph(hilbert_envelope)(x), hilbert_envelope(x))
    mapped = torch.func.vmap(hilbert_envelope)(x.unsqueeze(1)).squeeze(1)
    assert_close(mapped, expected, tolerance)


def test_clips_side_by_side_equal_one_at_a_time() -> None:
    """More clips than threads go to the threads, fewer share them."""
    extractor = build_extractor("king2019", fs_hz=FS, threads=2)
    rng = np.random.default_rng(0)
    clips = [rng.standard_normal(n).astype(np.float32) for n in (800, 1600, 0, 1009)]
    together = extractor.extract(clips)
    for clip, got in zip(clips, together, strict=True):
        (alone,) = extractor.extract([clip])
        np.testing.assert_array_equal(got["modulation"], alone["modulation"])


def test_phase_is_dropped_above_10_hz_only() -> None:
    x = torch.randn(1, 1, 3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    bands, dropped = (
        King2019ModulationFilterbank(FS, phase_insens=phase, dtype=torch.float64)(x)
        for phase in ("none", "hilbert")
    )
    assert torch.equal(bands[:, :, :2], dropped[:, :, :2])
    assert (dropped[:, :, 2:] >= 0).all() and (bands[:, :, 2:] < 0).any()
    assert_close(dropped.square().mean(-1), bands.square().mean(-1), FLOAT64, "equal power")


def test_fast_names_are_the_exact_filters() -> None:
    x = torch.randn(1, 2, 300, generator=torch.Generator().manual_seed(0))
    fast = FastKing2019ModulationFilterbank(FS, ir_length_ratio=0.5)
    assert torch.equal(fast(x), King2019ModulationFilterbank(FS)(x))
    assert fast.distribute_gradients() is None
    grouped = FastModulationFilterbank(FS, [500.0, 900.0], preset="jepsen2008", tolerance=1)
    exact = ModulationFilterbank(FS, [500.0, 900.0], preset="jepsen2008")
    assert torch.equal(torch.cat(grouped(x), 1), torch.cat(exact(x), 1))
    assert grouped.distribute_gradients() is None


# --- the model ---


def test_a_base_frequency_gives_five_channels_one_erb_apart() -> None:
    model = King2019(48000, basef=5000.0, dtype=torch.float64)
    assert model.num_channels == 5 and float(model.fc[2]) == pytest.approx(5000.0)
    numbers = 9.2645 * torch.log1p(0.00437 * model.fc)
    assert torch.allclose(numbers.diff(), torch.ones(4, dtype=torch.float64))
    assert model.flow == pytest.approx(float(model.fc[0]))


def test_amplitude_modulation_shows_at_its_rate() -> None:
    t = torch.arange(2 * FS, dtype=torch.float64) / FS
    tone = 0.01 * (1 + torch.sin(2 * math.pi * 14 * t)) * torch.sin(2 * math.pi * 1000 * t)
    model = King2019(FS, basef=1000.0, dtype=torch.float64)
    power = model(tone)[FS:, 2].square().mean(0)
    assert int(power.argmax()) == 2 and float(model.mfc[2]) == pytest.approx(13.7, abs=0.1)


@pytest.mark.parametrize("phase", ["none", "hilbert"])
@pytest.mark.parametrize("subfs", [1000.0, 12000.0])
def test_output_at_another_rate_is_resample_poly(subfs: float, phase: str) -> None:
    x = 0.02 * torch.randn(2, 1601, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings = {"basef": 1000.0, "dtype": torch.float64, "phase_insens": phase}
    full, lower = King2019(FS, **settings)(x), King2019(FS, subfs=subfs, **settings)(x)
    ratio = Resampler(FS, subfs)
    count = 1601 * ratio.up // ratio.down
    expected = scipy.signal.resample_poly(full.numpy(), ratio.up, ratio.down, axis=1)[:, :count]
    assert_close(lower, expected, FLOAT64)


def test_low_pass_at_150_hz_comes_before_the_modulation_filters() -> None:
    x = 0.02 * torch.randn(1, 2000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    settings = {"basef": 1000.0, "dtype": torch.float64, "return_stages": True}
    model = King2019(FS, lp_150hz=True, **settings)
    out, stages = model(x)
    b, a = scipy.signal.butter(1, 150.0, fs=FS)
    smooth = scipy.signal.lfilter(b, a, stages["adapted_response"].numpy())
    again = model.modulation_filterbank(torch.from_numpy(smooth)).permute(0, 3, 1, 2)
    assert_close(out, again, FLOAT64)


def test_arguments_reach_their_stages() -> None:
    model = King2019(
        FS,
        basef=2000.0,
        compression_type="power",
        compression_n=0.4,
        compression_knee_db=40.0,
        dboffset=94.0,
        adt_hp_fc=5.0,
        adt_hp_order=2,
        mflow=4.0,
        mfhigh=100.0,
        modbank_nmod=3,
        modbank_qfactor=2.0,
        filterbank_kwargs={"n": 3},
        ihc_kwargs={"cutoff": 800.0},
    )
    assert type(model.compression).__name__ == "PowerCompression"
    assert float(model.compression.n) == pytest.approx(0.4) and model.compression.dboffset == 94.0
    assert float(model.compression.knee_db) == 40.0 and model.filterbank.n == 3
    assert float(model.adaptation_filter.fc) == 5.0 and model.adaptation_filter.order == 2
    assert model.mfc.tolist() == pytest.approx([4.0, 20.0, 100.0]) and model.ihc.cutoff == 800.0
    assert float(model.modulation_filterbank.qfactor) == 2.0 and model.lp150_filter is None
    assert model(torch.zeros(2, 160)).shape == (2, 160, 5, 3)
    assert model(torch.zeros(160)).shape == (160, 5, 3)
    assert "compression_type=power" in repr(model)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: King2019(FS, compression_type="stick"), "compression_type must be one of"),
        (lambda: King2019(FS, basef=20.0), "2 ERB or more above 0 Hz"),
        (lambda: King2019(FS, subfs=999.9), "rounder rate"),
        (
            lambda: King2019ModulationFilterbank(FS, mflow=0.0),
            "mflow must be .* above 0 Hz",
        ),
        (lambda: King2019ModulationFilterbank(FS, qfactor=0.0), "qfactor must be"),
        (lambda: King2019ModulationFilterbank(FS, nmod=0), "nmod must be"),
        (lambda: King2019ModulationFilterbank(FS, phase_insens="abs"), "phase_insens must be"),
        (
            lambda: King2019ModulationFilterbank(200, mfhigh=90.0, nmod=2),
            "upper edge of the highest",
        ),
    ],
)
def test_bad_arguments(build, message) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ParameterError, match=message):
        build()


def test_features_up_to_10_hz_are_the_same_with_and_without_envelopes() -> None:
    clip = 0.05 * np.random.default_rng(0).standard_normal(4003)
    bands, envelopes = (
        build_extractor("king2019", fs_hz=FS, params={"phase_insens": phase}).extract([clip])[0]
        for phase in ("none", "hilbert")
    )
    same = (bands["modulation"] == envelopes["modulation"]).reshape(-1, 5)
    assert same.all(0).tolist() == [True, True, False, False, False]


#: Sampling rate, samples, frame rate and parameters.
_FEATURES: list[tuple[int, int, float, dict[str, Any]]] = [
    (44100, 30_001, 100.0, {}),
    (16000, 23_999, 80.0, {"mfhigh": 400.0, "modbank_nmod": 8, "fhigh": 3000.0}),
    (22050, 30_000, 60.0, {"mflow": 12.0, "lp_150hz": True, "basef": 2000.0}),
    (8000, 2_000, 250.0, {"fhigh": 2000.0}),
]


@functools.cache
def _full_rate(case: int) -> tuple[np.ndarray, torch.Tensor]:
    """Return the clip of a case and its envelopes (time, column) at full rate, in float64."""
    fs, samples, _, params = _FEATURES[case]
    rng = np.random.default_rng(samples)
    clip = 0.05 * rng.standard_normal(samples) * np.sin(np.arange(samples) * 40 / fs) ** 2
    with torch.no_grad():
        model = King2019(fs, dtype=torch.float64, **params)
        return clip, model(torch.from_numpy(clip)).flatten(1)


@pytest.mark.parametrize(
    ("case", "pool", "dtype"), spread(2, range(len(_FEATURES)), ["mean", "rms"], DTYPES)
)
def test_features_are_means_of_the_envelopes_at_full_rate(case: int, pool: str, dtype: str) -> None:
    """They come from a reduced rate; the greatest errors lie at the ends of the signal."""
    fs, _, frame_rate_hz, params = _FEATURES[case]
    clip, full = _full_rate(case)
    streams = {"modulation": {"pool": pool, "frame_rate_hz": frame_rate_hz}}
    extractor = build_extractor("king2019", fs_hz=fs, params=params, streams=streams, dtype=dtype)
    got = extractor.extract([clip])[0]["modulation"]
    hop = fs / frame_rate_hz
    edges = [math.ceil(frame * hop) for frame in range(len(got) + 1)]
    frames = [full[a:b] for a, b in pairwise(edges)]
    means = [each.mean(0) if pool == "mean" else each.square().mean(0).sqrt() for each in frames]
    assert_close(got, torch.stack(means).numpy(), BAND)
