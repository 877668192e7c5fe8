"""Every kernel of a GPU: the same call on the processor and by the interpreter, on short signals.

Programs come from the models, so that coefficients are what they are; a test holds them against the
tables of operations and filters, of which none may be left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from amtcore_interpreter import InterpretedLauncher
from torch import Tensor

from amtcore import Dau1997, King2019, Osses2021, Paulick2024
from amtcore.kernels.backend import Backend
from amtcore.kernels.chain import ChainStep, FilterBank, compile_chain, identity_bank
from amtcore.kernels.gpu.backend import GpuBackend
from amtcore.kernels.gpu.launcher import Kernel
from amtcore.kernels.operations.attack_release import ATTACK_RELEASE, ATTACK_RELEASE_ADJOINT
from amtcore.kernels.operations.compression import SQUARE
from amtcore.kernels.operations.fir import DECIMATE, FIR
from amtcore.kernels.operations.lif import LIF, LIF_ADJOINT
from amtcore.kernels.operations.lower_skirt import LOWER_SKIRT, LOWER_SKIRT_ADJOINT
from amtcore.kernels.operations.modulation_filters import BANK_TWO_SECTIONS, FILTERS, filter_states
from amtcore.kernels.operations.parallel_paths import ADD, SWAP

FS = 16000
#: More than one warp's lanes, and the last group not full.
CHANNELS = 40
#: More than a block of the adjoint, and no whole number of blocks.
SAMPLES = 150
DTYPES = (torch.float32, torch.float64)
Outputs = Sequence[Tensor | np.ndarray]


class Recorder(InterpretedLauncher):
    """The interpreter, which remembers what it was given to run."""

    def __init__(self) -> None:
        super().__init__(resident=3)
        self.used: dict[str, Kernel] = {}

    def launch(self, kernel: Kernel, warps: int, arguments: Sequence[Tensor | int]) -> None:
        self.used[kernel.name] = kernel
        super().launch(kernel, warps, arguments)


@functools.cache
def recorder() -> Recorder:
    """One for all tests, which keeps what it has translated."""
    return Recorder()


@functools.cache
def interpreted() -> Backend:
    """The backend on it."""
    return GpuBackend(recorder())


@dataclass(frozen=True)
class Case:
    """One call of a backend.

    Args:
        name: Of the test.
        call: Backend and working type to what it gives.
    """

    name: str
    call: Callable[[Backend, torch.dtype], Outputs]


def noise(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Loud, quiet and silent stretches, so that limiters, knees and denormals have their part."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=generator, dtype=torch.float64)
    level = torch.full(shape[-1:], 0.3, dtype=torch.float64)
    level[shape[-1] // 3 : shape[-1] // 2] = 0.0
    level[-shape[-1] // 4 :] = 1e-3
    return (x * level).to(dtype)


@functools.cache
def _models(dtype: torch.dtype) -> dict[str, Any]:
    slow = {"preset": "jepsen2008"}
    return {
        "dau1997": Dau1997(FS, dtype=dtype, modulation_kwargs=slow),
        "king2019": King2019(FS, dtype=dtype),
        "osses2021": Osses2021(FS, dtype=dtype),
        "paulick2024": Paulick2024(44100, dtype=dtype),
    }


def _of_channels(values: Tensor) -> Tensor:
    """The same constants for CHANNELS channels."""
    return values.detach()[torch.arange(CHANNELS) % len(values)]


@functools.cache
def operations(dtype: torch.dtype) -> dict[str, ChainStep]:
    """Every operation with each of its arguments that a model has, for CHANNELS channels."""
    ops = [op for model in _models(dtype).values() for op in model.chain("modulation")[0]]
    gain = torch.linspace(0.5, 2.0, CHANNELS, dtype=dtype).unsqueeze(1)
    ops.append(ChainStep(SQUARE, 0, gain, gain.new_zeros(CHANNELS, 0)))
    found = {f"{op.operation.name} {op.argument}": op for op in ops}
    return {
        name: replace(op, coef=_of_channels(op.coef), state=_of_channels(op.state))
        for name, op in found.items()
    }


def bank_of(kind: int, dtype: torch.dtype) -> FilterBank:
    """Two filters of a kind a channel, but one in every third."""
    _, dau = _models(dtype)["dau1997"].chain("modulation")
    source = dau.coef.detach()[[dau.kinds.index(kind) if kind in dau.kinds else 0]]
    width = 2 if kind == BANK_TWO_SECTIONS else 1
    counts = [1 if channel % 3 == 2 else 2 for channel in range(CHANNELS)]
    offsets = (0, *np.cumsum(counts).tolist())
    return FilterBank((kind, kind), source.repeat(offsets[-1], width), offsets)


def _run(backend: Backend, ops: Sequence[ChainStep], x: Tensor) -> Outputs:
    steps = tuple((op.operation, op.argument) for op in ops)
    state = torch.cat([op.state for op in ops], 1).expand(x.shape[0], -1, -1)
    return backend.run_steps(steps, x, torch.cat([op.coef for op in ops], 1), state)


def _operation(name: str) -> Iterator[Case]:
    def forward(backend: Backend, dtype: torch.dtype) -> Outputs:
        found = operations(dtype)
        ops = [found[name]]
        if ops[0].operation in (SWAP, ADD):  # of two paths, which there must be
            ops = [found["save 0"], found["square 0"], *ops]
        return _run(backend, ops, noise(2, CHANNELS, SAMPLES, dtype=dtype))

    def adjoint(backend: Backend, dtype: torch.dtype) -> Outputs:
        op, x = operations(dtype)[name], noise(2, CHANNELS, SAMPLES, dtype=dtype)
        state, gy = op.state.expand(2, -1, -1), noise(2, CHANNELS, SAMPLES, dtype=dtype, seed=1)
        steps = ((op.operation, op.argument),)
        return backend.run_step_adjoint(steps, x, op.coef, state, gy, state + 0.1)

    op = operations(torch.float32)[name]
    if op.operation is not DECIMATE:
        yield Case(f"{name}", forward)
    if op.operation.adjoint is not None:
        yield Case(f"{name} adjoint", adjoint)


def _bank(kind: int) -> Iterator[Case]:
    def forward(backend: Backend, dtype: torch.dtype) -> Outputs:
        bank, x = bank_of(kind, dtype), noise(2, CHANNELS, SAMPLES, dtype=dtype)
        state = x.new_zeros(2, len(bank.coef), filter_states(bank.coef.shape[1]))
        return backend.run_bank(x, bank.coef, state, bank.kinds, bank.offsets)

    def adjoint(backend: Backend, dtype: torch.dtype) -> Outputs:
        bank, x = bank_of(kind, dtype), noise(2, CHANNELS, SAMPLES, dtype=dtype)
        state = x.new_zeros(2, len(bank.coef), filter_states(bank.coef.shape[1]))
        gy = noise(2, len(bank.coef), SAMPLES, dtype=dtype, seed=1)
        given = x, bank.coef, state, bank.kinds, bank.offsets, gy, state + 0.1
        return backend.run_bank_adjoint(*given)

    yield Case(f"bank: {FILTERS[kind].name}", forward)
    yield Case(f"bank: {FILTERS[kind].name} adjoint", adjoint)


def _chain(name: str, stream: str, pool: str) -> Case:
    def call(backend: Backend, dtype: torch.dtype) -> Outputs:
        model = _models(dtype)[name]
        chain = backend.place(compile_chain(*model.chain(stream), pool, model.fs, 200.0))
        clips = [noise(n, dtype=dtype, seed=n).numpy() for n in (700, 90, 0, 1100, 230)]
        states = chain.fresh(len(clips))
        frames = chain.push(clips, states, 0)
        last = chain.finish(states, [len(clip) for clip in clips])
        return backend.download([*frames]) + backend.download([*last])

    return Case(f"{name} {stream} {pool}", call)


def _rows(backend: Backend, dtype: torch.dtype) -> Outputs:
    """Bands of channels pooled, as streams of whole clips are."""
    chain = compile_chain([], identity_bank(CHANNELS, torch.zeros(1, dtype=dtype)), "rms", FS, 200)
    placed = backend.place(chain)
    clip = noise(CHANNELS, 500, dtype=dtype)
    return backend.download(placed.push([backend.clip_of(clip)], placed.fresh(1), 0))


def _fir(taps: int, stride: int, first: int, count: int) -> Case:
    def call(backend: Backend, dtype: torch.dtype) -> Outputs:
        response = noise(taps, dtype=dtype, seed=2)
        return [backend.run_rows(FIR, noise(3, 400, dtype=dtype), response, stride, first, count)]

    return Case(f"fir {taps} taps, stride {stride}, from {first}", call)


def _smoothing(backend: Backend, dtype: torch.dtype) -> Outputs:
    x, coef = noise(2, 30, CHANNELS, dtype=dtype), torch.linspace(0, 1, 2 * CHANNELS, dtype=dtype)
    coef = coef.reshape(CHANNELS, 2)
    return backend.run_rows(ATTACK_RELEASE, x, coef, torch.full((2, CHANNELS), 0.1, dtype=dtype))


def _smoothing_adjoint(backend: Backend, dtype: torch.dtype) -> Outputs:
    x, coef = noise(2, 30, CHANNELS, dtype=dtype), torch.linspace(0, 1, 2 * CHANNELS, dtype=dtype)
    coef, state = coef.reshape(CHANNELS, 2), torch.full((2, CHANNELS), 0.1, dtype=dtype)
    y, _ = backend.run_rows(ATTACK_RELEASE, x, coef, state)
    gy = noise(2, 30, CHANNELS, dtype=dtype, seed=1)
    return backend.run_rows(ATTACK_RELEASE_ADJOINT, x, coef, state, y, gy, state)


def _skirt_arguments(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Frames of components, some of them silent, and filters among them."""
    intensity = noise(20, 100, dtype=dtype).square()
    slope = noise(20, 100, dtype=dtype, seed=1).abs() * 30
    f_hz = torch.linspace(50, 4000, 100, dtype=dtype)
    fc_hz = torch.linspace(60, 5000, 17, dtype=dtype)
    return intensity, slope, 4.0 / fc_hz, fc_hz, f_hz


