"""Conformance tests for extensions: models, sources and formats of other distributions.

    from earmill.testing import ModelConformance

    class TestMine(ModelConformance):
        model = "mymodel"

Each suite is a class of pytest tests. It is imported, with pytest, when it is first named.
"""

from __future__ import annotations

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amtcore.testing.models import ModelConformance
    from earmill.testing.formats import FormatConformance
    from earmill.testing.sources import SourceConformance

# Name -> its module.
_HOMES = {
    "FormatConformance": "earmill.testing.formats",
    "ModelConformance": "amtcore.testing.models",
    "SourceConformance": "earmill.testing.sources",
}

__all__ = ["FormatConformance", "ModelConformance", "SourceConformance"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from earmill.pipeline.common.missing_modules import needed_modules

    with needed_modules(f"earmill.testing.{name}"):
        import pytest

        if home not in sys.modules:
            pytest.register_assert_rewrite(home)  # so that a failure shows the values
        suite = getattr(import_module(home), name)
    globals()[name] = suite
    return suite


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
