"""Compute random rows again from their source, and compare them with the stored rows: bit by bit if
device and versions are equal, else within a tolerance."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np

from earmill.pipeline.common.errors import CommitError, OutputError, SourceOutage
from earmill.pipeline.common.machine import cores
from earmill.pipeline.common.text import Shown, few
from earmill.pipeline.dataset.commit_record import CommitRecord, read_commit
from earmill.pipeline.dataset.copied_rows import stored_rows
from earmill.pipeline.dataset.description import read_description
from earmill.pipeline.dataset.snapshot import (
    Snapshot,
    good_plan_rows,
    read_snapshot,
    require_current,
)
from earmill.pipeline.formats.rows import FeatureRow
from earmill.pipeline.formats.values import INT8, dequantised
from earmill.pipeline.planning.plan import Plan
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.worker.models import warm_models
from earmill.pipeline.worker.row_pipeline import RowProcessor
from earmill.pipeline.worker.shard_runner import value_versions

# Tolerances for values that were made on another machine: two steps of float16, rounding by other
# instructions in float32. A difference is divided by the value or by the RMS of its column in the
# row, whichever is larger. In int8 a value may be a step away: divided by the column's largest.
TOLERANCE = {"float16": 2e-3, "float32": 1e-4, INT8: 1e-2}
# Share of a row's events that may differ if they were made on another machine.
EVENT_SHARE = 0.01


@dataclass(frozen=True, repr=False)
class DeepReport(Shown):
    """Result of computing rows again.

    Args:
        seed: Draws the same rows again.
        rows: Number of rows.
        equal: Rows whose values are all equal bit for bit.
        close: Rows made on another machine whose values are within the tolerance.
        worst: Largest difference of these rows, as in `TOLERANCE`.
        problems: One line for each other row: it differs, or cannot be computed any more.
    """

    seed: int
    rows: int
    equal: int
    close: int
    worst: float
    problems: tuple[str, ...] = field(default=())

    @property
    def ok(self) -> bool:
        """True if every row was computed, and none differs."""
        return not self.problems

    def shown(self) -> dict[str, str]:
        return {
            "computed again": f"{self.rows:,} rows, seed {self.seed}",
            "equal bit for bit": f"{self.equal:,}",
            "within the tolerance": f"{self.close:,}",
            "problems": few(self.problems) or "none",
        }


def verify_deep(
    layout: Layout,
    spec: JobSpec,
    rows: int,
    *,
    seed: int | None = None,
    on_begin: Callable[[str], None] = lambda text: None,
) -> DeepReport:
    """Compute random rows of the current snapshot again, and compare them with the stored rows.
    `seed` draws the rows; None draws a seed, too."""
    if rows < 1:
        raise ValueError(f"expected at least 1 row to compute again, got {rows}")
    snapshot = read_snapshot(layout, require_current(layout))
    seed = random.randrange(2**32) if seed is None else seed
    good = sorted(good_plan_rows(layout, snapshot))
    if not good:
        raise OutputError(f"{layout.url()}: expected good rows to compute again, got none")
    drawn = sorted(random.Random(seed).sample(good, min(rows, len(good))))
    on_begin("building the models")
    models = warm_models(spec, cores(), spec.run.device)
    source = open_source(spec.source, spec.audio.array_rate_hz)
    on_begin(f"computing {len(drawn):,} rows")
    differ, problems = list[float](), list[str]()
    # In child processes, because a decoder may crash, and libmpg123 prints warnings.
    apart = spec.run.model_copy(update={"decode_in_child": True})
    spec = spec.model_copy(update={"run": apart})
    processor = RowProcessor(
        spec, source, models.extractors, decode_threads=cores(), gpu=models.gpu
    )
    here = json.loads(json.dumps({"device": models.device, "versions": value_versions()}))
    with closing(processor):
        for stored, item, record in _stored(layout, snapshot, drawn):
            made, reason = dict[str, FeatureRow](), ""
            try:
                computed = processor.process([item])
                made = {row.row_id: row for row in computed.good}
                reason = "; ".join(row.message for row in computed.bad)
            except SourceOutage as error:  # a missing file looks like an outage
                reason = str(error)
            # Compared as JSON, in which the record was stored.
            exact = here == {name: record.info.get(name) for name in here}
            for row in stored:
                size, problem = _compared(row, made.get(row.row_id), reason, exact)
                if problem:
                    problems.append(problem)
                else:
                    differ.append(size)
    close = sum(size > 0 for size in differ)
    worst = max(differ, default=0.0)
    return DeepReport(seed, len(drawn), len(differ) - close, close, worst, tuple(problems))


def _stored(
    layout: Layout, snapshot: Snapshot, drawn: Sequence[str]
) -> Iterator[tuple[list[FeatureRow], Item, CommitRecord]]:
    """Yield the stored rows of each drawn row (one a channel, perhaps), its item, its commit."""
    dataset = read_description(layout, snapshot.dataset.path)
    if dataset is None:
        raise OutputError(f"{layout.url(snapshot.dataset.path)} is missing; restore it from a copy")
    wanted = frozenset(drawn)
    for shard in Plan.read(layout, PurePosixPath(snapshot.plan.path).stem).shards:
        items = [item for item in shard.items if item.row_id in wanted]
        if not items:
            continue
        record = read_commit(layout, shard.shard_id, snapshot.commits[shard.shard_id].generation)
        if record is None:
            raise CommitError(f"{layout.url()}: shard {shard.shard_id} has no commit; verify it")
        for item in items:
            yield list(stored_rows(layout, dataset, record, [item.row_id])), item, record


def _compared(
    stored: FeatureRow, now: FeatureRow | None, reason: str, exact: bool
) -> tuple[float, str]:
    """Return the difference of a stored row to the row computed now, and the problem if any."""
    named = f"row {stored.row_id!r}"
    if now is None:
        return 0.0, f"{named} cannot be computed again: {reason or 'it is gone'}"
    if now.facts.get("pcm_sha256") != stored.facts.get("pcm_sha256"):
        return 0.0, f"{named}: its audio has changed, so it is not compared"
    found = differences(stored, now)
    differing = {name: (size, most) for name, (size, most) in found.items() if size > 0}
    if not differing:
        return 0.0, ""
    worst = max(differing, key=lambda name: differing[name][0])
    size, most = differing[worst]
    if not exact and all(size <= most for size, most in differing.values()):
        return size, ""
    wanted = "bit for bit" if exact else f"within {most:g}"
    return size, (
        f"{named}, stream {worst}: expected what is computed now {wanted}, it differs by "
        f"{size:.3g}; run `earmill extract` with --resume --repair where `earmill verify` finds "
        "damage, else look at versions and devices of its commit"
    )


def differences(stored: FeatureRow, now: FeatureRow) -> dict[str, tuple[float, float]]:
    """Return stream name to the difference of two rows, and the stream's tolerance. The difference
    is 0 if the rows are equal bit for bit, and infinite if their shapes differ."""
    pairs = {name: (values, now.streams[name]) for name, values in stored.streams.items()}
    return {name: _difference(*map(np.asarray, pair)) for name, pair in pairs.items()}


def _difference(stored: Any, now: Any) -> tuple[float, float]:
    alike = stored.shape == now.shape and stored.tobytes() == now.tobytes()
    if stored.dtype == np.int32:
        # A moved event counts once.
        others = {tuple(row) for row in stored.tolist()} ^ {tuple(row) for row in now.tolist()}
        share = max(1.0, len(others) / 2) / max(1, len(stored), len(now))
        return 0.0 if alike else share, EVENT_SHARE
    most = TOLERANCE[stored.dtype.name]
    if alike or stored.shape != now.shape:
        return 0.0 if alike else float("inf"), most
    if stored.dtype.name == INT8:
        one, other = dequantised(stored), dequantised(now)
        scale = np.abs(one).max(axis=0, keepdims=True)
    else:
        one, other = stored.astype(np.float64), now.astype(np.float64)
        scale = np.maximum(np.abs(one), np.sqrt(np.mean(one**2, axis=0, keepdims=True)))
    apart = np.abs(one - other) / np.where(scale > 0, scale, 1.0)
    # 0.0 and -0.0 differ in their bits, so the difference must not be 0.
    return max(float(apart.max()), float(np.finfo(np.float64).tiny)), most
