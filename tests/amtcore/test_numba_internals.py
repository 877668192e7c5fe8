"""Internal names of numba: all in one module, all looked up, each missed with a clear error."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import amtcore_interpreter
import pytest
from numba import types

import amtcore
from amtcore import numba_internals
from amtcore.kernels.vector.jit import part
from amtcore.numba_internals import NEEDED, lower_to_text

INTERNALS = Path(numba_internals.__file__)
#: The public modules of numba and llvmlite.
PUBLIC = {"numba", "numba.extending", "llvmlite", "llvmlite.ir", "llvmlite.binding"}

_WITHOUT = """
import importlib, sys
from amtcore.numba_internals import NEEDED

for path in list(NEEDED):
    module, _, name = path.partition(":")
    *outer, last = name.split(".")
    owner = importlib.import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    classes = owner.__mro__ if isinstance(owner, type) else [owner]
    owners = [each for each in classes if last in vars(each)]  # a class may inherit the name
    values = [vars(each)[last] for each in owners]
    for each in owners:
        delattr(each, last)
    sys.modules.pop("amtcore.numba_internals", None)
    try:
        importlib.import_module("amtcore.numba_internals")
    except ImportError as error:
        print(path, error, sep="|")
    for each, value in zip(owners, values):
        setattr(each, last, value)
"""


def _imports(path: Path) -> set[str]:
    """Modules of numba and llvmlite that a source file imports, or imports from."""
    found, text = set[str](), path.read_text()
    if "numba" not in text and "llvmlite" not in text:
        return found
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {each.name for each in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
            found |= {f"{node.module}.{each.name}" for each in node.names if each.name == "core"}
    return {name for name in found if name.split(".")[0] in ("numba", "llvmlite")}


def _sources() -> list[Path]:
    """Sources of both distributions."""
    return [
        path
        for package in (amtcore, amtcore_interpreter)
        for path in sorted(Path(package.__file__).parent.rglob("*.py"))
    ]


def test_other_modules_import_public_modules_of_numba_alone() -> None:
    assert len(_sources()) > 100
    wrong = {str(path): names for path in _sources() if (names := _imports(path) - PUBLIC)}
    assert wrong == {}


def test_every_internal_name_has_a_reason() -> None:
    assert len(NEEDED) > 20
    for path, why in NEEDED.items():
        assert re.fullmatch(r"numba(\.\w+)+:\w+(\.\w+)?", path)
        assert why.endswith(".") and len(why.split()) > 4, path


def test_no_name_with_an_underscore_is_used_unnoted() -> None:
    """Attributes of our own classes are written in the module; others must be in `NEEDED`."""
    tree = ast.parse(INTERNALS.read_text())
    used, own = set(), set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            (own if isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ClassDef):
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    used.add(each.name)
                elif isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                    used.add(each.targets[0].id)
    noted = {re.split("[.:]", path)[-1] for path in NEEDED}
    private = {name for name in used if re.match(r"_[^_]", name)}
    assert private - own <= noted


def test_a_release_without_a_name_is_refused_with_the_name() -> None:
    command = [sys.executable, "-c", _WITHOUT]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    messages = dict(line.split("|", 1) for line in done.stdout.splitlines())
    assert set(messages) == set(NEEDED)
    for path, message in messages.items():
        module, name = path.split(":")
        assert message.startswith(f"expected numba to have {name} in {module}, got numba ")
        assert "install another release" in message


@part
def _scaled(x: int, by: int) -> int:
    return x * by


def test_a_function_is_lowered_with_what_it_calls_and_without_references() -> None:
    def work(x: int) -> None:
        _scaled(_scaled(x, 3), 5)

    text, name = lower_to_text(work, [types.int64], types.void)
    assert f'@"{name}"' in text or f"@{name}" in text
    assert "NRT_" not in text and text.count("define ") == 2  # one for both constants


def test_python_cannot_call_a_part() -> None:
    with pytest.raises(TypeError, match="_scaled is a part of kernels"):
        _scaled(1, 2)
