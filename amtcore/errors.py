"""Errors that the models raise on purpose; each also inherits the built-in a caller expects."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class AmtError(Exception):
    """Base of all deliberate errors of the models."""


class ParameterError(AmtError, ValueError):
    """A constructor argument or option is outside what the model allows."""


class UnknownModelError(AmtError, ValueError):
    """No model is registered under this name."""


class ModelLoadError(AmtError, ValueError):
    """A registered model cannot be loaded: its module, its name, or two that claim one name."""


class ShapeError(AmtError, ValueError):
    """A tensor has the wrong number of axes or the wrong size."""


class StateError(AmtError, ValueError):
    """A state is not what the same stage or model returned with the previous chunk."""


class BackendError(AmtError, RuntimeError):
    """The forced kernel backend cannot run here, or there is none for the tensor's device."""


class DeviceMemoryError(BackendError, MemoryError):
    """The GPU has too little free memory for this batch; a smaller one may do."""


class DeviceLostError(BackendError):
    """The GPU is lost to this process, by a failed kernel or by itself; another may use it."""


class WrongDeviceError(AmtError, RuntimeError):
    """A tensor lies on another device than the model or stage that it is given to."""


class KernelCacheError(AmtError, PermissionError):
    """Others can write to the folder of compiled kernels, which are code."""


class KernelError(AmtError, RuntimeError):
    """A compiled kernel cannot be interpreted, or did what a GPU stops at."""


class DerivativeError(AmtError, NotImplementedError):
    """A derivative was asked for that does not exist: second, or forward-mode."""


class ReadOnlyError(AmtError, AttributeError):
    """An attribute that decides the design of a module was assigned after construction."""


class TracingError(AmtError, NotImplementedError):
    """TorchScript was asked to trace or to script a module."""


class NonFiniteError(ParameterError):
    """Values that must be finite are NaN or infinite, or became so."""


def nearest_hint(name: str, known: Iterable[str]) -> str:
    """End a message about a wrong name: name the nearest right name, else all names."""
    known = list(known)
    near = difflib.get_close_matches(name, known, 1)
    if near:
        return f": did you mean {near[0]!r}?"
    return f": expected one of {', '.join(known)}"


def check_known(missing: str, names: Iterable[str], known: Collection[str]) -> None:
    """Raise for a name that is not known; `missing` begins the message: "x has no option"."""
    for name in names:
        if name not in known:
            hint = nearest_hint(str(name), known) if known else ": it has none"
            raise ParameterError(f"{missing} {name!r}{hint}")


def one_line(error: BaseException) -> str:
    """Return the type and the message of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
