"""Constants of a stage: fixed or learnt between bounds, read, set and saved in their unit.

A fixed constant `tau` is a buffer. A learnable constant is an unbounded parameter `tau_raw`; `tau`
is then the value that follows from it:

    value = lowest + (highest - lowest) sigmoid(rate raw).

For any `raw` the value lies between its bounds. Far below the highest bound a step of `raw` changes
the value by a percentage (1e-3 of raw is 0.1 %), as on a logarithmic scale. The argument `unit`
sets the step of values such as decibels. A denominator is bounded by its reflection coefficients
(Levinson's recursion backwards), which are below 1 exactly where the filter is stable.

The `state_dict` holds `tau` in both cases, so a fixed module loads what a learnable module saved.
Tables that follow from constants and settings are not saved: they are made after loading, and made
again when a constant has changed in place.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from amtcore.errors import ParameterError, ReadOnlyError, ShapeError, TracingError
from amtcore.kernels.torch_state import is_transformed
from amtcore.torch_internals import (
    BUFFERS,
    MODULES,
    PARAMETERS,
    UNSAVED_BUFFERS,
    Module,
    version_of,
)

#: Bounds of frequencies and bandwidths in cycles a sample: below them a pole rounds to the unit
#: circle in float32, above them the bilinear transform does.
LEAST_CYCLES, MOST_CYCLES = 1e-7, 0.5 * (1.0 - 1e-5)
#: Beyond this the sigmoid is its limit; a value that starts on a bound stays there.
_SATURATED, _AT_BOUND = 50.0, 64.0
#: Rounding of a bound to float32.
_BOUND_ROUNDING = 1e-6
#: Reflection coefficients stay this far from 1, and the first coefficient in e^-4 .. e^4.
_LEAST_DAMPING, _MOST_LOG = 1e-6, 4.0
#: A slope of tanh that is rounding.
_HELD = 1e-14


@dataclass(frozen=True)
class Range:
    """Each value of a constant lies between two bounds; all tensors are float64.

    Args:
        lowest: Lower bound.
        highest: Upper bound.
        unit: Change of the value per change of `raw` half-way between the bounds; None is a
            quarter of their distance, a plain logit.
    """

    lowest: float
    highest: float
    unit: float | None = None

    @functools.cached_property
    def _rate(self) -> float:
        return 1.0 if self.unit is None else 4.0 * self.unit / (self.highest - self.lowest)

    def check(self, name: str, value: Tensor) -> None:
        """Raise if a value is out of bounds."""
        low, high = (end * _BOUND_ROUNDING for end in (abs(self.lowest), abs(self.highest)))
        good = (value >= self.lowest - low) & (value <= self.highest + high)
        if not bool(good.all()):
            wrong = float(value[~good].flatten()[0])
            raise ParameterError(
                f"{name} must lie between {self.lowest:g} and {self.highest:g}, got {wrong:g}"
            )

    def raw(self, value: Tensor) -> Tensor:
        """Return the unbounded parameter of a value."""
        share = (value - self.lowest) / (self.highest - self.lowest)
        return torch.logit(share.clamp(0.0, 1.0)).clamp(-_AT_BOUND, _AT_BOUND) / self._rate

    def value(self, raw: Tensor) -> Tensor:
        """Return the value of a parameter, within the bounds for any finite `raw`."""
        turned = raw * self._rate
        inside = self.lowest + (self.highest - self.lowest) * torch.sigmoid(turned)
        return torch.where(turned > -_SATURATED, inside, self.lowest)

    def within(self, value: Tensor) -> Tensor:
        """Return a value that rounding may have put out of bounds to the bounds."""
        return value.clamp(self.lowest, self.highest)

    def gradient(self, raw: Tensor, of_raw: Tensor) -> Tensor:
        """Convert a gradient with respect to `raw` to the value; 0 if a bound holds the value."""
        share = torch.sigmoid(raw * self._rate)
        slope = self._rate * (self.highest - self.lowest) * share * (1.0 - share)
        return torch.where(raw.abs() * self._rate < _SATURATED, of_raw / slope, 0.0)


@dataclass(frozen=True)
class StableDenominator:
    """Denominators a0 + a1 / z (+ a2 / z^2) whose roots lie inside the unit circle.

    Raw are the logarithm of the first coefficient and the reflection coefficients, unbounded.
    """

    def _reflections(self, value: Tensor) -> tuple[Tensor, ...]:
        a = value / value[0]
        return (a[1],) if len(a) == 2 else (a[1] / (1.0 + a[2]), a[2])

    def check(self, name: str, value: Tensor) -> None:
        inside = [k.abs() <= 1.0 - 0.5 * _LEAST_DAMPING for k in self._reflections(value)]
        inside.append(value[0].log().abs() <= _MOST_LOG)
        if not all(bool(each) for each in inside):
            raise ParameterError(
                f"{name} must be the denominator of a stable filter, its first value between "
                f"{math.exp(-_MOST_LOG):.2g} and {math.exp(_MOST_LOG):.2g}, got {value.tolist()}"
            )

    def raw(self, value: Tensor) -> Tensor:
        most = 1.0 - _LEAST_DAMPING
        shares = (k / most for k in self._reflections(value))
        edge = 1.0 - 1e-9
        first = torch.atanh((value[0].log() / _MOST_LOG).clamp(-edge, edge)) * _MOST_LOG
        return torch.stack([first, *(torch.atanh(k.clamp(-edge, edge)) for k in shares)])

    def value(self, raw: Tensor) -> Tensor:
        first = torch.exp(_MOST_LOG * torch.tanh(raw[0] / _MOST_LOG))
        k = (1.0 - _LEAST_DAMPING) * torch.tanh(raw[1:])
        others = (k[0],) if len(k) == 1 else (k[0] * (1.0 + k[1]), k[1])
        return first * torch.stack((torch.ones_like(first), *others))

    def within(self, value: Tensor) -> Tensor:
        return value  # rounding is smaller than `_LEAST_DAMPING`

    def gradient(self, raw: Tensor, of_raw: Tensor) -> Tensor:
        first, k = torch.tanh(raw[0] / _MOST_LOG), torch.tanh(raw[1:])
        value = self.value(raw)
        # value = first (1, k) or first (1, k0 (1 + k1), k1), solved from its far end. A matrix
        # would be inverted by a library that makes the CPU wait for the device.
        most = 1.0 - _LEAST_DAMPING
        others = _unless_held(of_raw[1:], most * (1.0 - k.square())) / value[0]
        if len(others) == 2:
            nearer = others[0] / (1.0 + most * k[1])
            others = torch.stack((nearer, others[1] - most * k[0] * nearer))
        along = _unless_held(of_raw[0], 1.0 - first.square())
        return torch.cat((((along - (value[1:] * others).sum()) / value[0])[None], others))


def _unless_held(of_raw: Tensor, slope: Tensor) -> Tensor:
    """Divide a gradient by the slope of a sigmoid; 0 on a bound."""
    return torch.where(slope > _HELD, of_raw / slope, 0.0)


Limit = Range | StableDenominator
#: Time constants in s.
SECONDS = Range(1e-6, 1e3)
#: Levels and gains in dB; a step of 1e-3 of the optimiser is 0.01 dB.
DECIBELS = Range(-200.0, 300.0, 10.0)


def frequencies(fs: float) -> Range:
    """Return the range of a filter's frequency in Hz at this sampling rate."""
    return Range(LEAST_CYCLES * fs, MOST_CYCLES * fs)


