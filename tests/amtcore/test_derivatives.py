"""Every way to ask for a derivative, of every recurrence, stage and model: right, or an error.

`backward` itself has its own tests; here it is what the others are compared with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import amtcore
from amtcore import stages
from amtcore.errors import DerivativeError
from amtcore.kernels.operations.attack_release import ATTACK_RELEASE
from amtcore.kernels.operations.envelope import HILBERT_ENVELOPE
from amtcore.kernels.operations.fir import FIR
from amtcore.kernels.operations.lif import LIF
from amtcore.kernels.operations.lower_skirt import LOWER_SKIRT
from amtcore.kernels.operators import operator, run_fused
from tests.short import but, some

from ..compare import Tolerance, assert_close
from .constant_cases import CASES as MODULES
from .loudness_golden import one_thread  # noqa: F401
from .model_cases import leaves
from .test_loudness_skirts import _case as skirt_case
from .test_recurrences import CASES as RECURRENCES
from .test_recurrences import SAME_OPERATOR

attack_release = operator(ATTACK_RELEASE)
fir = operator(FIR)
lif = operator(LIF)
lower_skirt = operator(LOWER_SKIRT)
hilbert_envelope = operator(HILBERT_ENVELOPE)

#: torch's own: at the first use of forward mode, and for the gradient of frames under vmap.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated"),
    pytest.mark.filterwarnings("ignore:There is a performance drop"),
]
F64 = torch.float64
#: The same adjoint by two ways of calling it.
SAME = Tolerance(1e-12, "float64 sums in another order", 1e-18)
#: Float32 models, whose matrix products and sums over a batch run in another order.
SAME32 = Tolerance(1e-4, "float32 sums in another order", 1e-7)
Function = Callable[[Tensor], Tensor]


def _recurrence(name: str) -> tuple[Tensor, Function]:
    torch.manual_seed(0)
    # Jacobians have a row for each output, and there are outputs for each channel.
    x, coef, state, run = RECURRENCES[name](F64, channels=4)
    # The first of the batch: its signals and the shared coefficients are all there is to map.
    return x[:1, :, :5], lambda x: run(x, coef, state[:1])[0]


def _neurons() -> tuple[Tensor, Function]:
    torch.manual_seed(0)
    coef = torch.tensor([[0.9, 0.0, 0.2, 0.5, 0.8]], dtype=F64).repeat(3, 1)
    state = torch.zeros(1, 3, 2, dtype=F64)
    return torch.rand(1, 5, 3, dtype=F64), lambda x: lif(x, coef, state, math.inf)[0]


def _skirts() -> tuple[Tensor, Function]:
    intensity, *others = skirt_case(frames=2, components=9)
    return 0.1 + intensity, lambda x: lower_skirt(x, *others)


def _fir(stride: int) -> tuple[Tensor, Function]:
    taps = torch.rand(4, dtype=F64)
    return torch.rand(1, 12, dtype=F64), lambda x: fir(x, taps, stride)


def _gain_control() -> tuple[Tensor, Function]:
    coef, state = torch.rand(2, 2, dtype=F64), torch.zeros(1, 2, dtype=F64)
    return torch.rand(1, 5, 2, dtype=F64), lambda x: attack_release(x, coef, state)[0]


#: One input and one function of it for every recurrence; all have the batch first.
FAMILIES: dict[str, Callable[[], tuple[Tensor, Function]]] = {
    **{name: (lambda name=name: _recurrence(name)) for name in RECURRENCES},  # type: ignore[misc]
    "fir": lambda: _fir(1),
    "fir_decimating": lambda: _fir(3),
    "attack_release": _gain_control,
    "lower_skirt": _skirts,
    "lif": _neurons,
    "hilbert_envelope": lambda: (torch.randn(1, 8, dtype=F64), hilbert_envelope),
}


def _backward(function: Function, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(function(leaf).square().sum(), leaf)
    return gradient


def test_every_operator_is_here() -> None:
    names = {name.split("::")[1] for name in torch._C._dispatch_get_all_op_names()
             if name.startswith("amtcore::")}  # fmt: skip
    forward = {name for name in names if "adjoint" not in name}
    # Several operations in one chain and the kernels of loudness have no gradient: they are left
    # out where one may be asked for.
    loudness = {
        "zwicker_bands", "zwicker_decay", "zwicker_slopes",
        "loudness_nodes", "specific_loudness", "erb_levels", "excitation_pattern", "inhibition",
        "running_powers",
    }  # fmt: skip
    assert forward <= {*FAMILIES, "chain", *loudness}


@pytest.mark.parametrize("family", but(SAME_OPERATOR, FAMILIES))
def test_reverse_mode_of_torch_func(family: str) -> None:
    """`grad`, `vjp` and `jacrev`, of signals and of a batch of them."""
    x, function = FAMILIES[family]()

    def loss(x: Tensor) -> Tensor:
        return function(x).square().sum()

    expected = _backward(function, x)
    assert expected.abs().max() > 0
    assert_close(grad(loss)(x), expected, SAME)
    y, pull = vjp(function, x)
    assert_close(pull(2 * y)[0], expected, SAME)
    rows = jacrev(function)(x).flatten(end_dim=y.ndim - 1)
    assert_close(torch.tensordot(2 * y.flatten(), rows, 1), expected, SAME)
    several = torch.stack((x, 1.1 * x, 0.9 * x))
    each = torch.stack([_backward(function, item) for item in several])
    assert_close(vmap(grad(loss))(several), each, SAME)
    assert_close(grad(lambda x: vmap(loss)(x).sum())(several), each, SAME)


@pytest.mark.parametrize(
    "family", but(SAME_OPERATOR, [name for name in FAMILIES if name != "hilbert_envelope"])
)
def test_what_has_no_derivative_says_so(family: str) -> None:
    x, function = FAMILIES[family]()

    def loss(x: Tensor) -> Tensor:
        return function(x).square().sum()

    for ask in (
        lambda: jvp(loss, (x,), (x,)),
        lambda: jacfwd(loss)(x),
        lambda: hessian(loss)(x),
        lambda: vmap(lambda x: jvp(loss, (x,), (x,))[1])(x.unsqueeze(0)),
    ):
        with pytest.raises(DerivativeError, match=r"no forward-mode derivative.*jacrev"):
            ask()
    with (
        forward_ad.dual_level(),
        pytest.raises(DerivativeError, match="no forward-mode derivative"),
    ):
        loss(forward_ad.make_dual(x, x))
    if "fir" in family:  # linear, and its gradient is made of itself
        return
    leaf = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(leaf), leaf, create_graph=True)
    with pytest.raises(DerivativeError, match=r"no second derivative.*backend='reference'"):
        torch.autograd.grad(gradient.sum(), leaf)
    with pytest.raises(DerivativeError, match="no second derivative"):
        jacrev(jacrev(loss))(x)


@pytest.mark.parametrize("stride", [1, 3])
def test_second_derivatives_of_fir(stride: int) -> None:
    x, function = _fir(stride)
    assert torch.autograd.gradgradcheck(function, x.requires_grad_())


@pytest.mark.parametrize("family", ["first_order", "one_pole_cascade", "lif", "hilbert_envelope"])
def test_plain_loops_have_all_of_them(family: str) -> None:
    """Ask plain loops for each derivative, as the errors advise."""
    torch.manual_seed(0)
    x, function = FAMILIES[family]()
    if family in RECURRENCES:
        case_x, coef, state, run = RECURRENCES[family](F64, channels=4)
        x, state = case_x[:1, :, :5], state[:1]
        function = lambda x: run(x, coef, state, backend="reference")[0]  # noqa: E731
    if family == "lif":
        coef, state = torch.tensor([[0.9, 0.0, 0.2, 0.5, 0.8]], dtype=F64), torch.zeros(1, 1, 2)
        x = torch.rand(1, 5, 1, dtype=F64)
        function = lambda x: lif(x, coef, state.double(), math.inf, backend="reference")[0]  # noqa: E731

    def loss(x: Tensor) -> Tensor:
        return function(x).square().sum()

    expected = _backward(function, x)
    _, change = jvp(loss, (x,), (x,))
    assert_close(change, (expected * x).sum(), SAME)
    assert_close(jacfwd(loss)(x), expected, SAME)
    assert torch.isfinite(hessian(loss)(x)).all()


def test_the_fused_program_refuses() -> None:
    bank = stages.DRNLFilterbank([500.0, 1000.0], 16000, dtype=F64)
    ops, x = bank.block_ops(bank.num_channels), torch.randn(1, 1, 20, dtype=F64)
    state = torch.zeros(1, 2, sum(op.state.shape[1] for op in ops), dtype=F64)
    with pytest.raises(DerivativeError, match="forward-mode"):
        jvp(lambda x: run_fused(x, ops, state)[0], (x,), (x,))
    with pytest.raises(DerivativeError, match="no autograd formula"):
        grad(lambda x: run_fused(x, ops, state)[0].sum())(x)


def test_compiled_functions_hide_nothing() -> None:
    """Transforms in a compiled function, and a compiled function in a level of forward mode."""
    torch._dynamo.reset()
    x, function = FAMILIES["first_order_rectified"]()

    def loss(x: Tensor) -> Tensor:
        return function(x).square().sum()

    def compiled(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(function, backend="aot_eager", **options)

    expected = _backward(function, x)
    assert_close(grad(compiled(loss))(x), expected, SAME)
    assert_close(compiled(lambda x: vmap(loss)(x))(x.unsqueeze(0))[0], loss(x), SAME)
    # By public names a gradient of torch.func cannot be told from others inside a compiler. A
    # release of torch either refuses it (2.11) or computes it (2.15).
    for inside in (grad(loss), lambda x: vmap(grad(loss))(x.unsqueeze(0))[0]):
        try:
            gradient = compiled(inside)(x)
        except torch._dynamo.exc.TorchRuntimeError as error:
            assert "setup_context" in str(error)
        else:
            assert_close(gradient, expected, SAME)
    with pytest.raises(DerivativeError, match="forward-mode"):
        compiled(lambda x: jvp(loss, (x,), (x,))[1])(x)
    warm, whole = compiled(loss), compiled(loss, fullgraph=True)
    assert_close(warm(x), loss(x), SAME)
    assert_close(whole(x), loss(x), SAME)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x, x)
        for call in (whole, warm, compiled(lambda x: loss(x) + 1)):
            with pytest.raises(DerivativeError, match="forward-mode"):
                call(dual)


# --- stages and models ---

#: Stages of plain torch operations: every derivative there is works.
PLAIN = ("LoudnessEar", "Moore2016Spectrum", "MultiResolutionFFT", "SquaringExpansion",
         "ERBIntegration", "Moore2016SpecificLoudness", "SpecificLoudness",
         "Moore2016BinauralLoudness")  # fmt: skip
#: Stages of one FIR, which is linear: its gradient can be differentiated again.
LINEAR = ("Resampler", "HeadphoneFilter", "MiddleEarFilter", "OuterMiddleEarFilter")


class _Streamed(torch.nn.Module):
    """LIFExodus keeps state between calls, which transforms cannot; `stream` does not."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner.stream(x)[0]


