"""Publish one shard exactly once: encode, check, upload, then create the commit record if absent.

The record is the only thing that makes files part of the dataset. It is written last, whole, and
only where none exists, so that of any number of attempts on a shard one wins and a crash at any
moment leaves either a complete shard or garbage. Files hold no attempt, time or host: those are
here, and two attempts on the same rows write equal bytes.

On a local disk each step is durable before the next begins, so that a power cut leaves no less:
the content of every part, then the names of all parts, then the content of the record, then its
name. That is one flush a file and one a folder, `data`, `rows`, `quarantine` and `commits`.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import CommitError, OvertakenError, StorageError
from earmill.pipeline.common.timing import (
    CHECK,
    COMMIT,
    ENCODE,
    FOR_FILES,
    HASH,
    StageTimes,
    carried,
    current,
    doing,
    in_order,
)
from earmill.pipeline.dataset.commit_record import (
    BAD_BY_CLASS,
    CommitRecord,
    commits,
    committed_shards,
    read_commit,
)
from earmill.pipeline.dataset.description import read_dataset
from earmill.pipeline.dataset.lease import UNFENCED, Fence
from earmill.pipeline.dataset.replace import check_replacement
from earmill.pipeline.dataset.row_coverage import check_rows, in_plan_order, plan_rows_covered
from earmill.pipeline.formats.digest import ShardDigest, digest_rows
from earmill.pipeline.formats.format import BINARY
from earmill.pipeline.formats.moments import shard_moments
from earmill.pipeline.formats.registry import (
    Encoding,
    format_of,
    row_table,
    write_table,
)
from earmill.pipeline.formats.row_table import quarantine_table
from earmill.pipeline.formats.rows import FeatureRow, OutFile, QuarantineRow
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_store import files_below, remove
from earmill.pipeline.storage.scratch import private_scratch

if TYPE_CHECKING:
    from amtcore.features.base import StreamInfo

T = TypeVar("T")

__all__ = [
    "CommitRecord",
    "commits",
    "committed_shards",
    "publish_shard",
    "read_commit",
    "shard_attrs",
]

_NO_SPACE = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the limit of this process or filesystem",
}


def publish_shard(
    layout: Layout,
    *,
    shard_id: str,
    attempt: str,
    plan_id: str,
    rows: Sequence[FeatureRow],
    bad: Sequence[QuarantineRow],
    streams: Sequence[StreamInfo],
    formats: Sequence[str],
    attrs: Mapping[str, Any],
    info: Mapping[str, Any],
    dtype: str = "float16",
    row_group_profile: str = "random",
    parquet_form: str = BINARY,
    plan_rows: Sequence[str] | None = None,
    extra_types: Mapping[str, Any] | None = None,
    generation: int = 0,
    folder: Path | None = None,
    stages: StageTimes | None = None,
    fence: Fence = UNFENCED,
) -> bool:
    """Write one shard and commit it; True where this attempt won, False where another one had.

    Args:
        attrs: Stored in the data files: spec_sha256, and nothing that differs between attempts.
        info: Stored in the commit record: device, versions, worker, timings_s. The CPU seconds of
            what this thread counts for join them.
        dtype: Of the job: float16, float32 or int8; the stream arrays in `rows` are so already.
        plan_rows: The shard's row ids as planned. Given, every one must be covered and the rows
            are put in that order, whatever order the batches came in.
        extra_types: Types of the carried-through columns over the whole plan.
        generation: 1 or more to replace the record of the generation before.
        folder: Where the parts are written before they are published, on the output's own disk;
            None for one of their own.
        stages: Told when the steps began and ended.
        fence: The run's right to write here; looked at before the first byte and around the record.

    Raises:
        OvertakenError: Another command has taken the output over.
        CommitError: Rows do not add up, a row that was good before is lost or has other audio, the
            disk is full, a file did not read back as written, or the upload failed. Nothing is
            committed then, and local temporaries are gone.
    """
    encoding = Encoding(dtype, row_group_profile, extra_types, attrs, parquet_form)
    shard = _Shard(layout, shard_id, attempt, encoding, stages or StageTimes(), fence)
    with _explained(shard_id, layout, fence):
        _check_extras(attrs, info)
        fence.check(layout)
        if layout.exists(paths.commit_path(shard_id, generation)):
            return False
        check_rows(rows, bad, streams, dtype=dtype, plan_rows=plan_rows)
        rows, bad = in_plan_order(rows, bad, plan_rows)
        replaces = check_replacement(layout, shard_id, generation, rows) if generation else None
        with shard.room(folder):
            digest = shard.beside(HASH, lambda: digest_rows(rows, streams, dtype))
            moments = shard.beside(CHECK, lambda: shard_moments(rows, streams))
            shard.encode(rows, bad, streams, formats, digest)
            record = CommitRecord(
                shard=shard_id,
                attempt=attempt,
                plan_id=plan_id,
                spec_sha256=attrs["spec_sha256"],
                formats=tuple(formats),
                dtype=dtype,
                **_totals(rows, bad, plan_rows, digest.result()),
                files=shard.hashed_files(),
                moments=moments.result(),
                info={**info, **_bad_by_class(bad)},
                generation=generation,
                replaces=replaces,
            )
            shard.upload(record.files)
            return shard.commit(record)


def shard_attrs(spec: Mapping[str, Any], spec_sha256: str) -> dict[str, Any]:
    """What every data file of a dataset says of its job; the same for every attempt.

    Args:
        spec: `JobSpec.canonical()`.
    """
    return {
        "spec_sha256": spec_sha256,
        "calibration": spec["audio"]["calibration"],
        "models": [entry["model"] for entry in spec["extract"]],
    }


def _check_extras(attrs: Mapping[str, Any], info: Mapping[str, Any]) -> None:
    """What cannot be stored must show before the work, not after it."""
    if not isinstance(attrs.get("spec_sha256"), str):
        raise CommitError(
            "expected the job's spec_sha256 in attrs, got none: pass JobSpec.sha256()"
        )
    json.dumps([dict(attrs), dict(info)])


def _totals(
    rows: Sequence[FeatureRow],
    bad: Sequence[QuarantineRow],
    plan_rows: Sequence[str] | None,
    digest: ShardDigest,
) -> dict[str, Any]:
    """The counted fields of a commit record."""
    return {
        "rows_ok": len(rows),
        "rows_bad": len(bad),
        "plan_rows": plan_rows_covered(rows, bad, plan_rows),
        "seconds": float(sum(row.seconds for row in rows)),
        "frames": {name: stream.frames for name, stream in digest.streams.items()},
        "values_sha256": {name: stream.sha256 for name, stream in digest.streams.items()},
    }


class _Shard:
    """One attempt on its way out: what it has written locally, uploaded, and how long it took.

    Of a job's last shard every step is waited for while the other cores idle. So what needs the
    rows or a finished part alone goes on in one thread beside the encoding.
    """

    def __init__(
        self,
        layout: Layout,
        shard_id: str,
        attempt: str,
        encoding: Encoding,
        stages: StageTimes,
        fence: Fence,
    ) -> None:
        self.layout, self.stages, self.fence = layout, stages, fence
        self.shard_id = shard_id
        self.attempt = attempt
        self.encoding = encoding
        self.folder, self.parts = Path(), dict[str, Path]()
        self._hashed: list[Future[list[OutFile]]] = []
        self.timings_s: dict[str, float] = {}

    @contextmanager
    def room(self, folder: Path | None) -> Iterator[None]:
        """Inside, parts can be written; what was not published is gone afterwards."""
        with ExitStack() as stack:
            name = f"{self.shard_id}-{self.attempt}"
            self.folder = folder or stack.enter_context(private_scratch(self.layout, name))
            stack.callback(self._remove_parts)
            self._side = ThreadPoolExecutor(1, "publish")
            stack.callback(self._side.shutdown, cancel_futures=True)
            yield

    def _remove_parts(self) -> None:
        for path in self.parts.values():
            remove(path)

    def beside(self, part: str, work: Callable[[], T]) -> Future[T]:
        """Begin work in the thread beside this one, behind what was begun there before."""

        def step() -> T:
            with self.stages.stage(part):
                return work()

        return self._side.submit(carried(part, step))

    @contextmanager
    def _timed(self, name: str, part: str, libraries: str = "") -> Iterator[None]:
        start = time.perf_counter()
        with self.stages.stage(part if part != COMMIT else name), doing(part, libraries=libraries):
            yield
        self.timings_s[name] = round(time.perf_counter() - start, 6)

    def encode(
        self,
        rows: Sequence[FeatureRow],
        bad: Sequence[QuarantineRow],
        streams: Sequence[StreamInfo],
        formats: Sequence[str],
        digest: Future[ShardDigest],
    ) -> None:
        """Write every part, and check the features."""
        with doing(ENCODE):
            scalars = row_table(rows, streams, self.encoding.extra_types)
        encoding = replace(self.encoding, scalars=scalars)
        for fmt in formats:
            chosen = format_of(fmt)
            with self._timed(f"encode_{fmt}", ENCODE, FOR_FILES):
                with self._new_part(paths.data_path, chosen.suffix) as path:
                    chosen.write(path, rows, streams, encoding)
            with self._timed(f"check_{fmt}", CHECK, FOR_FILES):
                _check_same(fmt, chosen.problems(path, rows, streams, digest.result()))
        with self._timed("encode_rows", ENCODE):
            with self._new_part(paths.rows_path) as path:
                write_table(scalars, path)
            if bad:
                with self._new_part(paths.quarantine_path) as path:
                    write_table(quarantine_table(bad), path)

    @contextmanager
    def _new_part(self, named: Callable[..., str], *more: str) -> Iterator[Path]:
        """Where a part is written, all side by side; behind it its files are hashed."""
        name = named(self.shard_id, self.attempt, *more)
        path = self.parts[name] = self.folder / name.replace("/", "-")
        yield path
        self._hashed.append(self.beside(HASH, lambda: _files_of(name, path)))

    def hashed_files(self) -> tuple[OutFile, ...]:
        """Size and sha256 of every file that was written, in the order of paths."""
        with self._timed("hash", HASH):
            found = [file for files in self._hashed for file in files.result()]
            return tuple(sorted(found, key=lambda file: file.path.split("/")))

    def upload(self, files: Sequence[OutFile]) -> None:
        """Bring every part to the output, look that it arrived in full length and settle it."""
        try:
            with self._timed("upload", COMMIT, FOR_FILES):
                for name, local in self.parts.items():
                    put = self.layout.upload_dir if local.is_dir() else self.layout.upload_file
                    put(local, name)
                self._check_sizes(files)
                self.layout.settle([*self.parts])
        except BaseException:
            self._discard()
            raise

    def _check_sizes(self, files: Sequence[OutFile]) -> None:
        arrived: dict[str, int] = {}
        for name in self.parts:
            arrived |= self.layout.sizes(name)
        for file in files:
            if arrived.get(file.path) != file.bytes:
                raise CommitError(
                    f"{file.path}: expected {file.bytes} bytes at the output, "
                    f"got {arrived.get(file.path, 'none')}"
                )

    def commit(self, record: CommitRecord) -> bool:
        """Create the record; a lost race removes this attempt's files again."""
        created = datetime.now(UTC).isoformat(timespec="milliseconds")
        timings_s = {**record.info.get("timings_s", {}), **self.timings_s}
        info = {**record.info, "timings_s": timings_s, **_cpu_so_far(), "created": created}
        text = replace(record, info=info).to_json()
        name = paths.commit_path(self.shard_id, record.generation)
        with self.stages.stage(COMMIT), doing(COMMIT):
            self._check_fence()
            created_now = self.layout.put_if_absent(name, text.encode())
        if created_now:
            self._look_again(record)
            return True
        # A PUT whose answer got lost is repeated by the client and then refused by its own effect.
        winner = read_commit(self.layout, self.shard_id, record.generation)
        if winner is not None and winner.attempt == self.attempt:
            return True
        self._discard()
        return False

    def _check_fence(self) -> None:
        """Raise OvertakenError without leaving a part at the output."""
        try:
            self.fence.check(self.layout)
        except OvertakenError:
            self._discard()
            raise

    def _look_again(self, record: CommitRecord) -> None:
        """Take the record back if this process was stopped just before its creation, and the
        record names missing files or is foreign to the dataset that is there now.

        A record whose files are whole stays: it is as good as any, and another command may have
        counted it already.
        """
        try:
            self.fence.check(self.layout)
        except OvertakenError:
            dataset = read_dataset(self.layout)
            is_known = dataset is not None and record.plan_id in dataset.plan_ids
            if not is_known or not self._is_whole(record):
                self.layout.delete(paths.commit_path(record.shard, record.generation))
                self._discard()
            raise

    def _is_whole(self, record: CommitRecord) -> bool:
        try:
            self._check_sizes(record.files)
        except CommitError:
            return False
        return True

    def _discard(self) -> None:
        """Remove uploaded parts that no commit names; what cannot be removed is mere garbage, and
        of a store that is away nothing can."""
        for name in self.parts:
            try:
                self.layout.delete(name)
            except OSError as error:
                if isinstance(error, StorageError) and error.transient:
                    return


