"""Publish one shard exactly once: encode, check, upload, then create the commit record if absent.

Only the record makes files part of the dataset, so one of several attempts on a shard wins, and a
crash leaves either a complete shard or garbage. The files have no attempt, time or host, so two
attempts on the same rows write equal bytes. On a local disk each step is durable before the next,
so that a power cut loses no committed shard: the content of every part, the names of all parts, the
content of the record, its name. A commit that would lose good rows of the record it replaces, or
their audio, is refused.
"""

from __future__ import annotations

import errno
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import pyarrow as pa

from amtcore.features.stream_info import StreamInfo
from earmill.pipeline.common import monitoring
from earmill.pipeline.common.byte_streams import sha256_of
from earmill.pipeline.common.errors import CommitError, OvertakenError, StorageError
from earmill.pipeline.dataset.commit_record import (
    BAD_BY_CLASS,
    CommitRecord,
    plan_row_of,
    read_commit,
    row_problems,
    some,
)
from earmill.pipeline.dataset.description import DatasetFile, read_dataset
from earmill.pipeline.dataset.driver_lock import UNFENCED, Fence
from earmill.pipeline.formats.digest import ShardDigest, digest_rows
from earmill.pipeline.formats.format import Encoding, format_of
from earmill.pipeline.formats.moments import shard_moments
from earmill.pipeline.formats.row_table import quarantine_table, row_table, write_table
from earmill.pipeline.formats.rows import FeatureRow, OutFile, QuarantineRow
from earmill.pipeline.formats.stream_layout import layout_of
from earmill.pipeline.storage import paths
from earmill.pipeline.storage.documents import read_table
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.local_store import files_below, remove
from earmill.pipeline.storage.scratch import private_scratch

T = TypeVar("T")

# Facts about the audio of a row, which a commit that replaces another does not change.
AUDIO = ("pcm_sha256", "rate_hz", "channels", "reference_pcm_sha256")
_NO_SPACE = {
    errno.ENOSPC: "no space left on the device",
    errno.EDQUOT: "the disk quota is used up",
    errno.EFBIG: "the file would be larger than the limit of this process or filesystem",
}


def check_replacement(
    layout: Layout, shard_id: str, generation: int, rows: Sequence[FeatureRow]
) -> str | None:
    """Refuse rows that lose good rows or audio of the record they replace; return its attempt."""
    try:
        before = read_commit(layout, shard_id, generation - 1)
    except CommitError:
        return None  # the record is damaged
    if before is None:
        raise CommitError(
            f"expected {paths.commit_path(shard_id, generation - 1)}, which this attempt "
            "replaces, got none; run `earmill extract` with --resume"
        )
    try:
        table = read_table(layout, str(before.path("rows")), ["row_id", *AUDIO])
        audio = {row.pop("row_id"): row for row in table.to_pylist()}
    except (OSError, KeyError, pa.ArrowException):  # the table of rows is damaged as well
        if len(rows) < before.rows_ok:
            raise CommitError(
                f"{before.rows_ok} rows were good, now {len(rows)} are; the commit stays as it is"
            ) from None
        return before.attempt
    now = {row.row_id: row.facts for row in rows}
    if lost := set(audio) - set(now):
        raise CommitError(
            f"good before, not any more: {some(lost)}; the commit stays as it is: make the source "
            "readable and run this again"
        )
    changed = [
        row_id
        for row_id, facts in audio.items()
        if any(was is not None and now[row_id].get(name) != was for name, was in facts.items())
    ]
    if changed:
        raise CommitError(
            f"the audio has changed since: {some(changed)}; the commit stays as it is: restore the "
            "source, or extract it into another output"
        )
    return before.attempt