def _module(name: str) -> tuple[Callable[..., Tensor], dict[str, Tensor], tuple[Tensor, ...]]:
    """(parameters, *inputs) -> a loss; the parameters; the inputs, a batch of one."""
    module, inputs = MODULES[name].build(learnable=True), MODULES[name].inputs
    if isinstance(module, amtcore.LIFExodus):
        module = _Streamed(module)

    def loss(parameters: dict[str, Tensor], *x: Tensor) -> Tensor:
        outputs = leaves(functional_call(module, parameters, x))
        return sum((y.square().mean() for y in outputs), torch.zeros(()))

    return loss, {k: v.detach() for k, v in module.named_parameters()}, inputs


def _is(name: str, kinds: tuple[str, ...]) -> bool:
    return name.split("-")[0] in kinds


@pytest.mark.parametrize("name", some(4, MODULES))
def test_modules_in_torch_func(name: str) -> None:
    """Gradients of inputs and parameters, and those of each item of a batch."""
    loss, parameters, inputs = _module(name)
    needed = [t.clone().requires_grad_() for t in (*inputs, *parameters.values())]
    n = len(inputs)
    value = loss(dict(zip(parameters, needed[n:], strict=True)), *needed[:n])
    expected = torch.autograd.grad(value, needed, allow_unused=True, materialize_grads=True)
    got = grad(loss, argnums=tuple(range(n + 1)))(parameters, *inputs)
    for a, b in zip((*got[1:], *got[0].values()), expected, strict=True):
        assert_close(a, b, SAME32, name)
    several = [torch.stack((x, 0.9 * x)) for x in inputs]
    each = vmap(grad(loss), in_dims=(None, *(0,) * n))(parameters, *several)
    for i in range(2):
        of_item = grad(loss)(parameters, *(x[i] for x in several))
        for key, gradient in of_item.items():
            assert_close(each[key][i], gradient, SAME32, f"{name} {key}")


