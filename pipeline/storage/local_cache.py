"""Parts of remote files on a local disk, each fetched once by the process that needs it first.

    folder/lock                 locked while files are counted or renamed
    folder/used                 bytes reserved so far, as text; counted again if it is missing
    folder/ab/abcd...-12        part 12 of the file whose sha256 is abcd...

    part = mark size crc*16 crc content      size, crc: four bytes, little endian; a CRC-32C of each
                                             page of content, then one of the header before it

A part is looked up by the sha256 that a commit names, so it cannot be stale. It gets its name when
it is complete. Every read is checked, and a damaged part is fetched again. Bytes are reserved
before they are written, so the parts never exceed the limit, however many processes write; the
parts used longest ago are removed first. A full disk costs a warning and the cache, never a row.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import stat
import struct
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from threading import Lock

import google_crc32c
import numpy as np
from numpy.typing import NDArray

from earmill.pipeline.common.errors import OutputError

Bytes = NDArray[np.uint8]
Fetch = Callable[[int, int], Bytes]  # Takes the first byte of a range and its length.

MARK = b"EMLC"
PAGE_BYTES, PAGES = 2**18, 16
PART_BYTES = PAGES * PAGE_BYTES
HEAD = struct.Struct(f"<4sI{PAGES}I")
HEAD_BYTES = HEAD.size + 4
# Threads that need the same part wait for one to fetch it; parts share this many locks.
LOCKS = 64
# Room is made for more than the next part, so that files are not listed for each part.
LEAVE = 0.9
ABANDONED_S = 3600.0  # A temporary file older than this was left by a killed process.
UNFINISHED = ".tmp"


class LocalCache:
    """A folder with parts of remote files, of `max_bytes` at most; threads and processes share it.
    OutputError for a folder that other users can write to: they could give us other features."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes
        self._locks = [Lock() for _ in range(LOCKS)]
        self._giving_up = Lock()
        self._off = False
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        known = folder.stat()
        if known.st_uid != os.getuid() or stat.S_IMODE(known.st_mode) & 0o022:
            raise OutputError(
                "expected a folder for the local cache that only its owner writes into, "
                f"{folder} is {stat.filemode(known.st_mode)} of user {known.st_uid}; name another, "
                "or chmod 700 it"
            )

    def read(self, sha256: str, nbytes: int, start: int, length: int, fetch: Fetch) -> Bytes:
        """Return bytes [start, start + length) of a file of `nbytes` bytes. `fetch` returns the
        bytes that are not in the cache; if it returns fewer, fewer are returned."""
        if self._off or not length:
            return fetch(start, length)
        found = np.empty(length, np.uint8)
        needed = range(start // PART_BYTES, -(-(start + length) // PART_BYTES))
        with ExitStack() as stack:
            for index in sorted({hash((sha256, number)) % LOCKS for number in needed}):
                stack.enter_context(self._locks[index])
            missing = [n for n in needed if not self._load(sha256, n, start, found)]
            # Neighbouring parts are fetched together.
            ends = np.flatnonzero(np.diff(missing) != 1) + 1
            for run in np.split(np.array(missing, np.int64), ends) if missing else ():
                if not self._fetch(sha256, nbytes, run.tolist(), start, found, fetch):
                    return fetch(start, length)
        return found

    def _fetch(
        self, sha256: str, nbytes: int, run: Sequence[int], start: int, into: Bytes, fetch: Fetch
    ) -> bool:
        """Fetch neighbouring parts and keep them; False where the file is shorter than it was."""
        first = run[0] * PART_BYTES
        wanted = min(nbytes, (run[-1] + 1) * PART_BYTES) - first
        content = fetch(first, wanted)
        if len(content) != wanted:
            return False
        low, high = max(start, first), min(start + len(into), first + wanted)
        into[low - start : high - start] = content[low - first : high - first]
        for number in run:
            part = content[number * PART_BYTES - first :][:PART_BYTES]
            try:
                self._keep(sha256, number, part)
            except OSError as error:
                self._give_up(error)
        return True

    def _load(self, sha256: str, number: int, start: int, into: Bytes) -> bool:
        """Copy the bytes needed of a part; return False where it is missing or damaged."""
        path, begin = self.folder / sha256[:2] / f"{sha256}-{number}", number * PART_BYTES
        low, high = max(start, begin), min(start + len(into), begin + PART_BYTES)
        try:
            handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return False
        try:
            with suppress(OSError):
                content = _checked(handle, low - begin, high - begin)
                if content is not None:
                    into[low - start : high - start] = content
                    os.utime(handle)
                    return True
        finally:
            os.close(handle)
        with suppress(OSError):
            path.unlink()
        return False

    def _keep(self, sha256: str, number: int, part: Bytes) -> None:
        """Store a part, if it fits into the cache."""
        nbytes = HEAD_BYTES + len(part)
        if self._off or nbytes > self.max_bytes:
            return
        path = self.folder / sha256[:2] / f"{sha256}-{number}"
        path.parent.mkdir(mode=0o700, exist_ok=True)
        aside = path.with_name(f"{path.name}-{secrets.token_hex(4)}{UNFINISHED}")
        try:
            if self._reserve(aside, nbytes):
                pages = range(0, PART_BYTES, PAGE_BYTES)
                crcs = [google_crc32c.value(part[k : k + PAGE_BYTES]) for k in pages]
                head = HEAD.pack(MARK, len(part), *crcs)
                with aside.open("r+b") as file:
                    file.write(head + google_crc32c.value(head).to_bytes(4, "little"))
                    file.write(part.data)
                with self._locked():  # a count could miss the file between its names
                    aside.rename(path)
        except OSError:
            with suppress(OSError):
                aside.unlink()
            raise

    def _reserve(self, path: Path, nbytes: int) -> bool:
        """Reserve bytes by a file of this size; False if unfinished files fill the cache."""
        with self._locked():
            counted = self.folder / "used"
            try:
                used = int(counted.read_text())
            except (OSError, ValueError):
                used = sum(size for _, size, _ in self._files())
            if used + nbytes > self.max_bytes:
                files = sorted(self._files())
                used = sum(size for _, size, _ in files)
                for _, size, part in files:
                    if used + nbytes <= int(LEAVE * self.max_bytes):
                        break
                    if part.suffix != UNFINISHED:
                        part.unlink(missing_ok=True)
                        used -= size
            if used + nbytes > self.max_bytes:
                return False
            counted.write_text(str(used + nbytes))
            path.touch(mode=0o600, exist_ok=False)
            os.truncate(path, nbytes)
        return True

    def _files(self) -> Iterator[tuple[float, int, Path]]:
        """Yield when each part was used last, its bytes and its path."""
        for path in self.folder.glob("??/*"):
            with suppress(OSError):
                known = path.stat()
                if path.suffix == UNFINISHED and known.st_mtime < time.time() - ABANDONED_S:
                    path.unlink()
                else:
                    yield known.st_mtime, known.st_size, path

    @contextmanager
    def _locked(self) -> Iterator[None]:
        handle = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)

    def _give_up(self, error: OSError) -> None:
        with self._giving_up:
            told, self._off = self._off, True
        if not told:
            text = f"the local cache at {self.folder} is not used any more: {error}"
            text += "; features are fetched from their store"
            warnings.warn(text, RuntimeWarning, stacklevel=2)


def _checked(handle: int, low: int, high: int) -> Bytes | None:
    """Return bytes [low, high) of the content of a part; None where the part is damaged."""
    head = os.pread(handle, HEAD_BYTES, 0)
    if google_crc32c.value(head[:-4]) != int.from_bytes(head[-4:], "little"):
        return None
    if len(head) < HEAD_BYTES:
        return None
    mark, size, *crcs = HEAD.unpack(head[:-4])
    if mark != MARK or high > size:
        return None
    first, last = low // PAGE_BYTES, -(-high // PAGE_BYTES)
    begin, end = first * PAGE_BYTES, min(last * PAGE_BYTES, size)
    content = np.empty(end - begin, np.uint8)
    if os.preadv(handle, [content.data], HEAD_BYTES + begin) != len(content):
        return None
    for number, page in enumerate(range(0, len(content), PAGE_BYTES), first):
        if google_crc32c.value(content[page : page + PAGE_BYTES]) != crcs[number]:
            return None
    return content[low - begin : high - begin]
