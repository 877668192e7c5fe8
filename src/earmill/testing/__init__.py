"""Conformance tests for extensions: what a model, a source or a format of others must hold to.

    from earmill.testing import ModelConformance

    class TestMine(ModelConformance):
        model = "mymodel"

Each is a class of pytest tests. Nothing is imported, pytest least of all, before one is named.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from earmill.testing.formats import FormatConformance
    from earmill.testing.models import ModelConformance
    from earmill.testing.sources import SourceConformance

# Name -> the module it is in.
_HOMES = {
    "FormatConformance": "earmill.testing.formats",
    "ModelConformance": "earmill.testing.models",
    "SourceConformance": "earmill.testing.sources",
}

__all__ = ["FormatConformance", "ModelConformance", "SourceConformance"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import pytest

    if home not in sys.modules:
        pytest.register_assert_rewrite(home)  # so that a failure shows the values
    found = getattr(import_module(home), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
