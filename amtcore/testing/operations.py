"""Conformance tests of a chain operation, as a class of pytest tests.

    class TestLeakyPeak(OperationConformance):
        operation = "leaky_peak"              # registered name

The cases are the operation's own examples. Kernels on the CPU, and GPU code that the distribution
amtcore-interpreter runs without a GPU, are compared with the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from amtcore.errors import BackendError
from amtcore.kernels.chain import ChainStep, compile_chain, identity_bank
from amtcore.kernels.devices import get_backend, use_backend
from amtcore.kernels.operation import ChainOperation, Example
from amtcore.kernels.operators import run_step
from amtcore.kernels.registry import get_operation

#: Relative to the largest value: sums of float32, and of float64, in another order.
SINGLE, DOUBLE = 2e-4, 1e-10
_BATCH = 2
#: Samples of the signals of which derivatives are taken.
_SHORT = 12


class OperationConformance:
    """The tests. A subclass names the operation.

    Attributes:
        operation: Registered name.
        backends: Backends that must compute alike, of "cpu" and "interpreted".
        single: Tolerance of float32 relative to the largest value.
    """

    operation: ClassVar[str]
    backends: ClassVar[tuple[str, ...]] = ("cpu", "interpreted")
    single: ClassVar[float] = SINGLE

    @property
    def described(self) -> ChainOperation:
        """The operation."""
        return get_operation(self.operation)

    def cases(self, dtype: torch.dtype) -> Iterator[tuple[int, Tensor, Tensor, Tensor]]:
        """Argument, signal (batch, channel, time), coefficients, and state of every example."""
        torch.manual_seed(0)
        assert self.described.example is not None, "expected an operation with examples"
        for example in self.described.example():
            yield _batched(example, dtype)

    def test_sizes_are_those_of_the_examples(self) -> None:
        for argument, _, coef, state in self.cases(torch.float64):
            assert coef.shape[1] == self.described.coefficients(argument)
            assert state.shape[2] == self.described.states(argument)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
    def test_kernels_equal_the_plain_loop(self, dtype: torch.dtype) -> None:
        for argument, x, coef, state in self.cases(dtype):
            wanted = run_step(self.described, argument, x, coef, state, "reference")
            for name in self.backends:
                with computing(name):
                    got = run_step(self.described, argument, x, coef, state, "cpu")
                for value, expected in zip(got, wanted, strict=True):
                    self.check_close(value, expected, name)

    def test_backends_compute_the_same_bits(self) -> None:
        for argument, x, coef, state in self.cases(torch.float32):
            made = []
            for name in self.backends:
                with computing(name):
                    made.append(run_step(self.described, argument, x, coef, state, "cpu"))
            for others in made[1:]:
                assert all(torch.equal(a, b) for a, b in zip(made[0], others, strict=True))

    def test_chunks_equal_the_whole_exactly(self) -> None:
        """Two chunks, the second from the state of the first."""
        for argument, x, coef, state in self.cases(torch.float32):
            whole, last = run_step(self.described, argument, x, coef, state)
            for cut in (1, 128, x.shape[-1] - 1):
                first, middle = run_step(self.described, argument, x[..., :cut], coef, state)
                second, after = run_step(self.described, argument, x[..., cut:], coef, middle)
                assert torch.equal(torch.cat((first, second), -1), whole)
                assert torch.equal(after, last)

    def test_gradients_equal_those_of_the_plain_loop(self) -> None:
        for argument, x, coef, state in self.cases(torch.float64):
            x = x[..., :_SHORT]

            def gradients(
                backend: str, inputs: Any = (x, coef, state), argument: int = argument
            ) -> tuple[Tensor, ...]:
                x, coef, state = leaves = [value.clone().requires_grad_() for value in inputs]
                y, last = run_step(self.described, argument, x, coef, state, backend)
                loss = y.square().sum() + last.sum()
                return torch.autograd.grad(loss, leaves, materialize_grads=True, allow_unused=True)

            wanted = gradients("reference")
            for name in self.backends:
                with computing(name):
                    for value, expected in zip(gradients("cpu"), wanted, strict=True):
                        self.check_close(value, expected, f"gradient on {name}")

    def test_torch_func_and_a_compiler_give_the_same(self) -> None:
        """`vmap`, `grad`, and a compiled function of one graph."""
        argument, x, coef, state = next(self.cases(torch.float64))
        x, operation = x[..., :_SHORT], self.described

        def loss(x: Tensor, state: Tensor) -> Tensor:
            return run_step(operation, argument, x[None], coef, state[None])[0].square().sum()

        each = torch.func.vmap(torch.func.grad(loss))(x, state)
        for i in range(_BATCH):
            self.check_close(each[i], torch.func.grad(loss)(x[i], state[i]), "vmap of grad")
        torch.compiler.reset()
        compiled: Callable[..., Tensor] = torch.compile(loss, backend="aot_eager", fullgraph=True)
        assert torch.equal(compiled(x[0], state[0]), loss(x[0], state[0]))

    def test_frames_of_a_chain_are_pooled_outputs(self) -> None:
        frames = []
        for name in self.backends:
            for argument, x, coef, state in self.cases(torch.float32):
                backend, bank = get_backend(name), identity_bank(len(coef), coef)
                ops = [ChainStep(self.described, argument, coef, state[0])]
                chain = backend.place(compile_chain(ops, bank, "mean", 1000.0, 100.0))
                clip = backend.clip_of(x[0])
                made = backend.download(chain.push([clip], chain.fresh(1), 0))[0]
                y, _ = run_step(self.described, argument, x[:1], coef, state[:1])
                count = y.shape[-1] // 10
                wanted = y[0, :, : 10 * count].unflatten(1, (count, 10)).mean(-1).T
                self.check_close(torch.from_numpy(made), wanted, f"frames on {name}")
                frames.append(torch.from_numpy(made))
        each = len(frames) // len(self.backends)
        assert all(torch.equal(frames[i], frames[i % each]) for i in range(len(frames)))

    def check_close(self, got: Tensor, wanted: Tensor, what: str) -> None:
        """Compare within the tolerance of the type, relative to the largest value."""
        assert got.shape == wanted.shape, what
        if wanted.numel():
            largest = max(float(wanted.abs().max()), 1e-30)
            worst = float((got - wanted).abs().max()) / largest
            tolerance = self.single if got.dtype == torch.float32 else DOUBLE
            assert worst <= tolerance, f"{what}: off by {worst:.1e} of the largest value"


def _batched(example: Example, dtype: torch.dtype) -> tuple[int, Tensor, Tensor, Tensor]:
    x = torch.stack([example.x * (1.0 + 0.1 * b) for b in range(_BATCH)])
    state = example.state.expand(_BATCH, *example.state.shape)
    return example.argument, x.to(dtype), example.coef.to(dtype), state.to(dtype)


@contextmanager
def computing(name: str) -> Iterator[None]:
    """Compute with this backend within the context; skip the test if it is not installed."""
    try:
        get_backend(name)
    except BackendError as error:
        pytest.skip(str(error))
    with use_backend(name):
        yield