def publish_shard(
    layout: Layout,
    dataset: DatasetFile,
    *,
    shard_id: str,
    attempt: str,
    rows: Sequence[FeatureRow],
    bad: Sequence[QuarantineRow],
    info: Mapping[str, Any],
    plan_rows: Sequence[str],
    generation: int = 0,
    folder: Path | None = None,
    stages: monitoring.StageTimes | None = None,
    fence: Fence = UNFENCED,
) -> bool:
    """Write one shard of a dataset and commit it; False if another attempt has won. All of
    `plan_rows` must be covered; rows are put in this order, then by channel. The commit record
    stores `info`. A `generation` from 1 on replaces the record before. Parts are written to
    `folder` first, on the output's own disk; None is a new folder.

    Raises:
        OvertakenError: Another command has taken the output over.
        CommitError: Rows do not add up, a good row is lost or has other audio, the disk is full, a
            file did not read back as written, or the upload failed. Nothing is committed then.
    """
    shard = _Shard(layout, shard_id, attempt, stages or monitoring.StageTimes(), fence)
    with _explained(shard_id, layout, fence):
        json.dumps(dict(info))  # what cannot be stored fails before the work
        fence.check(layout)
        if layout.exists(paths.commit_path(shard_id, generation)):
            return False
        dtype, formats = (dataset.spec["output"][name] for name in ("dtype", "formats"))
        streams = [StreamInfo.from_dict(info) for info in dataset.streams]
        check_rows(rows, bad, streams, dtype, plan_rows)
        position = {row_id: number for number, row_id in enumerate(plan_rows)}
        rows = sorted(rows, key=lambda row: (position[row.plan_row_id], row.channel))
        bad = sorted(bad, key=lambda r: (position[plan_row_of(r.row_id, position)], r.row_id))
        replaces = check_replacement(layout, shard_id, generation, rows) if generation else None
        with shard.room(folder):
            digest = shard.beside("hash", lambda: digest_rows(rows, streams, dtype))
            moments = shard.beside("check", lambda: shard_moments(rows, streams))
            shard.encode(rows, bad, streams, dataset, digest)
            by_stream = digest.result().streams
            reasons = Counter(row.error_class for row in bad)
            record = CommitRecord(
                shard=shard_id,
                attempt=attempt,
                plan_id=dataset.plan_id,
                spec_sha256=dataset.spec_sha256,
                formats=tuple(formats),
                dtype=dtype,
                rows_ok=len(rows),
                rows_bad=len(bad),
                plan_rows=len(position),
                seconds=float(sum(row.seconds for row in rows)),
                frames={name: stream.frames for name, stream in by_stream.items()},
                values_sha256={name: stream.sha256 for name, stream in by_stream.items()},
                files=shard.hashed_files(),
                moments=moments.result(),
                # `earmill watch` need not read the quarantine tables then.
                info={**info, **({BAD_BY_CLASS: dict(sorted(reasons.items()))} if bad else {})},
                generation=generation,
                replaces=replaces,
            )
            shard.upload(record.files)
            return shard.commit(record)


def check_rows(
    rows: Sequence[FeatureRow],
    bad: Sequence[QuarantineRow],
    streams: Sequence[StreamInfo],
    dtype: str,
    plan_rows: Sequence[str],
) -> None:
    """Refuse rows that do not add up or do not fit their streams, before anything is written."""
    layouts = [layout_of(info) for info in streams]
    named = {layout.name for layout in layouts}
    counted = {layout.name for layout in layouts if layout.row_counts}
    for row in rows:
        if set(row.streams) != named:
            raise CommitError(
                f"row {row.row_id!r}: expected the streams {sorted(named)}, got "
                f"{sorted(row.streams)}"
            )
        if set(row.steps) != counted:
            raise CommitError(
                f"row {row.row_id!r}: expected the steps of {sorted(counted)}, got those of "
                f"{sorted(row.steps)}"
            )
        for layout in layouts:
            layout.check(row, dtype)
    pairs = [(row.row_id, row.plan_row_id) for row in rows]
    if problems := row_problems(pairs, [row.row_id for row in bad], plan_rows):
        raise CommitError("; ".join(problems))


def encoding_of(dataset: DatasetFile) -> Encoding:
    """Return the settings of a dataset's files, which all attempts on its shards share."""
    spec, output = dataset.spec, dataset.spec["output"]
    return Encoding(
        dtype=output["dtype"],
        row_group_profile=output["row_group_profile"],
        extra_types=dataset.extra_types or None,
        attrs={
            "spec_sha256": dataset.spec_sha256,
            "calibration": spec["audio"]["calibration"],
            "models": [entry["model"] for entry in spec["extract"]],
        },
        parquet_form=dataset.parquet_form,
    )