def bandwidths(fs: float) -> Range:
    """Return the range of a pole's bandwidth in Hz at this sampling rate."""
    return Range(LEAST_CYCLES * fs, 2.0 * fs)


def around(value: float) -> Range:
    """Return the range of positive values up to 1000 times larger or smaller."""
    return Range(value / 1e3, value * 1e3)


WORKING_TYPES = (torch.float32, torch.float64)
Value = Tensor | Sequence[float] | float
_RAW, _ROUNDING = "_raw", "_rounding"


def outside_inference() -> AbstractContextManager[Any]:
    """Leave `torch.inference_mode`: a module keeps tensors, which later calls differentiate."""
    if torch.compiler.is_compiling() or not torch.is_inference_mode_enabled():
        return nullcontext()  # a compiler cannot ask for the mode
    return torch.inference_mode(False)


def refuse_torchscript(kind: type) -> NoReturn:
    """Raise the error for `torch.jit.trace` and `torch.jit.script`."""
    raise TracingError(
        f"{kind.__name__} cannot be traced or scripted: TorchScript does not run the kernels; use "
        "torch.export.export, or torch.compile"
    )


def _settling(constructor: Callable[..., None]) -> Callable[..., None]:
    """Return a constructor that makes the attributes it has set read-only.

    Only the most derived class of this package does so; those of other packages stay assignable.
    """

    @functools.wraps(constructor)
    def construct(self: Converted, *args: Any, **kwargs: Any) -> None:
        constructor(self, *args, **kwargs)
        own: Any = next(kind for kind in type(self).__mro__ if _is_own(kind))
        if own.__init__ is construct:
            self._settings = frozenset(name for name in vars(self) if not name.startswith("_"))

    return construct


