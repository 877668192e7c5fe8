"""Bounded reading of YAML, JSON and tar archives that others wrote.

A job file of 400 bytes can name a billion values through aliases, and a thousand brackets exhaust
the stack of a parser. Python treats a block of a tar that it cannot read as the end of the archive,
and reads a header of any claimed size into memory. Both are errors in `tar_members`.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any

import yaml

# A long job file has some hundred lines; the limits allow a hundred times more.
MAX_YAML_BYTES = 2**20
MAX_VALUES = 50_000
MAX_DEPTH = 40
MAX_ALIASES = 1000
MAX_JSON_CHARS = 2**20  # One line of a manifest, or the JSON of an option.


class TooMuchError(ValueError):
    """A document is larger or deeper, or has more aliases, than a person writes."""


def loads_json(text: str | bytes, *, max_chars: int | None = MAX_JSON_CHARS) -> Any:
    """Parse JSON of at most `max_chars`; every failure is a ValueError."""
    if max_chars is not None and len(text) > max_chars:
        raise TooMuchError(f"expected JSON of at most {max_chars:,} characters, got {len(text):,}")
    try:
        return json.loads(text)
    except RecursionError:
        raise TooMuchError("the JSON is nested too deeply") from None


class BoundedComposer(yaml.SafeLoader):
    """SafeLoader that counts its values while it composes them, and stops at the limits above."""

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._aliases = 0
        # Number of values of each finished node. An alias to an unfinished node is in itself.
        self._values: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        is_alias = self.check_event(yaml.AliasEvent)
        self._depth += 1
        self._aliases += is_alias
        if self._depth > MAX_DEPTH:
            raise TooMuchError(f"nested more than {MAX_DEPTH} levels deep")
        if self._aliases > MAX_ALIASES:
            raise TooMuchError(f"more than {MAX_ALIASES} aliases")
        node = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._values:
            raise TooMuchError("an alias to the value it stands in")
        if not is_alias and node is not None:
            self._values[id(node)] = self._count(node)
        return node

    def _count(self, node: yaml.Node) -> int:
        children: list[yaml.Node] = node.value if isinstance(node, yaml.SequenceNode) else []
        if isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        total = 1 + sum(self._values[id(child)] for child in children)
        if total > MAX_VALUES:
            raise TooMuchError(f"more than {MAX_VALUES:,} values once its aliases are written out")
        return total


MB = 2**20
MAX_HELD_BYTES = MB  # Most bytes of one header, or of one read of a member.
# In WebDataset a sample's key is the member's name up to the first dot behind the last slash.
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)


def tar_members(stream: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Yield every member with its open tar; TarError if the file is no plain tar, or damaged."""
    bounded: Any = BoundedReads(stream)
    with tarfile.open(fileobj=bounded, mode="r:", errors="surrogateescape") as tar:
        remembered: list[tarfile.TarInfo] = vars(tar)["members"]
        while (member := tar.next()) is not None:
            remembered.clear()
            if member.size < 0:  # the next header would be an earlier one
                raise tarfile.ReadError(f"a member claims to have {member.size:,} bytes")
            yield tar, member
        stream.seek(tar.offset)
        block = stream.read(tarfile.BLOCKSIZE)
        if block != bytes(tarfile.BLOCKSIZE):
            what = "is cut off" if len(block) < tarfile.BLOCKSIZE else "has a damaged header"
            raise tarfile.ReadError(f"it {what} at byte {tar.offset:,}")


class BoundedReads:
    """A tar's file with a limit on reads: `tarfile` reads as many bytes as a header claims."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int) -> bytes:
        """Read up to `MAX_HELD_BYTES`; ReadError if more are asked for."""
        if not 0 <= size <= MAX_HELD_BYTES:
            raise tarfile.ReadError(f"a header claims to have {size:,} bytes")
        return self._stream.read(size)
