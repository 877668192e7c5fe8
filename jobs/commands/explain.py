"""`earmill explain`: what helps when something failed, without a network."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Annotated

import typer

from earmill.jobs.console.terminal import console
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.common.text import nearest

# A heading of the page; a line of its table: reason, what it means, what helps.
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
REASON = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
# A link, which a terminal shows by its words alone.
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
# `earmill explain source` is `the-source`.
ARTICLE = re.compile(r"^(the|an?)-")


def explain(
    topic: Annotated[
        str | None, typer.Argument(help="Of the line with which a command failed; else all.")
    ] = None,
) -> None:
    """Show what an error, or a reason for quarantine, means and what helps."""
    from rich.markdown import Markdown

    page = LINK.sub(r"\1", page_text())
    console().print(Markdown(page if topic is None else explanation(page, topic)))


def page_text() -> str:
    """The page about all errors, Markdown."""
    return (files("earmill.jobs") / "errors.md").read_text("utf-8")


def explanation(page: str, topic: str) -> str:
    """What a page says of a topic, Markdown.

    Raises:
        SpecError: It says nothing of it.
    """
    known = sections(page)
    reasons = {
        name: f"## {name}\n\n{means}: {helps}." for name, means, helps in REASON.findall(page)
    }
    found = {**known, **{ARTICLE.sub("", name): text for name, text in known.items()}, **reasons}
    for wanted in (topic.strip().lower(), topic.strip().lower().replace(" ", "-")):
        if wanted in found:
            return found[wanted]
    raise SpecError(
        f"no topic {topic!r}{nearest(topic, list(found))}; topics: {', '.join(known)}; and the "
        f"reasons for quarantine: {', '.join(reasons)}"
    )


def sections(page: str) -> dict[str, str]:
    """Topic to its section, with the heading: `## No answer` is `no-answer`."""
    heads = list(HEADING.finditer(page))
    ends = [head.start() for head in heads[1:]] + [len(page)]
    return {
        head[1].lower().replace(" ", "-"): page[head.start() : end].rstrip()
        for head, end in zip(heads, ends, strict=True)
    }
