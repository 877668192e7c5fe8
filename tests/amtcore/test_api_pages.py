"""The API pages in docs/ against the code: tables by introspection, examples as doctests.

What a table's first column may hold is said at the top of docs/api.md. Constructor arguments are
compared in both directions, so that neither side can grow or change a default alone.
"""

from __future__ import annotations

import ast
import doctest
import inspect
import math
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import amtcore
from amtcore.features import spike_encoder as spikes
from amtcore.models import loudness as loudness_models
from amtcore.models import time_domain as model_base
from amtcore.stages import stage as stage_base

PAGES = sorted((Path(__file__).parents[2] / "docs").glob("api*.md"))
_HOMES: tuple[ModuleType, ...] = (amtcore, spikes, stage_base, model_base, loudness_models)
_VALUES = {"float32": torch.float32, "inf": math.inf}
#: Arguments that the pages state once, under Stage, for all stages.
_SHARED = {"learnable", "dtype", "backend"}
_FC = [500.0, 1000.0]
_HZ = torch.tensor(_FC)

#: How to get an instance of what has no default for everything; a base class through a child.
_BUILD: dict[str, Callable[..., Any]] = {
    "Stage": lambda: amtcore.ButterworthFilter(16000, 100.0),
    "TimeDomainModel": lambda: amtcore.Dau1997(16000),
    "LoudnessModel": lambda: amtcore.Moore2016(),
    "Dau1997": lambda **k: amtcore.Dau1997(16000, 500, 1000, **k),
    "Osses2021": lambda **k: amtcore.Osses2021(16000, 500, 1000, **k),
    "King2019": lambda **k: amtcore.King2019(16000, 500, 1000, **k),
    "Paulick2024": lambda **k: amtcore.Paulick2024(16000, 500, 1000, 2, **k),
    "GammatoneFilterbank": lambda **k: amtcore.GammatoneFilterbank(_FC, 16000, **k),
    "DRNLFilterbank": lambda **k: amtcore.DRNLFilterbank(_FC, 16000, **k),
    "ButterworthFilter": lambda **k: amtcore.ButterworthFilter(16000, 100.0, **k),
    "Resampler": lambda: amtcore.Resampler(16000, 4000),
    "ModulationFilterbank": lambda **k: amtcore.ModulationFilterbank(16000, _FC, **k),
    "FastModulationFilterbank": lambda **k: amtcore.FastModulationFilterbank(16000, _FC, **k),
    "Moore2016ExcitationPattern": lambda **k: amtcore.Moore2016ExcitationPattern(_HZ, **k),
    "ERBIntegration": lambda **k: amtcore.ERBIntegration(_HZ, **k),
    "ExcitationPattern": lambda **k: amtcore.ExcitationPattern(_HZ, _FC, **k),
    "Moore2016SpecificLoudness": lambda **k: amtcore.Moore2016SpecificLoudness(_FC, **k),
    "SpecificLoudness": lambda **k: amtcore.SpecificLoudness(_FC, **k),
    "CARFAC": lambda **_: amtcore.CARFAC(8000),
    "SAI": lambda **_: amtcore.SAI(8000),
    "LIFExodus": lambda **k: amtcore.LIFExodus((4, 2), **k),
    "SpikeEncoder": lambda: spikes.SpikeEncoder(spikes.SpikeOptions(), 2),
    "SpikeStream": lambda: _build("SpikeEncoder").open_stream(),
    "SpikeEvents": lambda: spikes.SpikeEvents.from_dense(torch.eye(2, dtype=torch.int64).numpy()),
    **dict.fromkeys(
        ("HeadphoneFilter", "MiddleEarFilter", "OuterMiddleEarFilter", "IHCEnvelope", "AdaptLoop",
         "IHCPaulick2024", "King2019ModulationFilterbank", "FastKing2019ModulationFilterbank",
         "LoudnessEar"),
        16000,
    ),
}  # fmt: skip


def _find(name: str) -> type[Any]:
    return next(getattr(home, name) for home in _HOMES if hasattr(home, name))


def _build(name: str, **options: Any) -> Any:
    how = _BUILD.get(name, ())
    if callable(how):
        return how(**options)
    return _find(name)(*([] if how == () else [how]), **options)


def _tables(text: str) -> Iterator[tuple[str, str]]:
    """(heading, first cell) of every row of every table whose first column is name or class."""
    heading, listed = "", False
    for line in text.splitlines():
        if line.startswith("#"):
            heading = line.lstrip("# ")
        if not line.startswith("|"):
            listed = False
            continue
        cell = line.split("|")[1].strip()
        if cell in ("name", "class"):
            listed = True
        elif listed and cell.strip("-"):
            yield heading, cell


def _sections(text: str) -> dict[str, list[str]]:
    """Class -> what the tables list of it; constructors in a class column are taken apart."""
    listed: dict[str, list[str]] = {}
    for heading, cell in _tables(text):
        for entry in re.findall(r"`([^`]+)`", cell):
            if re.match(r"[A-Z]\w+\(", entry):
                call = ast.parse(entry, mode="eval").body
                assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
                words = [ast.unparse(a) for a in call.args]
                words += [f"{k.arg}={ast.unparse(k.value)}" for k in call.keywords]
                listed.setdefault(call.func.id, []).extend(words)
            else:
                listed.setdefault(heading, []).append(entry)
    return listed


def _value(text: str) -> Any:
    return _VALUES[text] if text in _VALUES else ast.literal_eval(text)


def _same(stated: Any, real: Any) -> bool:
    """Equal; floats as far as four digits tell, for those that follow from a formula."""
    if isinstance(stated, float) and isinstance(real, (int, float)):
        return math.isclose(stated, real, rel_tol=1e-4)
    return bool(stated == real)


