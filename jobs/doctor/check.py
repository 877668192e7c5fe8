"""One check: what was looked at, whether it works, and what was found or is to be done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.common.text import named_line, one_line


class State(StrEnum):
    """How a check ended."""

    OK = "ok"
    #: Not there, and nobody asked for it.
    NO = "no"
    FAILED = "failed"


@dataclass(frozen=True)
class Check:
    """One line of the doctor.

    Args:
        what: Was looked at.
        state: How that ended.
        text: What was found, or what to do.
        names_a_place: Whether the text is of this machine's folders, and not for others.
    """

    what: str
    state: State
    text: str
    names_a_place: bool = False


def checked(what: str, look: Callable[[], str], *, names_a_place: bool = False) -> Check:
    """Look, and take whatever is raised for the finding: the next check follows all the same."""
    try:
        return Check(what, State.OK, look(), names_a_place)
    except Exception as error:
        return Check(what, State.FAILED, _line(error), names_a_place)


def _line(error: Exception) -> str:
    from amtcore.errors import AmtError

    meant_for_people = isinstance(error, EarmillError | AmtError)
    return one_line(error) if meant_for_people else named_line(error, where=True)