@dataclass
class _Shard:
    """One attempt to publish. Steps that need only the rows or a finished part run in a thread
    beside the encoding, because other cores idle while a job's last shard is published."""

    layout: Layout
    shard_id: str
    attempt: str
    stages: monitoring.StageTimes
    fence: Fence
    folder: Path = Path()
    parts: dict[str, Path] = field(default_factory=dict)  # Finished parts, by their final path.
    hashed: list[Future[list[OutFile]]] = field(default_factory=list)
    timings_s: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def room(self, folder: Path | None) -> Iterator[None]:
        with ExitStack() as stack:
            name = f"{self.shard_id}-{self.attempt}"
            self.folder = folder or stack.enter_context(private_scratch(self.layout, name))
            self._side = ThreadPoolExecutor(1, "publish")
            try:
                yield
            finally:
                self._side.shutdown(cancel_futures=True)
                for path in self.parts.values():
                    remove(path)

    def beside(self, part: monitoring.Part, work: Callable[[], T]) -> Future[T]:
        return self._side.submit(monitoring.carried(part, self.stages.stage(part)(work)))

    @contextmanager
    def _timed(
        self, name: str, part: monitoring.Part, libraries: monitoring.Libraries = ""
    ) -> Iterator[None]:
        start = time.perf_counter()
        with (
            self.stages.stage(part if part != "commit" else name),
            monitoring.doing(part, libraries=libraries),
        ):
            yield
        self.timings_s[name] = round(time.perf_counter() - start, 6)

    def encode(
        self,
        rows: Sequence[FeatureRow],
        bad: Sequence[QuarantineRow],
        streams: Sequence[StreamInfo],
        dataset: DatasetFile,
        digest: Future[ShardDigest],
    ) -> None:
        encoding = encoding_of(dataset)
        for fmt in dataset.spec["output"]["formats"]:
            chosen = format_of(fmt)
            with self._timed(f"encode_{fmt}", "encode", "files"):
                with self._new_part(paths.data_path, chosen.suffix) as path:
                    chosen.write(path, rows, streams, encoding)
            with self._timed(f"check_{fmt}", "check", "files"):
                problems = chosen.problems(path, rows, streams, digest.result())
                if problems:
                    raise CommitError(
                        f"the {fmt} file does not hold what was written: {'; '.join(problems)}"
                    )
        with self._timed("encode_rows", "encode"):
            with self._new_part(paths.rows_path) as path:
                write_table(row_table(rows, streams, encoding.extra_types), path)
            if bad:
                with self._new_part(paths.quarantine_path) as path:
                    write_table(quarantine_table(bad), path)

    @contextmanager
    def _new_part(self, named: Callable[..., str], *more: str) -> Iterator[Path]:
        """Yield the place of a part, whose files are hashed afterwards."""
        name = named(self.shard_id, self.attempt, *more)
        path = self.parts[name] = self.folder / name.replace("/", "-")
        yield path
        self.hashed.append(self.beside("hash", lambda: _files_of(name, path)))

    def hashed_files(self) -> tuple[OutFile, ...]:
        with self._timed("hash", "hash"):
            found = [file for files in self.hashed for file in files.result()]
            return tuple(sorted(found, key=lambda file: file.path.split("/")))

    def upload(self, files: Sequence[OutFile]) -> None:
        """Bring every part to the output, check its length there, and make it durable."""
        try:
            with self._timed("upload", "commit", "files"):
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
        tally = monitoring.current()
        info = {
            **record.info,
            "timings_s": {**record.info.get("timings_s", {}), **self.timings_s},
            # CPU seconds of the attempt, up to its record.
            **({} if tally is None else _cpu_info(tally)),
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        text = replace(record, info=info).to_json()
        name = paths.commit_path(self.shard_id, record.generation)
        with self.stages.stage("commit"), monitoring.doing("commit"):
            try:
                self.fence.check(self.layout)
            except OvertakenError:
                self._discard()
                raise
            created_now = self.layout.create_own(name, text.encode())
        if not created_now:
            self._discard()
            return False
        try:
            self.fence.check(self.layout)
        except OvertakenError:
            self._take_back(record)
            raise
        return True

    def _take_back(self, record: CommitRecord) -> None:
        """Delete the record of an overtaken run, unless its files are whole and the dataset is the
        same: another command may have counted it already."""
        dataset = read_dataset(self.layout)
        if dataset is not None and record.plan_id in dataset.plan_ids:
            with suppress(CommitError):
                self._check_sizes(record.files)
                return
        self.layout.delete(paths.commit_path(record.shard, record.generation))
        self._discard()

    def _discard(self) -> None:
        for name in self.parts:
            try:
                self.layout.delete(name)
            except OSError as error:
                if isinstance(error, StorageError) and error.transient:
                    return  # from a store that is away nothing can be removed


def _cpu_info(tally: monitoring.CpuSeconds) -> dict[str, dict[str, float]]:
    by_part, by_model = tally.seconds(), tally.of_models()
    info = {"cpu_s": monitoring.in_order(by_part)}
    # One model has the whole part `model`.
    return info | ({"model_cpu_s": monitoring.in_order(by_model)} if len(by_model) > 1 else {})


def _files_of(name: str, path: Path) -> list[OutFile]:
    files = {name: path}
    if path.is_dir():
        files = {f"{name}/{rel}": path / rel for rel in files_below(path)}
    found = []
    for each, local in files.items():
        with local.open("rb", buffering=0) as file:
            found.append(OutFile(each, os.fstat(file.fileno()).st_size, sha256_of(file)))
    return found


@contextmanager
def _explained(shard_id: str, layout: Layout, fence: Fence) -> Iterator[None]:
    """Turn any error of a disk, an encoder or a store into a CommitError with the cause, or into an
    OvertakenError, of which every other error is a consequence."""
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
