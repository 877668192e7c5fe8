"""`earmill spec` and `earmill explain`: references of job file and errors, without a network."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from typing import Annotated

import typer

from earmill.jobs.console.terminal import console
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.common.text import nearest

# The begin of a section of the page about errors, and a line of its table: reason, meaning, help.
SECTION = re.compile(r"^(?=#+ )", re.MULTILINE)
REASON = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
# A link; a terminal shows its text and the file in the repository, without an anchor.
LINK = re.compile(r"\[([^]]+)\]\((?:\.\./)?([^)#]+)[^)]*\)")
# Optional articles of topics: `earmill explain source` shows `the-source`.
ARTICLE = re.compile(r"^(the|an?)-")


def spec(
    as_schema: Annotated[
        bool, typer.Option("--json-schema", help="Print a JSON schema for editors instead.")
    ] = False,
) -> None:
    """Print the reference of the job file, as Markdown."""
    from earmill.pipeline.spec import reference

    if as_schema:
        print(json.dumps(reference.json_schema(), indent=1))
    else:
        print(reference.reference(), end="")


def explain(
    topic: Annotated[
        str | None, typer.Argument(help="Topic that the error line names; all topics if left out.")
    ] = None,
) -> None:
    """Explain an error or a reason for quarantine, and how to repair it."""
    from rich.markdown import Markdown

    page = LINK.sub(r"\1 (\2)", page_text())
    console().print(Markdown(page if topic is None else explanation(page, topic)))


def page_text() -> str:
    return (files("earmill.jobs") / "errors.md").read_text("utf-8")


def explanation(page: str, topic: str) -> str:
    """Return the section of a page about a topic, or about a reason for quarantine, as Markdown.
    `## No answer` is the heading of topic `no-answer`."""
    sections = [section.rstrip() for section in SECTION.split(page)[1:]]
    headings = [section.partition("\n")[0].lstrip("# ") for section in sections]
    topics = dict(zip((each.lower().replace(" ", "-") for each in headings), sections, strict=True))
    reasons = {
        name: f"## {name}\n\n{means}: {helps}." for name, means, helps in REASON.findall(page)
    }
    texts = {**topics, **{ARTICLE.sub("", name): text for name, text in topics.items()}, **reasons}
    wanted = topic.strip().lower().replace(" ", "-")
    if wanted in texts:
        return texts[wanted]
    raise SpecError(
        f"no topic {topic!r}{nearest(topic, list(texts))}; topics: {', '.join(topics)}; and the "
        f"reasons for quarantine: {', '.join(reasons)}"
    )
