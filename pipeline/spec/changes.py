"""How two jobs differ, key by key, for the person who wonders why an output is refused.

Works on canonical specs, which hold no credentials; values are shortened, never left out.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from earmill.pipeline.common.text import cut

NAMED = 5
_MISSING = object()


def describe_changes(stored: Any, wanted: Any) -> str:
    """`extract.0.fs_hz: 44100 there, 16000 in the job`, and so on; empty where they are equal."""
    found = list(_changes(stored, wanted, ""))
    more = [f"and {len(found) - NAMED} more"] if len(found) > NAMED else []
    return "; ".join([*found[:NAMED], *more])


def _changes(stored: Any, wanted: Any, path: str) -> Iterator[str]:
    both = (stored, wanted)
    if all(isinstance(value, Mapping) for value in both):
        keys = sorted(set(stored) | set(wanted))
    elif all(isinstance(value, list | tuple) for value in both) and len(stored) == len(wanted):
        keys = list(range(len(stored)))
        stored, wanted = dict(enumerate(stored)), dict(enumerate(wanted))
    else:
        if _text(stored) != _text(wanted):
            yield f"{path}: {_shown(stored)} there, {_shown(wanted)} in the job"
        return
    for key in keys:
        below = f"{path}.{key}" if path else str(key)
        yield from _changes(stored.get(key, _MISSING), wanted.get(key, _MISSING), below)


def _text(value: Any) -> str:
    return "nothing" if value is _MISSING else json.dumps(value, sort_keys=True, ensure_ascii=False)


def _shown(value: Any) -> str:
    return cut(_text(value))
