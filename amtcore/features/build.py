"""From a model to feature streams: names, widths, rates, axes, and the numbers themselves.

An `Extractor` is one warm model with the streams a job asked for. Frames come out of the fused
kernel, already pooled; full-rate modulation output is never held (but for streams that need whole
clips: there one band is). Stream descriptions are read off the compiled chain itself. For full-rate
outputs or gradients call the model instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from amtcore.errors import ParameterError, nearest_hint
from amtcore.features.base import (
    DEFAULT_FRAME_RATE_HZ,
    DEFAULT_POOL,
    Extractor,
    Features,
    StreamInfo,
)
from amtcore.features.filterbank import FusedFeatures, WholeFeatures
from amtcore.features.loudness import build_loudness_extractor
from amtcore.features.spike_stream import build_spikes
from amtcore.kernels.fused.program import compile_chain, identity_bank
from amtcore.kernels.vector.threads import set_num_threads
from amtcore.models.entry import ModelEntry
from amtcore.models.loudness import LoudnessModel
from amtcore.models.registry import MODELS, get_model

_DTYPES = {"float32": torch.float32, "float64": torch.float64}


@dataclass(frozen=True)
class ModelInfo:
    """What `list_models` tells of a model."""

    name: str
    summary: str
    input_unit: str
    default_fs_hz: float
    params: Mapping[str, Any]
    streams: Mapping[str, str]


def build_extractor(
    model: str,
    *,
    fs_hz: float | None = None,
    params: Mapping[str, Any] | None = None,
    streams: Mapping[str, Mapping[str, Any] | None] | None = None,
    threads: int | None = None,
    dtype: str = "float32",
    backend: str | None = None,
) -> Extractor:
    """Build a model with its streams; everything wrong with the request is raised here.

    Args:
        model: Registered name, see `list_models`.
        fs_hz: Sampling rate of the input; None takes the model's default.
        params: Constructor arguments of the model.
        streams: Stream name -> options `frame_rate_hz` (default 100) and `pool` (default mean), or
            for "spikes" those of `spikes.SpikeOptions`; None asks for the model's first stream.
        threads: Threads for the kernels of this process; None keeps the number.
        dtype: "float32" or "float64".
        backend: None or "cpu": the fused kernel has no other backend yet.
    """
    entry = get_model(model)
    if dtype not in _DTYPES:
        raise ParameterError(f"dtype must be float32 or float64, got {dtype!r}")
    if backend not in (None, "cpu"):
        raise ParameterError(f"extraction runs on backend 'cpu' only, got {backend!r}")
    if threads is not None:
        set_num_threads(threads)
    built = entry.build(
        entry.default_fs_hz if fs_hz is None else fs_hz, params or {}, _DTYPES[dtype]
    )
    if isinstance(built, LoudnessModel):  # its features are no chain of recurrences
        return build_loudness_extractor(entry, built, streams or {}, params or {})
    infos, features = [], {}
    for name, options in (streams or {next(iter(entry.streams)): {}}).items():
        info, features[name] = _build_stream(entry, built, name, dict(options or {}))
        infos.append(info)
    return Extractor(entry, built, tuple(infos), features, params or {})


def _build_stream(
    entry: ModelEntry, model: Any, name: str, options: dict[str, Any]
) -> tuple[StreamInfo, Features]:
    if name not in entry.streams:
        raise ParameterError(
            f"model {entry.name!r} has no stream {name!r}{nearest_hint(name, entry.streams)}"
        )
    kind = entry.streams[name]
    features: Features
    if kind.layout == "events":
        features = build_spikes(entry, model, name, options, _features)
        spikes, offsets = features.encoder.options, features.encoder.channel_offsets
        rate, pool = spikes.step_rate_hz, spikes.pool
    else:
        rate, pool = _frame_options(name, options)
        features, offsets = _features(model, name, pool, rate)
    modulated = "modulation" in kind.axes[-1]
    info = StreamInfo(
        name=name,
        model=entry.name,
        unit=kind.unit,
        width=features.width,
        frame_rate_hz=float(rate),
        pool=pool,
        axes=kind.axes,
        channel_offsets=offsets,
        fc_hz=tuple(model.fc.double().tolist()),
        mfc_hz=tuple(model.mfc_by_column().double().tolist()) if modulated else (),
        layout=kind.layout,
    )
    return info, features


def _frame_options(name: str, options: Mapping[str, Any]) -> tuple[float, str]:
    """Frame rate and pooling of a stream of frames."""
    known = ("frame_rate_hz", "pool")
    for extra in options:
        if extra not in known:
            raise ParameterError(
                f"stream {name!r} has no option {extra!r}{nearest_hint(extra, known)}"
            )
    return options.get("frame_rate_hz", DEFAULT_FRAME_RATE_HZ), options.get("pool", DEFAULT_POOL)


def _features(model: Any, name: str, pool: str, rate: float) -> tuple[Features, tuple[int, ...]]:
    """What makes a stream, and where its columns are cut into channels."""
    ops, bank = model.chain(name)
    whole = model.whole_bands(name)
    if whole is None:
        return FusedFeatures(compile_chain(ops, bank, pool, model.fs, rate)), bank.offsets
    channels, count = model.num_channels, whole.count
    pooling = compile_chain([], identity_bank(channels, model.fc), pool, whole.fs_hz, rate)
    features = WholeFeatures(ops, whole.bands, count, pooling, whole.rates)
    return features, tuple(range(0, channels * count + 1, count))


def list_models() -> list[ModelInfo]:
    """Every registered model with its parameters and streams."""
    return [
        ModelInfo(
            entry.name,
            entry.summary,
            entry.model.input_unit,
            entry.default_fs_hz,
            entry.parameters(),
            {name: kind.summary for name, kind in entry.streams.items()},
        )
        for entry in MODELS.values()
    ]
