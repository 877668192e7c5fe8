"""Errors that the models raise on purpose; each also inherits the built-in a caller expects."""

from __future__ import annotations


class AmtError(Exception):
    """Base of all deliberate errors of the models."""


class ParameterError(AmtError, ValueError):
    """A constructor argument or option is outside what the model allows."""


class UnknownModelError(AmtError, ValueError):
    """No model is registered under this name."""


class ShapeError(AmtError, ValueError):
    """A tensor has the wrong number of axes or the wrong size."""


class BackendError(AmtError, RuntimeError):
    """The forced kernel backend cannot run here, or there is none for the tensor's device."""
