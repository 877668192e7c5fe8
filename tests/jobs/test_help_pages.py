"""Every error says where help is, and there is such a place."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from markdown.extensions.toc import slugify

from earmill.api import JobFailedError
from earmill.jobs import cli
from earmill.jobs.terminal import DOCS
from earmill.pipeline.common import errors
from earmill.pipeline.driver.ray_session import ClusterError

ROOT = Path(__file__).resolve().parents[2]
DEFECTS = (cli.OF_A_MODEL, cli.A_DEFECT)


def below(kind: type[errors.EarmillError]) -> Iterator[type[errors.EarmillError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


def anchors(page: Path) -> set[str]:
    heads = re.findall(r"^#+ (.+)$", page.read_text(), flags=re.MULTILINE)
    return {slugify(head, "-") for head in heads}


def test_the_classes_are_all_seen() -> None:
    assert {ClusterError, JobFailedError, errors.HubError} <= set(below(errors.EarmillError))


@pytest.mark.parametrize(
    "page", sorted({kind.help_page for kind in below(errors.EarmillError)} | {*DEFECTS})
)
def test_every_page_that_an_error_names_is_there_with_its_heading(page: str) -> None:
    name, _, anchor = page.partition("#")
    path = ROOT / DOCS / name
    assert path.is_file()
    assert not anchor or anchor in anchors(path)


@pytest.mark.parametrize(
    "kind", [kind for kind in below(errors.EarmillError) if kind is not errors.EarmillError]
)
def test_no_family_is_left_to_the_page_for_all(kind: type[errors.EarmillError]) -> None:
    if kind.__module__.startswith("earmill.pipeline"):
        assert kind.help_page != errors.EarmillError.help_page


def test_the_page_has_every_reason_for_quarantine_and_no_other() -> None:
    text = (ROOT / DOCS / "errors.md").read_text().partition("## Quarantine")[2]
    listed = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    reasons = {kind.error_class for kind in below(errors.RowError)}  # type: ignore[attr-defined]
    assert sorted(listed) == sorted(reasons)


@pytest.mark.parametrize(
    ("command", "page"),
    [
        (["plan", "missing.yaml"], "spec.md"),
        (["plan", "job.yaml"], "errors.md#the-source"),
        (["verify", "/no/such"], "errors.md#the-output"),
        (["push", "/no/such", "a/b"], "errors.md#the-output"),
        (["extract"], None),
    ],
)
def test_a_command_says_it_in_its_one_line_and_in_its_event(
    command: list[str],
    page: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"source": {"kind": "files", "uri": "none"}, "extract": [{"model": "mfcc"}]}
    Path("job.yaml").write_text(json.dumps({**job, "output": {"uri": "out"}}))
    assert cli.run(command) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f" ({DOCS}{page})") if page else DOCS not in line
    assert cli.run([*command, "--json"]) == 2
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert event.get("help") == (f"{DOCS}{page}" if page else None)
    assert DOCS not in event["message"]
