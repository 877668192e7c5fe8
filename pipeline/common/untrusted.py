"""Bounded reading of YAML, JSON and tar archives that others wrote.

A job file of 400 bytes can name a billion values through aliases, and a thousand brackets exhaust
the stack of a parser. What is counted here is the document with every alias written out, because
that is what hashing, copying and printing it would walk.

`tar_members` reads a tar that may be damaged or made to harm. `tarfile` ends at the first block it
cannot read as if the archive ended there, and takes a header of any claimed size into memory. Both
are errors here.
"""

from __future__ import annotations

import json
import re
import tarfile
from collections.abc import Iterator
from typing import IO, Any

import yaml

# A long job file has some hundred lines; all of this leaves room for a hundred times more.
MAX_YAML_BYTES = 2**20
MAX_VALUES = 50_000
MAX_DEPTH = 40
MAX_ALIASES = 1000
# One line of a manifest, or the JSON of an option.
MAX_JSON_CHARS = 2**20


class TooMuchError(ValueError):
    """A document that is larger, deeper or more entangled than anybody writes by hand."""


def loads_json(text: str | bytes, *, max_chars: int | None = MAX_JSON_CHARS) -> Any:
    """`json.loads` whose failures are all ValueErrors.

    Args:
        max_chars: Longest text; None for files whose size is checked elsewhere.
    """
    if max_chars is not None and len(text) > max_chars:
        raise TooMuchError(f"expected JSON of at most {max_chars:,} characters, got {len(text):,}")
    try:
        return json.loads(text)
    except RecursionError:
        raise TooMuchError("the JSON is nested too deeply") from None


class BoundedComposer(yaml.SafeLoader):
    """SafeLoader that counts what it builds, aliases written out, and stops at the limits above.

    Nodes are counted while they are composed, so a bomb costs no more than its own text.
    """

    def __init__(self, stream: str) -> None:
        super().__init__(stream)
        self._depth = self._aliases = 0
        # Values below a node, itself included; an unfinished node is an alias into itself.
        self._values: dict[int, int] = {}

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """One node, its children included."""
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
        children: list[yaml.Node] = []
        if isinstance(node, yaml.SequenceNode):
            children = node.value
        elif isinstance(node, yaml.MappingNode):
            children = [part for pair in node.value for part in pair]
        total = 1 + sum(self._values[id(child)] for child in children)
        if total > MAX_VALUES:
            raise TooMuchError(f"more than {MAX_VALUES:,} values once its aliases are written out")
        return total


MB = 2**20
# Of one header, or of what is read of a member at once.
MAX_HELD_BYTES = MB
# WebDataset: the sample of a member is its name up to the first dot behind the last slash.
MEMBER = re.compile(r"((?:.*/)?[^./][^./]*)\.([^/]+)", re.DOTALL)


def tar_members(stream: IO[bytes]) -> Iterator[tuple[tarfile.TarFile, tarfile.TarInfo]]:
    """Every member with the tar to extract it from, as long as the iteration lasts.

    Raises:
        tarfile.TarError: This is no uncompressed tar, or it is damaged.
    """
    bounded: Any = BoundedReads(stream)
    with tarfile.open(fileobj=bounded, mode="r:", errors="surrogateescape") as tar:
        remembered: list[tarfile.TarInfo] = vars(tar)["members"]
        while (member := tar.next()) is not None:
            remembered.clear()
            if member.size < 0:  # the next header would be one that was read before
                raise tarfile.ReadError(f"a member claims to have {member.size:,} bytes")
            yield tar, member
        stream.seek(tar.offset)
        block = stream.read(tarfile.BLOCKSIZE)
        if block != bytes(tarfile.BLOCKSIZE):
            what = "is cut off" if len(block) < tarfile.BLOCKSIZE else "has a damaged header"
            raise tarfile.ReadError(f"it {what} at byte {tar.offset:,}")


class BoundedReads:
    """A tar's file for `tarfile`, which reads as many bytes at once as a header claims.

    Args:
        stream: The file; its position is where the tar begins.
    """

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream = stream
        self.seek, self.tell, self.seekable = stream.seek, stream.tell, stream.seekable

    def read(self, size: int) -> bytes:
        """So many bytes, never more than `MAX_HELD_BYTES` at once."""
        if not 0 <= size <= MAX_HELD_BYTES:
            raise tarfile.ReadError(f"a header claims to have {size:,} bytes")
        return self._stream.read(size)
