"""The cards as files: README.md, croissant.json and provenance.jsonld, which go with a snapshot.

The names are fixed, so a driver that was stopped while it closed a dataset could lay its cards over
the cards of a later snapshot. Each card is therefore replaced only while its content is as it was
when the closing began.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.dataset.lease import Fence
from earmill.pipeline.dataset.snapshot import described, read_current
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.paths import CROISSANT_FILE, PROVENANCE_FILE, README_FILE

# Content of each card by its name; None where there is no such file.
Cards = Mapping[str, bytes | None]


def read_if_there(layout: Layout, name: str) -> bytes | None:
    """Return the content of a file, damaged or not, or None where it is missing."""
    try:
        return layout.read_bytes(name)
    except FileNotFoundError:
        return None


def read_cards(layout: Layout) -> dict[str, bytes | None]:
    """Return the cards that are there."""
    return {
        name: read_if_there(layout, name) for name in (README_FILE, CROISSANT_FILE, PROVENANCE_FILE)
    }


def replace_cards(layout: Layout, cards: Mapping[str, bytes], seen: Cards, fence: Fence) -> None:
    """Replace the cards that were seen.

    Raises:
        OvertakenError: Another command has taken the output over.
    """
    for name, content in cards.items():
        before = seen.get(name)
        fence.check(layout)
        while not layout.replace_own(name, content, before):
            # Either another command has the output now, or one that had it before has just woken.
            fence.check(layout)
            before = read_if_there(layout, name)


def put_cards_back(layout: Layout, cards: Mapping[str, bytes], seen: Cards) -> None:
    """Undo `replace_cards` where the snapshot that counts names the cards that were seen."""
    with suppress(CommitError):
        current = read_current(layout)
        named = () if current is None else current.cards
        for card in named:
            before, written = seen.get(card.path), cards.get(card.path)
            if before is not None and written is not None and card == described(card.path, before):
                layout.replace_own(card.path, before, written)
