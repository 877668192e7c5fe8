"""What a commit record says of the work on its shard, small enough to keep for every shard."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from earmill.pipeline.common.timing import PARTS
from earmill.pipeline.dataset.commit_record import BAD_BY_CLASS, CommitRecord, bad_rows
from earmill.pipeline.storage.layout import Layout


@dataclass(frozen=True, slots=True)
class ShardFacts:
    """One committed shard.

    Args:
        created_s: When it was committed, seconds since 1970, by its worker's clock.
        audio_s: Of its good rows. nbytes: Of its files. took_s: Wall time of its parts.
        worker: Host and process id. device: What computed it, in words.
        cpu_s: CPU seconds, in the order of `common.timing.PARTS`; empty in records of earlier
            releases.
        bad_by_class: Quarantined rows by reason. quarantine: Path of their table; None for none.
    """

    created_s: float
    rows_ok: int
    rows_bad: int
    audio_s: float
    nbytes: int
    took_s: float
    worker: tuple[str, int]
    device: str
    cpu_s: tuple[float, ...]
    bad_by_class: dict[str, int]
    quarantine: str | None


def shard_facts(layout: Layout, record: CommitRecord) -> ShardFacts:
    """Of one record; its quarantine table is read where an earlier release did not count reasons.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: `record.info` is none of ours.
    """
    info = record.info
    worker, device = info.get("worker", {}), info.get("device", {})
    if isinstance(worker, str):
        worker = {"host": worker}
    reasons = info.get(BAD_BY_CLASS)
    if record.rows_bad and reasons is None:
        reasons = Counter(bad_rows(layout, record)["error_class"].to_pylist())
    return ShardFacts(
        created_s=datetime.fromisoformat(info["created"]).timestamp(),
        rows_ok=record.rows_ok,
        rows_bad=record.rows_bad,
        audio_s=record.seconds,
        nbytes=record.nbytes,
        took_s=float(sum(info.get("timings_s", {}).values())),
        worker=(str(worker.get("host")), int(worker.get("pid", 0))),
        device=device if isinstance(device, str) else _named(device),
        cpu_s=_by_part(info.get("cpu_s")),
        bad_by_class=dict(reasons or {}),
        quarantine=record.path("quarantine"),
    )


def _by_part(cpu_s: Mapping[str, float] | None) -> tuple[float, ...]:
    return tuple(float(cpu_s.get(part, 0.0)) for part in PARTS) if cpu_s else ()


def _named(device: Mapping[str, object]) -> str:
    kind, name = device.get("device"), device.get("name")
    return ": ".join(str(text) for text in (kind, name) if text)


def count_reasons(facts: Iterable[ShardFacts]) -> dict[str, int]:
    """Quarantined rows of all these shards by reason, most frequent first."""
    found = Counter[str]()
    for one in facts:
        found.update(one.bad_by_class)
    return dict(found.most_common())