class BuiltOnCpu(type):
    """Metaclass that builds a module on the CPU, then moves it to torch's default device.

    Filters are designed in float64 on the CPU, so `with torch.device("meta")` builds them too.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        # In torch 2.6 `torch.get_default_device` passes over `with torch.device(...)`.
        device = torch.empty(0).device
        with torch.device("cpu"), outside_inference():
            module = super().__call__(*args, **kwargs)
            if isinstance(module, HasConstants):
                module.refresh()
        return module if device.type == "cpu" else module.to(device)

    @property
    def __signature__(cls) -> inspect.Signature:
        """Signature of the constructor, which `inspect` does not find behind `__call__`."""
        signature = inspect.signature(cls.__init__)  # type: ignore[misc]
        return signature.replace(parameters=list(signature.parameters.values())[1:])


class Converted(Module, metaclass=BuiltOnCpu):
    """Base class of all models and stages: what can be changed after construction, and what not.

    Filters are designed once, from the arguments. So every public attribute that a constructor of
    this package sets is read-only afterwards, as are class attributes and tables. Constants,
    parameters, stages and the settings in `assignable` can be assigned. A conversion to a type that
    nothing here works in raises before any part of the module is converted.

    >>> from amtcore import IHCEnvelope
    >>> IHCEnvelope(16000).cutoff = 500.0  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    amtcore.errors.ReadOnlyError: IHCEnvelope.cutoff is read-only: ...
    """

    #: Names of attributes that every call reads anew.
    assignable: ClassVar[frozenset[str]] = frozenset(("training", "backend", "return_stages"))
    #: Names of the attributes that `repr` shows.
    shown = ""
    #: Names of the attributes that the constructors of this package have set.
    _settings: frozenset[str] = frozenset()
    _loading = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if _is_own(cls) and "__init__" in vars(cls):
            cls.__init__ = _settling(vars(cls)["__init__"])  # type: ignore[method-assign]

    def __setattr__(self, name: str, value: Any) -> None:
        if self._is_read_only(name, value) and not self._loading:
            kind = type(self).__name__
            if name in inspect.signature(type(self)).parameters:
                advice = f"build a new {kind} with the {name} you want"
            else:
                advice = f"{name} follows from the arguments of {kind}, so build a new one"
            raise ReadOnlyError(
                f"{kind}.{name} is read-only: a module is designed when it is built; {advice}"
            )
        super().__setattr__(name, value)

    def _is_read_only(self, name: str, value: Any) -> bool:
        if not self._settings or name.startswith("_") or name in self.assignable:
            return False
        if name in getattr(self, PARAMETERS) or name in getattr(self, MODULES):
            return False
        if isinstance(value, nn.Module) and vars(self).get(name, value) is None:
            return False  # a stage that the model was built without
        if name in self._settings or name in getattr(self, BUFFERS):
            return True
        classes = (vars(kind) for kind in type(self).__mro__ if _is_own(kind))
        return any(name in data and not inspect.isroutine(data[name]) for data in classes)

    def extra_repr(self) -> str:
        """Return the settings and constants in `shown`; a replaced stage may lack some."""
        values = ((name, getattr(self, name, None)) for name in self.shown.split())
        return ", ".join(f"{name}={_in_short(v)}" for name, v in values if v is not None)

    def __prepare_scriptable__(self) -> NoReturn:
        """Refuse `torch.jit.script`, which calls this method of every module that it meets."""
        refuse_torchscript(type(self))

    def convert(self, fn: Any, recurse: bool) -> Any:
        kind = fn(torch.zeros(1, device="cpu")).dtype  # checked before any tensor is converted
        if kind not in WORKING_TYPES:
            raise ParameterError(
                f"models and stages work in float32 or float64, got {kind}: filters of a few Hz "
                "and the states of recurrences need more digits than it has; leave the module as "
                "it is, or use torch.autocast for what is around it"
            )
        with outside_inference():
            return super().convert(fn, recurse)


def _is_own(kind: type) -> bool:
    return kind.__module__.startswith("amtcore.")


def _in_short(value: Any) -> str:
    """Return a value as `repr` shows it: six digits, and of several numbers the ends."""
    if isinstance(value, Tensor) and not value.is_meta:
        numbers = value.detach().flatten().tolist()
        return "..".join(f"{number:g}" for number in dict.fromkeys((numbers[0], numbers[-1])))
    return f"{value:g}" if isinstance(value, float) else str(value)


class FixedType(Converted):
    """Base class of models whose tables are made in the working type that they are built with."""

    dtype: torch.dtype

    def convert(self, fn: Any, recurse: bool) -> Any:
        kind = fn(torch.zeros(1, dtype=self.dtype, device="cpu")).dtype
        if kind not in WORKING_TYPES:
            return super().convert(fn, recurse)  # raises
        if kind != self.dtype:
            raise ParameterError(
                f"{type(self).__name__} was built for {self.dtype}, got {kind}: build a new one "
                f"with dtype={kind}"
            )

        def moved(tensor: Tensor) -> Tensor:
            made: Tensor = fn(tensor)
            # Some tables are float64 whatever the working type is.
            return made if made.dtype == tensor.dtype else tensor.to(made.device)

        return super().convert(moved, recurse)


class HasConstants(Converted):
    """A module of constants, which are parameters if `learnable`, and never leave their bounds."""

    #: Bounds of every constant, and names of the learnt constants.
    _limits: Mapping[str, Limit] = {}
    _learnt: frozenset[str] = frozenset()
    #: Sources of the tables of `derived`, by key, with the version of each.
    _made_from: Mapping[str, tuple[Tensor | None, int]] = {}
    #: Persistent buffers of earlier versions that are made, not loaded.
    _once_saved: tuple[str, ...] = ()

    def __init__(self, learnable: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.learnable, self.dtype = learnable, dtype
        self._limits, self._learnt = {}, frozenset()

    def constant(
        self, name: str, value: Value, limit: Limit | None = None, learnable: bool | None = None
    ) -> None:
        """Register a constant, whose value is kept exactly in a learnable module too.

        Without a `limit` it is unbounded; `learnable` None takes the module's flag.
        """
        tensor = torch.as_tensor(value, dtype=self.dtype).clone()
        learnt = self.learnable if learnable is None else learnable
        if limit is not None:
            limit.check(name, tensor.double())
            self._limits = {**self._limits, name: limit}
        if not learnt:
            self.register_buffer(name, tensor)
        elif limit is None:
            self.register_parameter(name, nn.Parameter(tensor))
        else:
            raw, rounding = _split(limit, tensor.double(), self.dtype)
            self.register_buffer(name, None)
            self.register_parameter(name + _RAW, nn.Parameter(raw))
            self.register_buffer(name + _ROUNDING, rounding, persistent=False)
            self._learnt |= {name}

    def __getattr__(self, name: str) -> Tensor:
        """Return a constant or a table; a learnt constant has its gradient in its own unit."""
        if name not in self._learnt:
            return super().__getattr__(name)  # type: ignore[return-value]
        # `torch.func.functional_call` puts a value here for the time of a call.
        given = getattr(self, BUFFERS)[name]
        if given is not None:
            return given
        raw = getattr(self, PARAMETERS)[name + _RAW]
        value = self._exact(name).to(raw.dtype)
        if not torch.compiler.is_compiling() and raw.is_leaf and raw.grad is not None:
            of_raw = raw.grad.double()
            value.grad = self._limits[name].gradient(raw.detach().double(), of_raw).to(raw.dtype)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._limits and not self._loading:
            self.set_constant(name, value)
        else:
            super().__setattr__(name, value)

    def limit_of(self, name: str) -> Limit:
        """Return the bounds of a constant."""
        return self._limits[name]

    @property
    def bounded(self) -> tuple[str, ...]:
        """Names of the constants that have bounds."""
        return tuple(self._limits)

    @property
    def learnt(self) -> tuple[str, ...]:
        """Names of the constants that are learnt, in their order; `<name>_raw` is the parameter."""
        return tuple(name for name in self._limits if name in self._learnt)

    def _exact(self, name: str) -> Tensor:
        """Return a learnt constant in float64, corrected by the rounding of its parameter."""
        limit, raw = self._limits[name], getattr(self, PARAMETERS)[name + _RAW]
        rounding = getattr(self, BUFFERS)[name + _ROUNDING]
        return limit.within(limit.value(raw.double()) + rounding)

    def set_constant(self, name: str, value: Value, shape: torch.Size | None = None) -> None:
        """Set a bounded constant in place, and first its shape; one number sets every element."""
        kept = self._source(name)
        tensor = torch.as_tensor(value, dtype=torch.float64, device=kept.device).detach()
        if shape is not None and shape != kept.shape:
            kept.data = kept.new_zeros(shape)
            if name in self._learnt:
                getattr(self, BUFFERS)[name + _ROUNDING] = tensor.new_zeros(shape)
        if tensor.ndim and tensor.shape != kept.shape:
            raise ShapeError(
                f"{name} must have shape {tuple(kept.shape)} or be one number, got "
                f"{tuple(tensor.shape)}"
            )
        exact = tensor.to(kept.dtype).double().expand(kept.shape)
        self._limits[name].check(name, exact)
        with torch.no_grad():
            if name in self._learnt:
                raw, rounding = _split(self._limits[name], exact, kept.dtype)
                kept.copy_(raw)
                self.get_buffer(name + _ROUNDING).copy_(rounding)
            else:
                kept.copy_(exact)
        self.refresh()

    # --- tables ---

    def tables(self) -> dict[str, Tensor]:
        """Return tables of settings and fixed constants; kept as buffers and not saved."""
        return {}

    def derive(self) -> dict[str, Callable[[], Tensor]]:
        """Return functions of tables that depend on learnable constants, with their gradients."""
        return {}

    def refresh(self) -> None:
        """Compute all tables again, after a change that torch does not see (`.data`, numpy)."""
        sources = self._sources()
        if any(kept.is_meta for kept in sources.values()):
            return
        device = next((kept.device for kept in sources.values()), None)

        def keep(name: str, table: Tensor) -> None:
            getattr(self, BUFFERS).pop(name, None)
            self.register_buffer(name, table.to(device), persistent=False)

        with outside_inference(), torch.no_grad():
            for name, table in self.tables().items():
                keep(name, table)
            for name, make in self.derive().items():  # may read the tables above
                keep(name, make())
        # `torch.export` counts buffers without those that are None, so these must come last.
        for name in self._learnt:
            getattr(self, BUFFERS)[name] = getattr(self, BUFFERS).pop(name)
        self._note_made(sources)

    def _note_made(self, sources: Mapping[str, Tensor]) -> None:
        """Record the sources and versions that the tables were computed from."""
        self._made_from = {key: (kept, version_of(kept)) for key, kept in sources.items()}

    def derived(self, name: str) -> Tensor:
        """Return a table, computed again if constants have changed or need gradients."""
        sources, make = self._sources(), self.derive().get(name)
        if make is not None and any(kept.requires_grad for kept in sources.values()):
            return make()
        learnt = {key + _RAW for key in self._learnt} if make is None else ()
        fixed = (
            (key, kept)
            for key, kept in sources.items()
            if not (kept.requires_grad or key in learnt)
        )
        if torch.compiler.is_compiling() or all(self._is_as_made(*each) for each in fixed):
            return self.get_buffer(name)
        if is_transformed(*sources.values()):
            return self.tables()[name] if make is None else make()
        self.refresh()
        return self.get_buffer(name)

    def _is_as_made(self, key: str, kept: Tensor) -> bool:
        before, version = self._made_from.get(key, (None, 0))
        return kept is before and version_of(kept) == version

    def _source(self, name: str) -> Tensor:
        """Return the parameter or buffer of a constant."""
        learnt = name in self._learnt
        kept = getattr(self, PARAMETERS)[name + _RAW] if learnt else getattr(self, BUFFERS)[name]
        assert kept is not None
        return kept

    def _sources(self) -> dict[str, Tensor]:
        """Return the tensors of a state dict, or the tensors that `functional_call` put there."""
        own = {**getattr(self, PARAMETERS), **getattr(self, BUFFERS)}
        given = {name + _RAW for name in self._learnt if own[name] is not None}
        left_out = given | getattr(self, UNSAVED_BUFFERS)
        return {key: kept for key, kept in own.items() if kept is not None and key not in left_out}

    # --- saving, loading, moving ---

    def save_own(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super().save_own(destination, prefix, keep_vars)
        for name in self.learnt:
            value = getattr(self, name)
            del destination[prefix + name + _RAW]
            destination[prefix + name] = value if keep_vars else value.detach()

    def load_own(self, *args: Any) -> None:
        state_dict, prefix, local_metadata, _, missing_keys, _, error_msgs = args  # as torch's
        own = {k: v for k, v in state_dict.items() if k[len(prefix) :] not in self._once_saved}
        if local_metadata.get("assign_to_params_buffers", False):
            # Tensors of other types, such as half precision, become the module's type.
            for key in own.keys() & {prefix + name for name in (*self._sources(), *self._limits)}:
                if own[key].is_floating_point() and own[key].dtype not in WORKING_TYPES:
                    own[key] = own[key].to(self.dtype)
        roundings: dict[str, Tensor] = {}
        for name, limit in self._limits.items():
            value = own.get(prefix + name)
            if not isinstance(value, Tensor) or value.is_meta:
                continue
            if value.shape != self._source(name).shape:
                continue  # torch reports the wrong shape
            try:
                limit.check(prefix + name, value.double())
            except ParameterError as error:
                error_msgs.append(str(error))
                del own[prefix + name]
                continue
            if name in self._learnt:
                exact = value.detach().double()
                own[prefix + name], roundings[name] = _split(limit, exact, value.dtype)
        for name in self._learnt:
            if prefix + name in own:
                own[prefix + name + _RAW] = own.pop(prefix + name)
        missing: list[str] = []
        self._loading = True
        try:
            super().load_own(own, *args[1:4], missing, *args[5:])
        finally:
            self._loading = False
        missing_keys += [key.removesuffix(_RAW) for key in missing]
        for name, rounding in roundings.items():
            getattr(self, BUFFERS)[name + _ROUNDING] = rounding.to(self._source(name).device)
        self._follow_dtype()
        self.refresh()

    def convert(self, fn: Any, recurse: bool) -> Any:
        with outside_inference():
            before = {name: self._exact(name).detach() for name in self._learnt}
            sources = self._sources()
            true = all(self._is_as_made(key, kept) for key, kept in sources.items())
            kinds = {key: (kept.dtype, kept.device) for key, kept in sources.items()}
            super().convert(fn, recurse)
            for name, exact in before.items():
                raw = self._source(name).detach()
                if not exact.is_meta:
                    left = exact.to(raw.device) - self._limits[name].value(raw.double())
                    getattr(self, BUFFERS)[name + _ROUNDING] = left
            self._follow_dtype()
            # Tables that moved to another device with their sources keep the digits of the design
            # on the CPU, and no call computes them again.
            sources = self._sources()
            if true and all(
                kept.dtype == kinds[key][0] and kept.device != kinds[key][1]
                and "meta" not in (kept.device.type, kinds[key][1].type)
                for key, kept in sources.items()
            ):  # fmt: skip
                self._note_made(sources)
        return self

    def _follow_dtype(self) -> None:
        first = next(iter((*self.parameters(), *self.buffers())), None)
        if first is not None and first.is_floating_point():
            vars(self)["dtype"] = first.dtype  # read-only for others


def _split(limit: Limit, exact: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the parameter of a float64 value in a working type, and its rounding error."""
    raw = limit.raw(exact).to(dtype)
    return raw, exact - limit.value(raw.double())
