"""Does the source still list what the plan was made of?

A stored plan never changes, so files that were added, removed or touched since are not part of the
output. That is told whenever a job goes on; no audio is opened for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import zip_longest

from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.dataset.row_coverage import some
from earmill.pipeline.driver.events import SourceChanged
from earmill.pipeline.planning.plan import Plan, same_columns
from earmill.pipeline.sources.base import Item, Source

WHAT_TO_DO = "this output keeps to its plan: `earmill extract` with --update takes them in"


@dataclass(frozen=True)
class Changes:
    """Row ids that differ between a plan and a listing."""

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.added or self.removed or self.changed)

    def __str__(self) -> str:
        """`rows: 2 added ('a.wav', 'b.wav'), 1 changed ('c.wav')`."""
        kinds = (("added", self.added), ("removed", self.removed), ("changed", self.changed))
        parts = [f"{len(names):,} {what} ({some(names)})" for what, names in kinds if names]
        return f"rows: {', '.join(parts)}"


def compare(planned: Iterable[Item], listed: Iterable[Item]) -> Changes:
    """How a listing differs from the plan.

    A row counts as changed by its place, tag, size or time, or by the columns it carries through.
    Both go by side by side, as a plan is in the order of its listing: what is held are rows that
    one of them has and the other has not had yet.
    """
    old, new = dict[str, Item](), dict[str, Item]()
    changed = list[str]()
    for was, now in zip_longest(planned, listed):
        met = list[tuple[Item, Item]]()
        if now is not None:
            if (found := old.pop(now.row_id, None)) is None:
                new[now.row_id] = now
            else:
                met.append((found, now))
        if was is not None:
            if (found := new.pop(was.row_id, None)) is None:
                old[was.row_id] = was
            else:
                met.append((was, found))
        changed += [before.row_id for before, after in met if is_other(before, after)]
    return Changes(tuple(sorted(new)), tuple(sorted(old)), tuple(sorted(changed)))


def is_other(old: Item, new: Item) -> bool:
    """Whether a row is to be made anew: its audio, or what else is known of it, is another."""
    return other_audio(old, new) or not same_columns(old, new)


def other_audio(old: Item, new: Item) -> bool:
    """Whether a row's audio may be another, by place, span, and tag, else size and time."""
    if (old.uri, old.start_s, old.end_s) != (new.uri, new.start_s, new.end_s):
        return True
    if old.etag is not None and new.etag is not None:
        return old.etag != new.etag
    pairs = ((old.size, new.size), (old.mtime, new.mtime))
    return any(was is not None and now is not None and was != now for was, now in pairs)


def source_changed(source: Source, plan: Plan) -> SourceChanged | None:
    """The event that tells of a difference, or of a source that cannot be listed; None if equal."""
    try:
        found = compare(plan.items(), listing(source))
    except EarmillError as error:
        text = f"the source could not be listed again, so changes in it would not show: {error}"
        return SourceChanged(added=0, removed=0, changed=0, text=text)
    if not found:
        return None
    return SourceChanged(
        added=len(found.added),
        removed=len(found.removed),
        changed=len(found.changed),
        text=f"the source differs from the plan, {found}; {WHAT_TO_DO}",
    )


def update_hint(source: Source, plan: Plan) -> str:
    """What to say to who meets a finished output: how its source has changed since, if it has."""
    try:
        found = compare(plan.items(), listing(source))
    except EarmillError:
        return ""
    return f", --update to take in what has changed in the source ({found})" if found else ""


def listing(source: Source) -> Iterator[Item]:
    """The source's rows; without durations where it can do that, as those open every file."""
    yield from getattr(source, "listing", source.items)()
