"""`earmill explain`: the help page about errors, without a network."""

from __future__ import annotations

import re
from importlib.resources import files
from typing import Annotated

import typer

from earmill.jobs.console.terminal import console
from earmill.pipeline.common.errors import SpecError
from earmill.pipeline.common.text import nearest

# A heading of the page, and a line of its table: reason, meaning, help.
HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
REASON = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \|$", re.MULTILINE)
# A link; a terminal shows its text alone.
LINK = re.compile(r"\[([^]]+)\]\([^)]+\)")
# Optional articles of topics: `earmill explain source` shows `the-source`.
ARTICLE = re.compile(r"^(the|an?)-")


def explain(
    topic: Annotated[
        str | None, typer.Argument(help="Topic that the error line names; all topics if left out.")
    ] = None,
) -> None:
    """Explain an error or a reason for quarantine, and how to repair it."""
    from rich.markdown import Markdown

    page = LINK.sub(r"\1", page_text())
    console().print(Markdown(page if topic is None else explanation(page, topic)))


def page_text() -> str:
    """Return the page about all errors as Markdown."""
    return (files("earmill.jobs") / "errors.md").read_text("utf-8")


def explanation(page: str, topic: str) -> str:
    """Return the section of a page about a topic, as Markdown.

    Raises:
        SpecError: The page has no such topic.
    """
    known = sections(page)
    reasons = {
        name: f"## {name}\n\n{means}: {helps}." for name, means, helps in REASON.findall(page)
    }
    texts = {**known, **{ARTICLE.sub("", name): text for name, text in known.items()}, **reasons}
    for wanted in (topic.strip().lower(), topic.strip().lower().replace(" ", "-")):
        if wanted in texts:
            return texts[wanted]
    raise SpecError(
        f"no topic {topic!r}{nearest(topic, list(texts))}; topics: {', '.join(known)}; and the "
        f"reasons for quarantine: {', '.join(reasons)}"
    )


def sections(page: str) -> dict[str, str]:
    """Map topics to sections, heading included: `## No answer` is topic `no-answer`."""
    heads = list(HEADING.finditer(page))
    ends = [head.start() for head in heads[1:]] + [len(page)]
    return {
        head[1].lower().replace(" ", "-"): page[head.start() : end].rstrip()
        for head, end in zip(heads, ends, strict=True)
    }
