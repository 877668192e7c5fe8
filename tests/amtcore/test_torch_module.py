"""A module of the job's author: what it declares is checked, padding is tried, names are names."""

from __future__ import annotations

import json
import logging
import time
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError
from amtcore.features.registry import build_extractor
from amtcore.features.torch_module import ModuleStream, TorchModule
from amtcore.testing.models import ModelConformance

from ..compare import Tolerance, assert_close

HERE = __name__
HOP = 160


class Encoder(nn.Module):
    """Frames from a strided convolution: (1, width, frame)."""

    def __init__(self, width: int = 8, kernel: int = 400) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, width, kernel, stride=HOP)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.conv(x))


class Normalised(Encoder):
    """Frames that depend on the whole clip."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x / (x.square().mean().sqrt() + 1e-6))


class Two(nn.Module):
    """Level and peak of each hop, by name; hops as frames (1, frame, 1)."""

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hops = x[:, : x.shape[-1] // HOP * HOP].unflatten(-1, (-1, HOP))
        return {"level": hops.square().mean(-1, keepdim=True), "peak": hops.amax(-1, keepdim=True)}


class Pair(Two):
    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(super().forward(x).values())


class Peaks(Encoder):
    """Frames relative to the peak of the whole batch, which zeros do not change."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / x.abs().amax()


class OneClip(Encoder):
    """Takes a batch of one."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x[:1])


class InPlace(Encoder):
    """Overwrites its input, and returns one tensor for all clips of a length."""

    def __init__(self) -> None:
        super().__init__()
        self.returned: dict[torch.Size, Tensor] = {}

    def forward(self, x: Tensor) -> Tensor:
        made = super().forward(x.mul_(2))
        return self.returned.setdefault(made.shape, torch.empty_like(made)).copy_(made)


class Stack(nn.Module):
    """Two layers; the output says what each of them gives."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Conv1d(1, 4, 400, stride=HOP), nn.Conv1d(4, 3, 1)])
        self.calls = 0

    def forward(self, x: Tensor) -> dict[str, Any]:
        self.calls += 1  # a value that the module keeps while it runs
        first = self.layers[0](x)
        return {"hidden_states": (x, first), "last": self.layers[1](first)}


