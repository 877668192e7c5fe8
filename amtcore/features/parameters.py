"""Parameters of models: type, default and meaning of each.

Parameters are the arguments of a model's constructor, or the fields of a dataclass. Types come from
the annotations, meanings from `Args` in the docstring.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import numpy as np

from amtcore.errors import ParameterError, check_known
from amtcore.plain_numbers import plain_number

#: Default of a parameter without one.
REQUIRED: Any = inspect.Parameter.empty

_Built = TypeVar("_Built")
_ENTRY = re.compile(r"^    (\w+): (.+(?:\n {5,}.+)*)", re.MULTILINE)
_WORDS: Mapping[Any, str] = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    Mapping: "mapping",
    types.NoneType: "null",
    Any: "any value",
    object: "any value",
}


class _Misfit(Exception):
    """A value is not of a type."""


@dataclass(frozen=True)
class Parameter:
    """One parameter of a model.

    Args:
        name: Its name.
        type: float, int, bool, str, a mapping, a list or tuple of these, `Literal`, or a union.
        default: Its default; `REQUIRED` where it has none.
        doc: What it means, on one line.

    >>> rate = Parameter("hop_s", float, 0.01, "Seconds between frames.")
    >>> rate.type_text, rate.checked(1)
    ('number', 1.0)
    """

    name: str
    type: Any
    default: Any
    doc: str = ""

    @property
    def type_text(self) -> str:
        """The type in words, for the author of a job."""
        return _words(self.type)

    @property
    def required(self) -> bool:
        """Return True if it must be given."""
        return self.default is REQUIRED

    def checked(self, value: object) -> Any:
        """Return the value in the parameter's type, such as a list as a tuple."""
        try:
            return _fitted(self.type, value)
        except _Misfit:
            raise ParameterError(
                f"parameter {self.name!r}: expected {self.type_text}, got {value!r}"
            ) from None

    def to_dict(self) -> dict[str, Any]:
        """Return type, meaning, and default if there is one; ready for JSON."""
        plain = {"type": self.type_text, "doc": self.doc}
        return plain if self.required else plain | {"default": self.default}


def argument_texts(docstring: str | None) -> dict[str, str]:
    """Return the arguments of a docstring, each with its description on one line."""
    text = inspect.cleandoc(docstring or "")
    _, _, section = text.partition("\nArgs:\n")
    section = re.split(r"^\S", section, maxsplit=1, flags=re.MULTILINE)[0]
    return {name: " ".join(meaning.split()) for name, meaning in _ENTRY.findall(section)}


def parameters_of(constructor: type, *, leave_out: Collection[str] = ()) -> dict[str, Parameter]:
    """Return the parameters of a class by name: arguments of its constructor, or its fields.

    >>> from amtcore.models import Dau1997
    >>> flow = parameters_of(Dau1997)["flow"]
    >>> flow.type_text, flow.default, flow.doc
    ('number', 80.0, 'Lowest centre frequency limit in Hz.')
    """
    meanings: dict[str, str] = {}
    for each in reversed(constructor.__mro__):  # fields may be inherited, and are said there
        meanings |= argument_texts(each.__doc__)
    # `signature` of a class leaves annotations as text; self is the first argument.
    initial = constructor.__init__  # type: ignore[misc]
    arguments = [*inspect.signature(initial, eval_str=True).parameters.values()][1:]
    return {
        argument.name: Parameter(
            argument.name,
            Any if argument.annotation is argument.empty else argument.annotation,
            REQUIRED if argument.default is argument.empty else argument.default,
            meanings.get(argument.name, ""),
        )
        for argument in arguments
        if argument.name not in leave_out
    }


def checked_params(
    model: str, known: Mapping[str, Parameter], params: Mapping[str, object]
) -> dict[str, Any]:
    """Return the given parameters, each in its type.

    Raises:
        ParameterError: A name is unknown, a type is wrong, or a required parameter is missing.
    """
    check_known(f"model {model!r} has no parameter", params, known)
    for name, parameter in known.items():
        if parameter.required and name not in params:
            wanted = f"a value for parameter {name!r} ({parameter.type_text})"
            raise ParameterError(f"model {model!r}: expected {wanted}, got none")
    try:
        return {name: known[name].checked(value) for name, value in params.items()}
    except ParameterError as error:
        raise ParameterError(f"model {model!r}: {error}") from None


def built(constructor: Callable[..., _Built], model: str, params: Mapping[str, object]) -> _Built:
    """Call the constructor; any refusal is a `ParameterError`."""
    try:
        return constructor(**params)
    except TypeError as error:
        raise ParameterError(f"model {model!r}: {error}") from error


def _words(wanted: Any) -> str:
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        return " or ".join(_words(part) for part in parts)
    if origin is Literal:
        return " or ".join(repr(part) for part in parts)
    if origin in (list, tuple, Sequence):
        inner = [_words(part) for part in parts if part is not ...]
        return f"list of {inner[0]}" if len(set(inner)) == 1 else f"list of {', '.join(inner)}"
    plain = _plain(wanted)
    return _WORDS.get(plain, getattr(plain, "__name__", str(plain)))


def _plain(wanted: Any) -> Any:
    """Return the class of a type without its parameters; every mapping type is `Mapping`."""
    origin = get_origin(wanted) or wanted
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Mapping
    return types.NoneType if origin is None else origin


def _fits(wanted: Any, value: Any) -> bool:
    try:
        _fitted(wanted, value)
    except _Misfit:
        return False
    return True


def _fitted(wanted: Any, value: Any) -> Any:
    """Return a value in a type; raise `_Misfit` for a value of another type."""
    origin, parts = get_origin(wanted), get_args(wanted)
    if origin in (Union, types.UnionType):
        for part in parts:
            with suppress(_Misfit):
                return _fitted(part, value)
        raise _Misfit
    if origin in (list, tuple, Sequence) and isinstance(value, list | tuple):
        many = origin is not tuple or parts[1:] == (...,)
        each = parts[:1] * len(value) if many else parts
        if len(each) == len(value):
            fitted = (_fitted(part, item) for part, item in zip(each, value, strict=True))
            return list(fitted) if origin is list else tuple(fitted)
    plain, number = _plain(wanted), plain_number(value)
    if plain is float and number is not None:
        return float(number)
    if plain is int and number is not None and number % 1 == 0:
        return int(number)
    if plain is bool and isinstance(value, bool | np.bool_):
        return bool(value)
    if origin is Literal:
        fits = any(value == part and type(value) is type(part) for part in parts)
    elif plain is Mapping:
        keys = parts[0] if parts else str
        fits = isinstance(value, Mapping) and all(_fits(keys, key) for key in value)
    else:
        misfit = origin in (list, tuple, Sequence) or plain in (
            int,
            float,
            bool,
        )  # else returned above
        fits = plain in (object, Any) or (not misfit and isinstance(value, plain))
    if not fits:
        raise _Misfit
    return value