def _cpu_so_far() -> dict[str, Any]:
    """CPU seconds of the attempt by part, up to its record."""
    tally = current()
    return {} if tally is None else {"cpu_s": in_order(tally.seconds())}


def _bad_by_class(bad: Sequence[QuarantineRow]) -> dict[str, Any]:
    """Reasons of quarantine, so that who watches need not read the tables."""
    found = Counter(row.error_class for row in bad)
    return {BAD_BY_CLASS: dict(sorted(found.items()))} if found else {}


def _check_same(fmt: str, found: Sequence[str]) -> None:
    if found:
        raise CommitError(f"the {fmt} file does not hold what was written: {'; '.join(found)}")


def _files_of(name: str, path: Path) -> list[OutFile]:
    """The files of one part."""
    if path.is_file():
        return [_out_file(path, name)]
    return [_out_file(path / rel, f"{name}/{rel}") for rel in files_below(path)]


def _out_file(path: Path, name: str) -> OutFile:
    with path.open("rb", buffering=0) as file:
        return OutFile(name, os.fstat(file.fileno()).st_size, sha256_of(file))


@contextmanager
def _explained(shard_id: str, layout: Layout, fence: Fence) -> Iterator[None]:
    """Turn whatever a disk, an encoder or a store raises into one CommitError that says why.

    Where the run was overtaken, every error is a consequence of that.
    """
    try:
        with fence.says_why(layout):
            yield
    except OvertakenError:
        raise
    except CommitError as err:
        raise CommitError(f"shard {shard_id} was not committed: {err}") from err
    except OSError as err:
        reason = _NO_SPACE.get(err.errno or 0, f"{type(err).__name__}: {err}")
        raise CommitError(
            f"shard {shard_id} was not committed: {reason} ({err.filename or layout.url()}); "
            "make room or mend the output, then run again with --resume"
        ) from err
    except Exception as err:  # a store's errors have roots of their own (botocore is no OSError)
        raise CommitError(
            f"shard {shard_id} was not committed: {type(err).__name__}: {err} ({layout.url()})"
        ) from err
