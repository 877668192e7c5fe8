"""`import earmill`: everything a user needs under one name, loaded when it is used, and typed."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
import types
from pathlib import Path

import pytest

import earmill


def test_importing_the_package_loads_nothing_heavy() -> None:
    code = (
        "import sys, earmill\n"
        "heavy = {'torch', 'numpy', 'ray', 'pyarrow', 'zarr', 'pydantic', 'amtcore'}\n"
        "print(sorted(heavy & set(sys.modules)), len([m for m in sys.modules if 'earmill' in m]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["[]", "1"]


@pytest.mark.parametrize("name", earmill.__all__)
def test_every_name_is_there_and_says_what_it_is(name: str) -> None:
    found = getattr(earmill, name)
    if name == "__version__":
        assert found.count(".") == 2
        return
    assert found.__doc__, f"earmill.{name} has no docstring"
    home = found.__name__ if isinstance(found, types.ModuleType) else found.__module__
    assert home.split(".")[0] in ("earmill", "amtcore")
    # Where it says it lives it can be found: what is pickled here is loaded elsewhere.
    if not isinstance(found, types.ModuleType):
        assert getattr(importlib.import_module(home), found.__name__) is found


def test_the_lazy_names_are_those_that_type_checkers_see() -> None:
    tree = ast.parse(Path(earmill.__file__).with_suffix(".pyi").read_text())
    imports = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    seen = {a.asname: (n.module, a.name) for n in imports for a in n.names}
    assert earmill._HOMES == seen
    assert set(earmill._HOMES) | {"__version__"} == set(earmill.__all__)
    assert set(earmill.__all__) <= set(dir(earmill))
    with pytest.raises(AttributeError, match="no attribute 'close_features'"):
        earmill.close_features  # noqa: B018


def test_our_folders_are_no_modules_of_their_own() -> None:
    """Nothing may load a file twice, once as `pipeline` and once as `earmill.pipeline`."""
    stray = [name for name in sys.modules if name.split(".")[0] in ("pipeline", "jobs")]
    assert stray == []
