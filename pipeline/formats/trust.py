"""What a data file claims, held against what the commit says, before anything is allotted or run.

A dataset may be somebody else's. A reader believes dataset.json and the commits as far as they
agree with each other; a store or file that claims other sizes, another type or a codec that our
writers never use is refused, not opened to see what happens. What that means for a format is beside
its reader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pyarrow as pa

from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import CommitError, MissingPackageError
from earmill.pipeline.common.missing_modules import missing_package
from earmill.pipeline.common.text import named_line
from earmill.pipeline.formats.rows import OutFile
from earmill.pipeline.storage.layout import Layout


@dataclass(frozen=True, slots=True)
class RowsSaid:
    """The good rows of a shard in the table of all, without a copy, also in a pickle of both.

    Args:
        first, count: Where they lie in it.
    """

    table: pa.Table
    first: int
    count: int

    def column(self, name: str) -> pa.ChunkedArray:
        """A column of these rows."""
        return self.table.column(name).slice(self.first, self.count)


@dataclass(frozen=True)
class Promise:
    """What commit and dataset.json say of one data file.

    Args:
        rows: Good rows of the shard.
        frames: Stream name to frames in the shard.
        columns: Stream name to (width, dtype name) on disk.
        files: Every file of the shard by its path.
        said: What the index says of the shard's rows, None where there is none. Nothing of it is
            believed before it is shown to be what was committed.
        reads: Streams that are read; of others nothing is fetched before it is asked for.
    """

    rows: int
    frames: Mapping[str, int]
    columns: Mapping[str, tuple[int, str]]
    files: Mapping[str, OutFile]
    said: RowsSaid | None = field(default=None, compare=False)
    reads: Sequence[str] = field(default=(), compare=False)


@contextmanager
def named_damage(
    where: str, file: str, is_whole: Callable[[], bool] = lambda: False
) -> Iterator[None]:
    """Turn whatever damaged bytes make a decoder raise into one line that names row and file.

    What the system says of a file (no right, no network) passes as it is; a missing file does not.
    Nor are too little memory, a module that is not installed, or a fault of a program damage.

    Args:
        where: The row.
        file: The file, for the message.
        is_whole: Tells whether the file holds the bytes that were committed; asked where a decoder
            fails in a way that a fault of a program may cause as well.
    """
    try:
        yield
    except CommitError as err:
        raise CommitError(f"{where}: {err}") from err
    except MissingPackageError as err:
        raise MissingPackageError(f"{where}: {err}") from err
    except ImportError as err:
        raise missing_package(err, where) from err
    except MemoryError:
        raise
    # Decoders have classes of their own for damaged bytes.
    except Exception as err:
        told = isinstance(err, OSError) and err.errno is not None
        if told and not isinstance(err, FileNotFoundError):
            raise
        if is_whole():
            raise CommitError(
                f"{where}: {file} holds what was committed, yet it cannot be read here "
                f"({named_line(err)}); this is a fault of a program, not of the file: run `earmill "
                "doctor`, and report it"
            ) from err
        raise CommitError(
            f"{where}: {file} is missing or damaged although it is committed "
            f"({named_line(err)}); run `earmill verify`"
        ) from err


def is_as_committed(layout: Layout, rel: str, promise: Promise) -> bool:
    """Return True if the files of a shard in one format hold the committed bytes."""
    named = [file for path, file in promise.files.items() if f"{path}/".startswith(f"{rel}/")]
    try:
        for file in named:
            with layout.open_file(file.path) as stream:
                if sha256_of(stream) != file.sha256:
                    return False
    except (OSError, ValueError):
        return False
    return bool(named)


def refused(place: str, why: str) -> CommitError:
    return CommitError(
        f"{place}: {why}; the file is damaged or not what was committed: run `earmill verify`"
    )
