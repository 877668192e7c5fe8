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
from earmill.jobs.commands.reference import REASON, explanation, page_text
from earmill.jobs.console.terminal import EXPLAIN
from earmill.pipeline.common import errors
from earmill.pipeline.driver.executors.ray import ClusterError

# The title of the page, for errors of no family.
WHOLE = "when-something-fails"
DEFECTS = (cli.OF_A_MODEL, cli.A_DEFECT)


def below(kind: type[errors.EarmillError]) -> Iterator[type[errors.EarmillError]]:
    yield kind
    for child in kind.__subclasses__():
        yield from below(child)


def test_the_classes_are_all_seen() -> None:
    assert {ClusterError, JobFailedError, errors.HubError} <= set(below(errors.EarmillError))


@pytest.mark.parametrize(
    "topic", sorted({kind.help_topic for kind in below(errors.EarmillError)} | {*DEFECTS})
)
def test_every_topic_that_an_error_names_is_explained(
    topic: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["explain", topic]) == 0
    head, *rest = capsys.readouterr().out.strip().splitlines()
    assert slugify(head.strip(" ┃"), "-") == topic or topic == WHOLE
    assert len(" ".join(rest)) > 100


@pytest.mark.parametrize(
    "kind", [kind for kind in below(errors.EarmillError) if kind is not errors.EarmillError]
)
def test_no_family_is_left_to_the_page_for_all(kind: type[errors.EarmillError]) -> None:
    if kind.__module__.startswith("earmill.pipeline"):
        assert kind.help_topic != errors.EarmillError.help_topic


def test_the_page_has_every_reason_for_quarantine_and_no_other() -> None:
    text = page_text().partition("## Quarantine")[2]
    listed = re.findall(r"^\| `(\w+)` \|", text, flags=re.MULTILINE)
    reasons = {kind.error_class for kind in below(errors.RowError)}  # type: ignore[attr-defined]
    assert sorted(listed) == sorted(reasons)


@pytest.mark.parametrize("reason", ["truncated", "decoder_limit"])
def test_a_reason_for_quarantine_is_a_topic(
    reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["explain", reason]) == 0
    means, helps = next(row[1:] for row in REASON.findall(page_text()) if row[0] == reason)
    assert " ".join(capsys.readouterr().out.split()) == f"{reason} {means}: {helps}."


def test_a_topic_needs_no_article_and_an_unknown_one_is_told_what_there_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert explanation(page_text(), "No Answer") == explanation(page_text(), "no-answer")
    assert explanation(page_text(), "source") == explanation(page_text(), "the-source")
    assert cli.run(["explain", "trunkated"]) == 2
    assert "did you mean 'truncated'?" in capsys.readouterr().err
    assert cli.run(["explain"]) == 0
    out = capsys.readouterr().out
    assert "No answer" in out and "](" not in out
    assert "credentials (docs/howto/cloud.md)" in " ".join(out.split())


@pytest.mark.parametrize(
    ("command", "topic"),
    [
        (["plan", "missing.yaml"], "the-job-file"),
        (["plan", "job.yaml"], "the-source"),
        (["verify", "/no/such"], "the-output"),
        (["push", "/no/such", "a/b"], "the-output"),
        (["extract"], None),
    ],
)
def test_a_command_says_it_in_its_one_line_and_in_its_event(
    command: list[str],
    topic: str | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    job = {"source": {"kind": "files", "uri": "none"}, "extract": [{"model": "mfcc"}]}
    Path("job.yaml").write_text(json.dumps({**job, "output": {"uri": "out"}}))
    assert cli.run(command) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.endswith(f" (help: {EXPLAIN} {topic})") if topic else EXPLAIN not in line
    assert cli.run([*command, "--json"]) == 2
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert event.get("help") == (f"{EXPLAIN} {topic}" if topic else None)
    assert EXPLAIN not in event["message"]


def test_paragraphs_of_a_help_end_where_the_terminal_does() -> None:
    """Written over several lines in the source, they were broken there as well."""
    commands = cli.app.registered_commands
    assert {command.name for command in commands} >= {"init", "extract", "explain"}
    for command in commands:
        for paragraph in str(command.help).split("\n\n"):
            assert paragraph and "\n" not in paragraph, command.name