@pytest.mark.parametrize("name", some(4, MODULES, 1))
def test_forward_mode_of_modules_is_right_or_raises(name: str) -> None:
    loss, parameters, inputs = _module(name)

    def of_inputs(*x: Tensor) -> Tensor:
        return loss(parameters, *x)

    if _is(name, PLAIN):
        _, change = jvp(of_inputs, inputs, inputs)
        gradients = grad(of_inputs, argnums=tuple(range(len(inputs))))(*inputs)
        pairs = zip(gradients, inputs, strict=True)
        assert_close(change, sum((g * x).sum() for g, x in pairs), SAME32)
        return
    with pytest.raises(DerivativeError, match="forward-mode"):
        jvp(of_inputs, inputs, inputs)
    with (
        forward_ad.dual_level(),
        torch.no_grad(),
        pytest.raises(DerivativeError, match="forward-mode"),
    ):
        of_inputs(*(forward_ad.make_dual(x, x) for x in inputs))
    if parameters:
        with pytest.raises(DerivativeError, match="forward-mode"):
            jvp(lambda p: loss(p, *inputs), (parameters,), (parameters,))


@pytest.mark.parametrize("name", some(4, MODULES, 2))
def test_second_derivatives_of_modules_are_there_or_raise(name: str) -> None:
    loss, parameters, inputs = _module(name)
    leaf = inputs[0].clone().requires_grad_()
    (gradient,) = torch.autograd.grad(loss(parameters, leaf, *inputs[1:]), leaf, create_graph=True)
    if _is(name, (*PLAIN, *LINEAR)):
        second = torch.autograd.grad(gradient.square().sum(), leaf)[0]
        assert torch.isfinite(second).all() and second.abs().max() > 0
        return
    with pytest.raises(DerivativeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), leaf)
