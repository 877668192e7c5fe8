"""Disturbed runs by the dozen, and a table of how they went.

    python -m tests.chaos.many --seed 0 --count 50

One line says what a seed draws, one how it went; exit code 1 where one is broken. What a broken run
has left lies in the folder that is printed.
"""

from __future__ import annotations

import argparse
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from earmill.pipeline.storage.layout import Layout
from tests.chaos.disturbed_run import DisturbedRun, Outcome
from tests.chaos.oracle import differences
from tests.chaos.schedule import Schedule, draw
from tests.chaos.world import World, world

SHARDS = 13


def disturb(
    where: World, schedule: Schedule, folder: Path, say: Callable[[str], None] = lambda text: None
) -> Outcome:
    """One run and the comparison of what came out."""
    say(f"seed {schedule.seed}: {schedule.describe()}")
    reference = where.reference(schedule.source)
    options = None if schedule.output == "local" else where.options

    def compare(output: str) -> list[str]:
        if options is not None:
            output = fetched(Layout.open(output, options), folder / "fetched")
        return differences(Layout.open(output), reference)

    outcome = DisturbedRun(where, schedule, folder).run(compare)
    say(f"seed {schedule.seed}: {outcome.line()} ({outcome.seconds:.0f} s)")
    return outcome


def fetched(stored: Layout, folder: Path) -> str:
    """A copy of an output on this machine, which is read several times; by the ways of a job, with
    its retries: its server still fails now and then."""
    for name in stored.everything():
        place = folder / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(stored.read_bytes(name))
    return str(folder)


def table(outcomes: Sequence[Outcome]) -> str:
    """All runs by executor, source and output, and the sums."""
    rows = [("executor", "source", "output", "runs", "starts", "faults met", "seconds", "broken")]
    keys = [(o.schedule.executor, o.schedule.source, o.schedule.output) for o in outcomes]
    for key in [*sorted(set(keys)), None]:
        some = [o for o, own in zip(outcomes, keys, strict=True) if key in (own, None)]
        rows.append(
            (
                *(key or ("all", "", "")),
                str(len(some)),
                str(sum(len(o.starts) for o in some)),
                f"{sum(o.met for o in some)} of {sum(o.drawn for o in some)}",
                f"{sum(o.seconds for o in some):.0f}",
                str(sum(bool(o.problems) for o in some)),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]
    kinds = Counter(p.what for o in outcomes for p in o.schedule.processes)
    kinds += Counter(
        r.kind for o in outcomes for r in (*o.schedule.source_rules, *o.schedule.output_rules)
    )
    kinds["full disk"] = sum(o.schedule.disk_shards is not None for o in outcomes)
    drawn = ", ".join(f"{name} {count}" for name, count in kinds.most_common() if count)
    return "\n".join([*lines, f"drawn: {drawn}"])


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="the first")
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--draw", action="store_true", help="say what is drawn, and do nothing")
    wanted = parser.parse_args()
    schedules = [draw(wanted.seed + n, SHARDS) for n in range(wanted.count)]
    if wanted.draw:
        print(*(f"seed {one.seed}: {one.describe()}" for one in schedules), sep="\n")
        return 0
    # What a run has started and mounted goes whoever ends this.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    folder = Path(tempfile.mkdtemp(prefix="earmill-chaos-"))
    outcomes = []
    with world(folder / "world") as where:
        for one in schedules:
            place = folder / f"seed-{one.seed}"
            outcomes.append(disturb(where, one, place, lambda text: print(text, flush=True)))
            if not outcomes[-1].problems:
                shutil.rmtree(place)
    print(table(outcomes))
    if any(one.problems for one in outcomes):
        print(f"what broken runs have left: {folder}")
        return 1
    shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
