"""Arguments of constructors: unit and range by name, checked before work.

An argument means the same in all classes, so `RULES` has one rule for each name. A class whose
argument differs states its own rule at the constructor. Numbers of numpy, and tensors of one value,
become Python numbers; True and text are no numbers. The class checks limits that depend on several
arguments, such as a frequency below half the sampling rate.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from amtcore.errors import BackendError, ParameterError
from amtcore.kernels.torch_state import BACKENDS
from amtcore.listener import checked_audiogram
from amtcore.plain_numbers import plain_number

Rule = Callable[[str, Any], Any]
Constructor = TypeVar("Constructor", bound=Callable[..., None])


@dataclass(frozen=True)
class _Checked:
    """A rule of a class; with `optional` it accepts None."""

    optional: bool = field(default=False, kw_only=True)

    def __call__(self, name: str, value: Any) -> Any:
        """Return the value as Python's own type, or raise."""
        if value is None and self.optional:
            return None
        return self.fitted(name, value)

    def fitted(self, name: str, value: Any) -> Any:
        """Return a value other than None, or raise."""
        raise NotImplementedError

    def refusal(self, name: str, wanted: str, value: Any) -> ParameterError:
        """Return the error for a value; `wanted` describes the accepted values."""
        also = ", or None" if self.optional else ""
        return ParameterError(f"{name} must be {wanted}{also}, got {value!r}")


@dataclass(frozen=True)
class Number(_Checked):
    """A finite number.

    Args:
        unit: Unit in error messages; "" for none.
        above: Lower bound, excluded.
        least: Lower bound, included.
        below: Upper bound, excluded.
        most: Upper bound, included.
        optional: Whether None is accepted.
        hint: Advice for a value outside, such as the conversion from another unit.
        whole: Whether it must be a whole number.
        phrase: Noun of error messages, if more exact than "a finite number".
    """

    unit: str = ""
    above: float = -math.inf
    least: float = -math.inf
    below: float = math.inf
    most: float = math.inf
    hint: str = ""
    whole: bool = False
    phrase: str = ""

    def wanted(self) -> str:
        """Describe the accepted numbers in words."""
        kind = self.phrase or ("a whole number" if self.whole else "a finite number")
        ends = {"above": self.above, "at least": self.least, "below": self.below}
        ends["at most"] = self.most
        unit = self.unit
        limits = [f"{word} {end:.10g}{unit}" for word, end in ends.items() if math.isfinite(end)]
        if math.isfinite(self.least) and math.isfinite(self.most):
            limits = [f"between {self.least:.10g} and {self.most:.10g}{unit}"]
        if math.isfinite(self.above) and math.isfinite(self.below):
            limits = [f"between {self.above:.10g} and {self.below:.10g} (both excluded){unit}"]
        return f"{kind} {' and '.join(limits)}".rstrip()

    def fits(self, number: int | float | None) -> bool:
        """Return True if a number is of the kind and within the limits."""
        if number is None or not math.isfinite(number) or (self.whole and number % 1):
            return False
        return self.above < number < self.below and self.least <= number <= self.most

    def fitted(self, name: str, value: Any) -> int | float:
        number = plain_number(value)
        if number is None or not self.fits(number):
            hint = f"; {self.hint}" if self.hint else ""
            raise ParameterError(f"{self.refusal(name, self.wanted(), value)}{hint}")
        return int(number) if self.whole else number


#: No clip has as many channels or samples in a window; more would not fit into memory.
MOST_THINGS = 10**7


def whole(least: int, most: float = MOST_THINGS, optional: bool = False) -> Number:
    """Return the rule for a whole number."""
    return Number(least=least, most=most, optional=optional, whole=True)


@dataclass(frozen=True)
class Numbers(_Checked):
    """One number or several, as a number, a float64 tensor, or a list of whole numbers.

    Args:
        each: The rule for every number.
        single: Whether a number alone is accepted.
        ascending: Whether each number must be larger than the number before.
        optional: Whether None is accepted.
    """

    each: Number
    single: bool = True
    ascending: bool = False

    def fitted(self, name: str, value: Any) -> Any:
        if self.single and plain_number(value) is not None:
            return self.each(name, value)
        many = value.tolist() if isinstance(value, (Tensor, np.ndarray)) else value
        if not isinstance(many, (list, tuple)) or not many:
            kind = "a number or a list" if self.single else "a non-empty list"
            raise self.refusal(name, f"{kind} of numbers", value)
        every = [self.each(f"every one of {name}", number) for number in many]
        if self.ascending and not all(a < b for a, b in pairwise(every)):
            raise ParameterError(f"{name} must ascend, got {many}; sort them")
        return every if self.each.whole else torch.tensor(every, dtype=torch.float64)


class Flag(_Checked):
    """True or False; with `optional` also None."""

    def fitted(self, name: str, value: Any) -> bool:
        if not isinstance(value, (bool, np.bool_)):
            raise self.refusal(name, "True or False", value)
        return bool(value)