def _skirt(backend: Backend, dtype: torch.dtype) -> Outputs:
    return [backend.run_rows(LOWER_SKIRT, *_skirt_arguments(dtype))]


def _skirt_adjoint(backend: Backend, dtype: torch.dtype) -> Outputs:
    upstream = noise(20, 17, dtype=dtype, seed=3)
    return backend.run_rows(LOWER_SKIRT_ADJOINT, *_skirt_arguments(dtype), upstream)


def _neurons(synapses: int, record: bool) -> Iterator[Case]:
    def forward(backend: Backend, dtype: torch.dtype) -> Outputs:
        x = 3.0 * noise(2, 70, CHANNELS * synapses, dtype=dtype).abs()
        coef = torch.tensor([0.9, 0.01, 1.0, 0.5, *[0.8] * synapses], dtype=dtype)
        state = torch.full((2, CHANNELS, 1 + synapses), 0.05, dtype=dtype)
        return backend.run_rows(LIF, x, coef.repeat(CHANNELS, 1), state, 3.0, record, True)

    def adjoint(backend: Backend, dtype: torch.dtype) -> Outputs:
        x = 3.0 * noise(2, 70, CHANNELS * synapses, dtype=dtype).abs()
        coef = torch.tensor([0.9, 0.01, 1.0, 0.5, *[0.8] * synapses], dtype=dtype)
        coef, state = coef.repeat(CHANNELS, 1), x.new_full((2, CHANNELS, 1 + synapses), 0.05)
        *outputs, _, starts = backend.run_rows(LIF, x, coef, state, 3.0, record, True)
        upstream = [noise(*y.shape, dtype=dtype, seed=4) if y.numel() else y for y in outputs]
        return backend.run_rows(LIF_ADJOINT, x, coef, starts, 3.0, record, *upstream, state)

    kind = f"{synapses} synapses, {'with' if record else 'without'} records"
    yield Case(f"neurons: {kind}", forward)
    yield Case(f"neurons: {kind}, adjoint", adjoint)


def all_cases() -> list[Case]:
    """Every kernel."""
    return [
        *(case for name in operations(torch.float32) for case in _operation(name)),
        *(case for kind in FILTERS for case in _bank(kind)),
        *(_chain(name, "modulation", "mean") for name in _models(torch.float32)),
        *(_chain("dau1997", "envelope", pool) for pool in ("max", "subsample")),
        Case("rows pooled", _rows),
        _fir(65, 1, 0, 336), _fir(130, 1, -129, 400), _fir(65, 4, -32, 100), _fir(32, 3, 0, 120),
        Case("attack and release", _smoothing),
        Case("attack and release, adjoint", _smoothing_adjoint),
        Case("lower skirts", _skirt),
        Case("lower skirts, adjoint", _skirt_adjoint),
        *_neurons(1, False), *_neurons(3, True),
    ]  # fmt: skip