def _default_complaint(where: str, stated: str, parameter: inspect.Parameter) -> list[str]:
    """Whether a stated default, "" for none, is the real one."""
    required = parameter.default is inspect.Parameter.empty
    if required and stated:
        return [f"{where} has no default, the page says {stated}"]
    if not required and not (stated and _same(_value(stated), parameter.default)):
        return [f"{where} is {parameter.default!r} by default, the page says {stated or 'none'}"]
    return []


def _arguments(name: str, stated: list[str]) -> list[str]:
    """Complaints about constructor arguments."""
    signature = inspect.signature(_find(name)).parameters
    named = {k: p for k, p in signature.items() if p.kind is not p.VAR_POSITIONAL}
    named = {k: p for k, p in named.items() if p.kind is not p.VAR_KEYWORD}
    wrong, seen = [], set()
    for entry in stated:
        argument, _, default = entry.partition("=")
        seen.add(argument)
        if argument in named:
            wrong += _default_complaint(f"{name}({argument})", default, named[argument])
        else:
            wrong.append(f"{name} has no argument {argument}")
    missing = set(named) - seen - (_SHARED if issubclass(_find(name), stage_base.Stage) else set())
    return wrong + [f"the page lacks {name}({argument})" for argument in sorted(missing)]


def _method(name: str, obj: Any, entry: str) -> list[str]:
    """Complaints about a method, written as it is called."""
    call = ast.parse(entry, mode="eval").body
    assert isinstance(call, ast.Call) and isinstance(call.func, ast.Name)
    method = getattr(obj, call.func.id, None)
    if not inspect.ismethod(method):
        return [f"{name} has no method {call.func.id}"]
    parameters = inspect.signature(method).parameters
    stated = {ast.unparse(a): "" for a in call.args}
    stated |= {str(k.arg): ast.unparse(k.value) for k in call.keywords}
    if list(parameters) != list(stated):
        return [f"{name}.{call.func.id} takes {list(parameters)}, the page says {list(stated)}"]
    where = f"{name}.{call.func.id}"
    return [
        complaint
        for argument, default in stated.items()
        for complaint in _default_complaint(f"{where}({argument})", default, parameters[argument])
    ]


def _stage_keys(name: str, stated: set[str]) -> list[str]:
    """Complaints about the keys of the dict of stages."""
    _, stages = _build(name, return_stages=True)(torch.zeros(320))
    if set(stages) == stated:
        return []
    return [f"{name} returns stages {sorted(stages)}, the page says {sorted(stated)}"]


def _complaints(name: str, entries: list[str]) -> list[str]:
    """Everything a page says of a class that does not hold."""
    wrong = _arguments(name, [e for e in entries if e[0] not in ".["])
    obj = _build(name)
    for entry in (e[1:] for e in entries if e[0] == "."):
        if entry.endswith(")"):
            wrong += _method(name, obj, entry)
        elif not hasattr(obj, entry) or inspect.ismethod(getattr(obj, entry)):
            wrong.append(f"{name} has no attribute {entry}")
    keys = {ast.literal_eval(e)[0] for e in entries if e[0] == "["}
    return wrong + (_stage_keys(name, keys) if keys else [])


@cache
def _documented() -> dict[str, list[str]]:
    listed: dict[str, list[str]] = {}
    for page in PAGES:
        for name, entries in _sections(page.read_text()).items():
            assert name not in listed, f"{name} has tables on two pages"
            listed[name] = entries
    return listed


def test_every_public_class_has_a_table() -> None:
    public = {n for n in amtcore.__all__ if inspect.isclass(getattr(amtcore, n))}
    assert public - {"Calibration"} <= set(_documented())


@pytest.mark.parametrize("name", sorted(_documented()))
def test_tables_say_what_there_is(name: str) -> None:
    assert _complaints(name, _documented()[name]) == []


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("fc=100.0", "fc) has no default"),
        ("order=2", "order) is 1 by default, the page says 2"),
        ("order", "order) is 1 by default, the page says none"),
        ("poles=1", "no argument poles"),
        (".poles", "no attribute poles"),
        (".stream", "no attribute stream"),
        (".fc()", "no method fc"),
        (".stream(x)", "takes ['x', 'state']"),
        (".stream(x, state=1)", "state) is None by default, the page says 1"),
    ],
)
def test_a_wrong_entry_is_found(entry: str, complaint: str) -> None:
    (found,) = _complaints("ButterworthFilter", ["fs", "fc", "order=1", "btype='low'", entry])
    assert complaint in found


def test_what_a_page_lacks_is_found() -> None:
    (found,) = _complaints("ButterworthFilter", ["fs", "fc", "order=1"])
    assert found == "the page lacks ButterworthFilter(btype)"
    (found,) = _stage_keys("Dau1997", {"ihc", "adaptation"})
    assert "filterbank" in found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_the_pages(page: Path) -> None:
    text = re.sub(r"(?m)^```.*$", "", page.read_text())  # a fence would count as output
    examples = doctest.DocTestParser().get_doctest(text, {}, page.stem, str(page), 0)
    report: list[str] = []
    results = doctest.DocTestRunner(verbose=False).run(examples, out=report.append)
    assert results.attempted > 10 and results.failed == 0, "".join(report)


@pytest.mark.parametrize("name", sorted(set(_documented()) & set(amtcore.__all__) - {"Resampler"}))
def test_learnable_classes_print_without_warnings(name: str) -> None:
    """Torch warns when a parameter becomes a number; warnings are errors here."""
    torch.set_warn_always(True)
    try:
        assert repr(_build(name, learnable=True)).startswith(f"{name}(")
    finally:
        torch.set_warn_always(False)