@dataclass(frozen=True)
class Text(_Checked):
    """A name.

    Args:
        choices: The names that are accepted; empty if the class checks the name.
        optional: Whether None is accepted.
    """

    choices: Collection[str] = ()

    def fitted(self, name: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.refusal(name, "a name", value)
        if self.choices and value not in self.choices:
            raise self.refusal(name, f"one of {', '.join(self.choices)}", value)
        return value


def options(name: str, value: Any) -> dict[str, Any]:
    """Return arguments for a stage as a dict; None is an empty dict."""
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ParameterError(f"{name} must be a dict of arguments by name, or None, got {value!r}")
    return dict(value)


def working_type(name: str, value: Any) -> torch.dtype:
    """Return the dtype, which must be float32 or float64."""
    if not (isinstance(value, torch.dtype) and value in (torch.float32, torch.float64)):
        raise ParameterError(f"{name} must be torch.float32 or torch.float64, got {value!r}")
    return value


def kernel_choice(name: str, value: Any) -> Any:
    """Return the name of a backend, or None."""
    if value is not None and value not in BACKENDS:
        raise BackendError(f"{name} must be one of {', '.join(BACKENDS)} or None, got {value!r}")
    return value


#: No file of sound has a higher sampling rate, and its windows would not fit into memory.
MOST_HZ = 1e6
RATE = Number(" Hz", above=0.0, most=MOST_HZ)
SAMPLING_RATE = replace(RATE, phrase="a sampling rate in Hz")
FRAME_RATE = Number(" Hz", least=1e-3, most=MOST_HZ)
_SECONDS = Number(" s", above=0.0, most=10.0, hint="times are in seconds")

#: Names of arguments with one rule.
_SHARED: dict[Rule, str] = {
    # rates and frequencies
    RATE: "adt_hp_fc mflow mfhigh fhigh",
    FRAME_RATE: "fs_out frame_rate_hz",
    replace(RATE, optional=True): "basef subfs cutoff max_mfc lp_cutoff f_min f_max",
    Numbers(RATE, single=False): "fc fc_hz",
    # scales, times, levels; wrong units lie outside, such as ms for s, or Hz for Cam
    Number(" Cam", above=0.0, most=60.0, hint="ERB numbers are in Cam, not in Hz"): (
        "erb_lower erb_upper"
    ),
    _SECONDS: "tau_attack tau_release ltl_tau_attack ltl_tau_release",
    Number(" per ms", above=0.0, below=1.0): "attack_alpha release_alpha",
    Number(" dB", least=-200.0, most=300.0): "knee_db compression_knee_db dboffset gain_db",
    # factors and numbers of things
    Numbers(Number(above=0.0, most=10.0)): "n compression_n",
    Number(above=0.0, most=100.0): "erb_scale bandwidth_scale",
    Number(above=0.0): "sigma p C ir_length_ratio",
    Number(least=1e-3, most=1e4): "qfactor modbank_qfactor",
    whole(1): "order adt_hp_order n_channels",
    whole(1, optional=True): "hop_length nmod modbank_nmod",
    # switches and names
    Flag(): "learnable return_stages compensate_delay normalize_gain lp_150hz use_outerear has_rec",
    Text(): "method btype model subject phase_type compression_type phase_insens compensation_type "
    "field_type filter_type leak_mode",
}
RULES: dict[str, Rule] = {
    **{name: rule for rule, names in _SHARED.items() for name in names.split()},
    "fs": SAMPLING_RATE,
    "flow": Number(" Hz", least=0.0),
    "lowpass_cutoff": Number(" Hz", least=0.0, optional=True, hint="0 is no low-pass"),
    "frequencies": Numbers(RATE, single=False, ascending=True),
    "erb_step": Number(" Cam", above=0.0, most=10.0),
    "tau": Numbers(_SECONDS, single=False, optional=True),
    "minspl": Number(" dB SPL", least=-200.0, below=100.0),
    "min_level": Numbers(Number(above=0.0, below=1.0), optional=True),
    "limit": Number(least=0.0, optional=True),
    "betamul": Number(above=0.0, most=100.0, optional=True),
    "Q": Number(above=0.5),
    "att_factor": Number(least=0.0, optional=True),
    "tolerance": whole(0),
    "n_windows": whole(1, 6),
    "n_ffts": Numbers(whole(2), single=False, optional=True),
    "use_upper_limit": Flag(optional=True),
    "preset": Text(optional=True),
    "backend": kernel_choice,
    "dtype": working_type,
    "noise_std": Number(least=0.0),
    "audiogram": checked_audiogram,
    "ohc_share": Number(least=0.0, most=1.0),
}
#: Constants of neurons, one or many of them, which `stages.lif` checks.
UNCHECKED = frozenset(
    "shape tau_mem tau_syn threshold bias alpha beta dash_mem dash_syn max_spikes_per_dt "
    "learning_window dt".split()
)


def checked_arguments(**own: Rule) -> Callable[[Constructor], Constructor]:
    """Let a constructor see only arguments that keep their rules, numbers as Python's.

    Args:
        own: Rules of arguments that mean something else here than in other classes.
    """

    def decorate(constructor: Constructor) -> Constructor:
        signature = inspect.signature(constructor)
        kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        named = [p.name for p in signature.parameters.values() if p.kind not in kinds]
        rules = {
            name: own.get(name) or (options if name.endswith("_kwargs") else RULES[name])
            for name in named[1:]
            if name in own or name not in UNCHECKED
        }

        @functools.wraps(constructor)
        def check(*args: Any, **kwargs: Any) -> None:
            try:
                given = signature.bind(*args, **kwargs)
            except TypeError:
                return constructor(*args, **kwargs)  # says which argument it does not know
            for name, value in given.arguments.items():
                if name in rules:
                    given.arguments[name] = rules[name](name, value)
            return constructor(*given.args, **given.kwargs)

        return check  # type: ignore[return-value]

    return decorate
