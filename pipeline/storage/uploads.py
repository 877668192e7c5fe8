"""How large files go to a store: in parts, few at a time, so that memory does not grow with a file.

The clients take a file apart themselves, and give up a begun upload when a part of it fails for
good, so that nothing of it stays. What a killed process had begun is no object, and shows in no
listing; S3 keeps its parts until a lifecycle rule of the bucket removes them, Google and Azure for
a week.
"""

from __future__ import annotations

from typing import Any

# A multiple of 256 KiB, as Google asks; 10,000 of them, which is the most on S3, are 160 GiB.
PART_BYTES = 16 << 20
PARTS_AT_ONCE = 4
# Of a folder; each has as many parts under way.
FILES_AT_ONCE = 4


def protocols(fs: Any) -> frozenset[str]:
    """The schemes that a filesystem answers to."""
    return frozenset({fs.protocol} if isinstance(fs.protocol, str) else fs.protocol)


def in_parts(fs: Any) -> dict[str, Any]:
    """What `put_file` of this filesystem is to be told; memory is bounded by its product."""
    names = protocols(fs)
    if "s3" in names:
        return {"chunksize": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
    if "gs" in names:  # one part after the other
        return {"chunksize": PART_BYTES}
    # Azure's client has parts of 4 MiB.
    return {"max_concurrency": PARTS_AT_ONCE} if "abfs" in names else {}
