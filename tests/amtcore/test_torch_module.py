"""A module of the job's author: what it declares is checked, padding is tried, names are names."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch._inductor.config
from torch import Tensor, nn

from amtcore.errors import ParameterError, ShapeError
from amtcore.features.registry import build_extractor
from amtcore.features.torch_module import TorchModule
from earmill.testing import ModelConformance

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


def test_it_is_compiled_once_for_each_bucket(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Lengths from 0.1 s to 2 s are two shapes."""
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
    assert sorted(set(shapes)) == [(1, 1, 16000), (1, 1, 32000)] and len(shapes) == len(clips)
    counts = [len(each["encoded"]) for each in made]
    assert counts == [(n - 400) // HOP + 1 for n in lengths]


def test_it_runs_under_the_compiler(caplog: pytest.LogCaptureFixture) -> None:
    clip = (0.1 * np.random.default_rng(0).standard_normal(5000)).astype(np.float32)
    streams = {"peak": {"width": 1, "hop_length": HOP}}
    # Else the compiler first compiles a file for each kind of vectors, to see whether it can.
    trusting = torch._inductor.config.patch("cpp.vec_isa_ok", True)
    with trusting, caplog.at_level(logging.WARNING, "amtcore"):
        extractor = build_extractor(
            "torch_module", params=_params("Two") | {"compile": True}, streams=streams
        )
        (made,) = extractor.extract([clip])
    assert [r.getMessage() for r in caplog.records if r.name.startswith("amtcore")] == []
    np.testing.assert_array_equal(made["peak"][:, 0], clip[:4960].reshape(-1, HOP).max(1))