class Refuses(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no such\nthing")


ENCODED = {"width": 8, "hop_length": HOP, "window_length": 400, "frames_axis": 2}


def _params(module: str = "Encoder", **more: Any) -> dict[str, Any]:
    return {"module": f"{HERE}:{module}", "channel_axis": module in ("Encoder", "Normalised"),
            "compile": False, **more}  # fmt: skip


class TestEncoder(ModelConformance):
    model = TorchModule()
    params = _params()
    other_params = _params(seed=1)
    streams = {"encoded": ENCODED}  # noqa: RUF012


class TestOfAllLengths(ModelConformance):
    model = "torch_module"
    params = _params("Normalised", buckets=False)
    other_params = _params("Normalised", buckets=False, kwargs={"kernel": 300})
    streams = {"encoded": ENCODED}  # noqa: RUF012


class TestTwoStreams(ModelConformance):
    model = "torch_module"
    params, other_params = _params("Two"), _params("Pair")
    streams = {  # noqa: RUF012
        "level": {"width": 1, "frame_rate_hz": 100.0, "unit": "input unit^2"},
        "peak": {"width": 1, "hop_length": HOP},
    }

    def test_wrong_streams_are_refused(self, extractor: Any) -> None:
        with pytest.raises(ParameterError, match=r"no option 'widht': did you mean 'width'"):
            self.build(streams={"level": {"widht": 1}})


def test_values_are_those_of_the_module() -> None:
    clip = (0.1 * np.random.default_rng(0).standard_normal(20123)).astype(np.float32)
    extractor = build_extractor("torch_module", params=_params(), streams={"encoded": ENCODED})
    (made,) = extractor.extract([clip])
    torch.manual_seed(0)
    module = Encoder()
    with torch.no_grad():
        expected = module(torch.from_numpy(clip)[None, None])[0].T.numpy()
    assert_close(made["encoded"], expected, Tolerance(1e-5, "float32", 1e-6))
    (info,) = extractor.streams
    assert (info.width, info.frame_rate_hz, info.unit) == (8, 100.0, "model units")


def test_random_weights_are_the_same_in_every_process_and_leave_the_generator_alone() -> None:
    torch.manual_seed(7)
    drawn = torch.rand(1)
    torch.manual_seed(7)
    extractor = build_extractor("torch_module", params=_params(), streams={"encoded": ENCODED})
    assert torch.equal(torch.rand(1), drawn)
    again = build_extractor("torch_module", params=_params(), streams={"encoded": ENCODED})
    assert extractor.buffers_sha256() == again.buffers_sha256()
    assert extractor.describe()["streams"][0]["width"] == 8


def test_outputs_are_picked_by_place_and_by_name() -> None:
    clip = (0.1 * np.random.default_rng(0).standard_normal(3200)).astype(np.float32)
    by_name = build_extractor(
        "torch_module", params=_params("Two"), streams=dict(TestTwoStreams.streams)
    )
    streams = {
        "loud": {"width": 1, "hop_length": HOP, "output": 0},
        "top": {"width": 1, "hop_length": HOP, "output": 1},
    }
    by_place = build_extractor("torch_module", params=_params("Pair"), streams=streams)
    (named,), (placed,) = by_name.extract([clip]), by_place.extract([clip])
    np.testing.assert_array_equal(named["level"], placed["loud"])
    np.testing.assert_array_equal(named["peak"], placed["top"])
    np.testing.assert_array_equal(
        named["peak"][:, 0], clip.reshape(-1, HOP).max(1), "the module's own"
    )


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("/tmp/net.py:Net", "paths and URLs are not taken"),
        ("https://example.org/net:Net", "paths and URLs are not taken"),
        ("../net:Net", "paths and URLs are not taken"),
        ("torch.nn", "must be a name 'package.module:Class'"),
        ("no_such_package:Net", "cannot be imported: ModuleNotFoundError"),
        ("torch.nn:Lineer", "cannot be imported: AttributeError"),
        ("os:system", "expected a class of torch.nn.Module, got <built-in function system>"),
        ("subprocess:Popen", "expected a class of torch.nn.Module"),
        ("torch.nn:Linear", "TypeError"),
        (f"{HERE}:Refuses", r"does not take \(1, 11200\): RuntimeError: no such thing"),
        (f"{HERE}:Encoder", r"frames of 8 columns .* as declared|does not take|expected"),
    ],
)
def test_what_is_no_module_of_that_shape(module: str, message: str) -> None:
    with pytest.raises((ParameterError, ShapeError), match=message):
        build_extractor(
            "torch_module", params={"module": module}, streams={"x": {"width": 8, "hop_length": 7}}
        )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "expected its width and its rate"),
        ({"width": 8}, "exactly one of hop_length and frame_rate_hz"),
        ({**ENCODED, "frame_rate_hz": 100.0}, "exactly one of"),
        ({**ENCODED, "width": 9}, "68 frames of 9 columns"),
        ({**ENCODED, "hop_length": 80}, "as declared, got"),
        ({**ENCODED, "frames_axis": 1}, "as declared, got"),
        ({**ENCODED, "frames_axis": 3}, "'frames_axis': expected 1 or 2, got 3"),
        ({**ENCODED, "width": "many"}, "'width': expected whole number, got 'many'"),
    ],
)
def test_what_is_declared_is_tried_when_it_is_built(options: dict, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_extractor("torch_module", params=_params(), streams={"encoded": options})


def test_padding_that_changes_frames_is_refused() -> None:
    with pytest.raises(ParameterError, match="zeros after a clip change its frames; set buckets"):
        build_extractor("torch_module", params=_params("Normalised"), streams={"encoded": ENCODED})


def _clips(*seconds: float) -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [(0.1 * rng.standard_normal(round(s * 16000))).astype(np.float32) for s in seconds]


@pytest.mark.parametrize("batch", [None, 3])
def test_frames_do_not_depend_on_company_order_or_number_of_clips(batch: int | None) -> None:
    extractor = build_extractor(
        "torch_module", params=_params(batch=batch), streams={"encoded": ENCODED}, threads=2
    )
    clips = _clips(0.4, 1.5, 0.9, 3.1, 1.1, 0.02, 0.7, 5.0, 1.9, 0.5, 0.6, 0.8, 0.3)
    together = extractor.extract(clips)
    for alone, made in zip(([clip] for clip in clips), together, strict=True):
        np.testing.assert_array_equal(made["encoded"], extractor.extract(alone)[0]["encoded"])
    for backwards, made in zip(extractor.extract(clips[::-1])[::-1], together, strict=True):
        np.testing.assert_array_equal(made["encoded"], backwards["encoded"])


def test_a_module_may_overwrite_its_input_and_what_it_returned() -> None:
    params = _params("InPlace", channel_axis=True, batch=1)
    extractor = build_extractor("torch_module", params=params, streams={"encoded": ENCODED})
    clips = _clips(1.1, 1.1, 1.1)
    given = [clip.copy() for clip in clips]
    for clip in clips:
        clip.flags.writeable = False  # torch would warn of it
    made = extractor.extract(clips)
    np.testing.assert_array_equal(clips, given)
    plain = build_extractor("torch_module", params=_params(), streams={"encoded": ENCODED})
    for one, clip in zip(made, given, strict=True):
        np.testing.assert_array_equal(one["encoded"], plain.extract([2 * clip])[0]["encoded"])


def test_a_copy_of_a_module_is_free_once_its_frames_are_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, taken = _params("InPlace", channel_axis=True, batch=1), count()
    streams = {"encoded": ENCODED}
    extractor = build_extractor("torch_module", params=params, streams=streams, threads=2)
    alone = [extractor.extract([clip])[0]["encoded"] for clip in _clips(*[1.1] * 6)]
    frames = ModuleStream.frames

    def late(stream: ModuleStream, name: str, returned: Any, clips: int) -> Tensor:
        if next(taken) == 0:
            time.sleep(0.2)  # the other thread runs the module on the next clips meanwhile
        return frames(stream, name, returned, clips)

    monkeypatch.setattr(ModuleStream, "frames", late)
    for made, wanted in zip(extractor.extract(_clips(*[1.1] * 6)), alone, strict=True):
        np.testing.assert_array_equal(made["encoded"], wanted)


@pytest.mark.parametrize("module", ["Peaks", "OneClip"])
def test_a_module_whose_clips_cannot_run_together_is_refused(module: str) -> None:
    more: dict[str, Any] = {"channel_axis": True}
    with pytest.raises(ParameterError, match="set batch: 1, which runs every clip alone"):
        build_extractor(
            "torch_module", params=_params(module, **more), streams={"encoded": ENCODED}
        )
    extractor = build_extractor(
        "torch_module", params=_params(module, batch=1, **more), streams={"encoded": ENCODED}
    )
    short, long = _clips(0.5, 0.9)
    (alone,) = extractor.extract([long])
    np.testing.assert_array_equal(extractor.extract([short, long])[1]["encoded"], alone["encoded"])


def test_hidden_layers_are_streams() -> None:
    grid = {"hop_length": HOP, "window_length": 400, "frames_axis": 2}
    streams = {
        "last": {"width": 3, **grid},
        "path": {"width": 4, "output": "hidden_states.1", **grid},
        "layer": {"width": 4, "layer": "layers.0", **grid},
    }
    params = _params("Stack", channel_axis=True)
    extractor = build_extractor("torch_module", params=params, streams=streams, threads=2)
    clips = _clips(0.4, 0.9, 1.6, 2.5)
    torch.manual_seed(0)
    module = Stack()
    for clip, made in zip(clips, extractor.extract(clips), strict=True):
        with torch.no_grad():
            wanted = module(torch.from_numpy(clip)[None, None])
        hidden = wanted["hidden_states"][1][0].T.numpy()
        assert_close(made["layer"], hidden, Tolerance(1e-5, "float32", 1e-6))
        np.testing.assert_array_equal(made["layer"], made["path"])
        assert_close(made["last"], wanted["last"][0].T.numpy(), Tolerance(1e-5, "float32", 1e-6))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"batch": 0}, "batch must be 1 or more, or null, got 0"),
        ({"batch": 4, "buckets": False}, "needs clips of one length, got buckets false"),
    ],
)
def test_batches_that_cannot_be_are_refused(more: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        build_extractor("torch_module", params=_params(**more), streams={"encoded": ENCODED})


def test_an_unknown_layer_names_the_nearest() -> None:
    streams = {"encoded": ENCODED | {"layer": "convv"}}
    with pytest.raises(ParameterError, match="submodules, got 'convv': did you mean 'conv'"):
        build_extractor("torch_module", params=_params(), streams=streams)


def test_settings_without_batches_and_layers_are_hashed_as_before() -> None:
    """Jobs from before batches resume: what their features were made with has the same hash."""
    extractor = build_extractor("torch_module", params=_params(), streams={"encoded": ENCODED})
    facts = json.loads(extractor.settings())
    assert facts[2] == {
        "module": f"{HERE}:Encoder", "kwargs": None, "channel_axis": True, "seed": 0,
        "compile": False, "buckets": True,
        "streams": {
            "encoded": "ModuleStream(width=8, hop_length=160, frame_rate_hz=None, "
            "window_length=400, output=None, frames_axis=2, unit='model units')"
        },
    }  # fmt: skip


def test_it_is_compiled_once_for_each_bucket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lengths from 0.1 s to 2 s are two shapes, and two batches."""
    shapes: list[tuple[int, ...]] = []

    def compiled(module: nn.Module, **_: Any) -> Any:
        def call(x: Tensor) -> Any:
            shapes.append(tuple(x.shape))
            return module(x)

        return call

    monkeypatch.setattr(torch, "compile", compiled)
    params = _params() | {"compile": True}
    extractor = build_extractor("torch_module", params=params, streams={"encoded": ENCODED})
    lengths = (1600, 8000, 16000, 16001, 30000, 32000)
    clips = [np.full(n, 0.01, np.float32) for n in lengths]
    made = extractor.extract(clips)
    assert sorted(shapes) == [(8, 1, 16000), (8, 1, 32000)]
    counts = [len(each["encoded"]) for each in made]
    assert counts == [(n - 400) // HOP + 1 for n in lengths]


def test_it_runs_under_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    clip = (0.1 * np.random.default_rng(0).standard_normal(5000)).astype(np.float32)
    streams = {"peak": {"width": 1, "hop_length": HOP}}
    # Else the compiler first compiles a file for each kind of vectors, to see whether it can. It
    # also compiles the headers of torch, which takes longer than the one file that includes them.
    options = {"cpp.vec_isa_ok": True, "cpp_cache_precompile_headers": False}
    trusting = torch._inductor.config.patch(options)
    with trusting, caplog.at_level(logging.WARNING, "amtcore"):
        extractor = build_extractor(
            "torch_module", params=_params("Two") | {"compile": True}, streams=streams
        )
        (made,) = extractor.extract([clip])
    assert [r.getMessage() for r in caplog.records if r.name.startswith("amtcore")] == []
    np.testing.assert_array_equal(made["peak"][:, 0], clip[:4960].reshape(-1, HOP).max(1))
