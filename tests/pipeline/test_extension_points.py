"""Names out of entry points: strangers count, clashes name both, what is broken breaks itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import ExtensionError, SpecError
from earmill.pipeline.common.extension_points import SOURCES
from earmill.pipeline.sources import open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.spec.reference import reference
from tests.pipeline.strangers import install

ROOT = Path(__file__).parents[2]
GROUP = SOURCES.group
JOB = {
    "source": {"kind": "files", "uri": "speech"},
    "extract": [{"model": "dau1997"}],
    "output": {"uri": "out"},
}
SILENCE = '''
from typing import Literal
from earmill.sources import SourceKind, SourceSection

class SilenceSection(SourceSection):
    """Clips without a sound.

    Args:
        kind: silence_{suffix}.
        clips: How many.
    """

    kind: Literal["silence_{suffix}"]
    clips: int = 3

SILENCE = SourceKind(SilenceSection, lambda section: section)
'''


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def silence(path: Path, suffix: str) -> str:
    """A stranger's kind of source; module names differ, as modules stay imported."""
    module, kind = f"silence_{suffix}_module", f"silence_{suffix}"
    text = SILENCE.replace("{suffix}", suffix)
    install(path, f"dist-{suffix}", {GROUP: {kind: f"{module}:SILENCE"}}, {module: text})
    return kind


def error_of(source: Any) -> str:
    with pytest.raises(SpecError) as caught:
        JobSpec.load({**JOB, "source": source})
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_stranger_is_a_kind_of_source_like_any_other(path: Path) -> None:
    kind = silence(path, "a")
    spec = JobSpec.load({**JOB, "source": {"kind": kind}}, ["source.clips=5"])
    assert spec.canonical()["source"] == {"kind": kind, "clips": 5}
    assert JobSpec.load(spec).sha256() == spec.sha256()
    assert open_source(spec.source) is spec.source
    page = reference()
    assert f"## source, kind: {kind}\n\nClips without a sound.\n" in page
    assert "| `clips` | whole number | `3` | How many. |" in page


def test_hints_of_a_wrong_key_and_a_wrong_kind_know_the_stranger(path: Path) -> None:
    kind = silence(path, "b")
    wrong_key = error_of({"kind": kind, "clip": 5})
    assert (
        "source.clip: unknown key; did you mean 'clips'? (valid keys: kind, limit, clips)"
        in wrong_key
    )
    wrong_kind = error_of({"kind": "silence-b"})
    assert "silence_b or webdataset, got 'silence-b'; did you mean 'silence_b'?" in wrong_kind
    assert GROUP in wrong_kind


def test_a_name_that_two_distributions_claim_belongs_to_neither(path: Path) -> None:
    install(path, "wavs-again", {GROUP: {"files": "no_such_module:FILES"}}, {})
    line = error_of(JOB["source"])
    assert "source.kind: source kind 'files' is registered by earmill " in line
    assert "and wavs-again 1.0" in line
    assert JobSpec.load({**JOB, "source": {"kind": "hf", "uri": "x"}}).source.kind == "hf"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_library", "ModuleNotFoundError: No module named 'no_such_library'"),
        ("raise RuntimeError('two\\nlines')", "RuntimeError: two lines"),
        ("OTHER = 1", "AttributeError"),
        (
            "from earmill.sources import SourceKind\nKIND = SourceKind(dict, dict)",
            "expected a subclass of SourceSection as its section, got <class 'dict'>",
        ),
        ("KIND = 5", "expected its entry point to lead to a SourceKind, got int"),
        (SILENCE.replace("{suffix}", "x").replace("SILENCE =", "KIND ="), "expected kind: Literal"),
    ],
    ids=["import", "raises", "attribute", "section", "type", "name"],
)
def test_a_broken_entry_point_breaks_only_who_asks_for_it(
    path: Path, text: str, said: str, request: pytest.FixtureRequest
) -> None:
    module = f"broken_{request.node.callspec.id}_module"
    install(path, "broken-one", {GROUP: {"broken": f"{module}:KIND"}}, {module: text})
    assert JobSpec.load(JOB).source.kind == "files"
    assert "## source, kind: broken\n\nNot usable here: " in reference()
    line = error_of({"kind": "broken"})
    assert line.startswith("job: source.kind: source kind 'broken' of broken-one 1.0")
    assert said in line


def test_metadata_older_than_the_code_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(SOURCES), "_registered", lambda self: ())
    with pytest.raises(ExtensionError, match=r"metadata is older than its code.*pip install"):
        SOURCES.load("files")


def test_what_stands_behind_another_of_its_name_or_was_removed_offers_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for place in ("first", "behind"):
        monkeypatch.syspath_prepend(str(tmp_path / place))
    removed = install(tmp_path / "first", "left_over", {GROUP: {"over": "x:X"}}, {})
    (removed / "left_over-1.0.dist-info/METADATA").unlink()
    install(tmp_path / "first", "two-of-them", {GROUP: {"old": "x:X"}}, {})
    install(tmp_path / "behind", "Two.of_them", {"others": {"new": "x:X"}}, {})
    assert not {"over", "old"} & set(SOURCES.names())


def test_metadata_of_another_name_than_its_folder_counts(path: Path) -> None:
    install(path, "folder-name", {GROUP: {"renamed": "x:X"}}, {})
    (path / "folder_name-1.0.dist-info/METADATA").write_text("Name: other\nVersion: 2\n")
    assert SOURCES.owner("renamed") == "other 2"
