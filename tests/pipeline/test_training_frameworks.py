"""Lightning, accelerate, transformers, torchrun: the real packages, as their users write them.

Every run is a process of its own, or two ranks with gloo, forked from one that has imported the
packages: `tests.pipeline.framework_runs`.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from earmill import open_features
from tests.pipeline.framework_runs import SEED
from tests.pipeline.reader_data import ids, write_set
from tests.short import only, spread

# Not a multiple of 2 x 4: one row is left for two ranks with batches of 4.
N_ROWS = 25
EPOCHS = 2
Seen = list[list[int]]
DEALT = {"dispatch_batches": False}
ROWS: dict[str, Any] = {"kind": "rows", "dispatch": False, "workers": 1}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """25 short rows in 4 shards, with whole numbers as labels."""
    path = tmp_path_factory.mktemp("frameworks") / "features"
    write_set(path, n_rows=N_ROWS, rows_per_shard=7, finalised=True)
    return path


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


COMMAND = [sys.executable, "-m", "tests.pipeline.framework_runs"]
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}


class Runs:
    """Runs over a feature set, in children of one process that has imported the packages."""

    def __init__(self, place: Path, out: Path) -> None:
        self.place, self._out, self._count = place, out, 0
        self._server = subprocess.Popen(
            COMMAND,
            env=os.environ | ENVIRONMENT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
            text=True,
        )

    def __call__(self, name: str, *, ranks: int = 1, **options: Any) -> list[Seen]:
        """Return the row positions of each epoch, for each rank. RuntimeError if a rank failed."""
        out = self._folder()
        known = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_PORT": free_port()}
        known |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "test", "GROUP_RANK": 0}
        each = [known | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)]
        environments = [{k: str(v) for k, v in of.items()} for of in each] if ranks > 1 else [{}]
        arguments = [name, str(self.place), str(out), json.dumps(options)]
        assert self._server.stdin is not None and self._server.stdout is not None
        self._server.stdin.write(json.dumps([arguments, environments]) + "\n")
        self._server.stdin.flush()
        codes = json.loads(self._server.stdout.readline())
        if any(codes):
            raise RuntimeError("\n".join(path.read_text() for path in out.glob("*.log")))
        return self._seen(out)

    def alone(self, name: str, **options: Any) -> list[Seen]:
        """Run a script as a user starts it; it may start ranks itself."""
        out = self._folder()
        arguments = [name, str(self.place), str(out), json.dumps(options)]
        subprocess.run([*COMMAND, *arguments], env=os.environ | ENVIRONMENT, check=True)
        return self._seen(out)

    def close(self) -> None:
        """End the process, and what it has forked."""
        os.killpg(self._server.pid, signal.SIGKILL)
        self._server.communicate()

    def _folder(self) -> Path:
        self._count += 1
        out = self._out / str(self._count)
        out.mkdir()
        return out

    def _seen(self, out: Path) -> list[Seen]:
        return [json.loads(path.read_text()) for path in sorted(out.glob("*.json"))]


@pytest.fixture(scope="module")
def run(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    runs = Runs(place, tmp_path_factory.mktemp("runs"))
    yield runs
    runs.close()


def share(place: Path, rank: int, world_size: int, epoch: int, **options: Any) -> list[int]:
    """Return the rows of a rank in an epoch, read by a stream with given numbers."""
    even = {} if world_size == 1 else {"even": "pad"}
    chosen = {"seed": SEED, "epoch": epoch, "batch_size": 4, **even, **options}
    stream = open_features(place).iterable(rank=rank, world_size=world_size, **chosen)
    return ids(stream)


def check_shares(place: Path, seen: list[Seen], **options: Any) -> None:
    """Each rank had its share of each epoch, all ranks as many rows, and each row was seen."""
    for epoch in range(EPOCHS):
        shares = [share(place, rank, len(seen), epoch, **options) for rank in range(len(seen))]
        assert [each[epoch] for each in seen] == shares
    check_once(seen)


def check_once(seen: list[Seen], repeated: int = 1) -> None:
    """Check that each epoch has every row, `repeated` of them twice, and ranks equally many."""
    for epoch in range(EPOCHS):
        counts = Counter(row for rank in seen for row in rank[epoch])
        assert set(counts) == set(range(N_ROWS))
        assert counts.total() - N_ROWS == (0 if len(seen) == 1 else repeated)
        assert len({len(rank[epoch]) for rank in seen}) == 1
    assert seen[0][0] != seen[0][1]


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"kind": "FeatureLoader"}, marks=pytest.mark.long),
        pytest.param({"kind": "FeatureLoader", "workers": 1}, marks=pytest.mark.long),
        {"kind": "batches"},
    ],
    ids=["loader", "loader with workers", "bare"],
)
def test_torchrun(run: Runs, options: dict[str, Any]) -> None:
    check_shares(run.place, run("plain", ranks=2, **options))


@pytest.mark.parametrize("workers", only([1], [0, 1, 2]))
def test_torchrun_with_a_stateful_loader(run: Runs, tmp_path: Path, workers: int) -> None:
    """Each rank goes on where it stood: two batches in."""
    state = str(tmp_path)
    stopped = run("stateful", ranks=2, state=state, save_at=2, workers=workers)
    resumed = run("stateful", ranks=2, state=state, workers=workers)
    for rank, (before, after) in enumerate(zip(stopped, resumed, strict=True)):
        assert before[0] + after[0] == share(run.place, rank, 2, 0)
        assert after[1] == share(run.place, rank, 2, 1)


@pytest.mark.parametrize("ranks", only([2], [1, 2]))
def test_accelerate_leaves_a_loader_as_it_is(run: Runs, ranks: int) -> None:
    check_shares(run.place, run("accelerate", ranks=ranks, kind="FeatureLoader"))


@pytest.mark.parametrize(
    "options",
    only([ROWS], [{"kind": "map"}, ROWS]),
    ids=["map-style", "rows"],
)
def test_accelerate_deals_out_a_prepared_loader(run: Runs, options: dict[str, Any]) -> None:
    """It fills the last batch of every rank with rows that were seen: 32 of 25."""
    check_once(run("accelerate", ranks=2, **options), repeated=7)


def test_accelerate_takes_batches_where_it_has_nothing_to_deal_out(run: Runs) -> None:
    check_shares(run.place, run("accelerate", kind="batches", dispatch=False))


@pytest.mark.parametrize(
    ("ranks", "options", "message"),
    [
        (1, {"kind": "batches"}, "iterate earmill.FeatureLoader"),
        pytest.param(
            *(2, {"kind": "batches", "dispatch": False}, "iterate earmill.FeatureLoader"),
            marks=pytest.mark.long,
        ),
        pytest.param(
            *(2, {"kind": "rows", "dispatch": False, "given": True}, "deals out the rows"),
            marks=pytest.mark.long,
        ),
        (2, {"kind": "rows", "prepared": False}, "that accelerate has prepared"),
    ],
    ids=["that it would join", "that it would count as rows", "dealt out twice", "not prepared"],
)
def test_what_accelerate_would_deal_out_wrongly_is_refused(
    run: Runs, ranks: int, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(RuntimeError, match=f"Error: expected .*{message}"):
        run("accelerate", ranks=ranks, **options)


def test_accelerate_resumes_a_loader(run: Runs, tmp_path: Path) -> None:
    state = str(tmp_path / "state")
    stopped = run("accelerate resumed", ranks=2, state=state, save_at=2)
    resumed = run("accelerate resumed", ranks=2, state=state)
    for rank, (before, after) in enumerate(zip(stopped, resumed, strict=True)):
        assert len(before[0]) == 8 and before[0] + after[0] == share(run.place, rank, 2, 0)


@pytest.mark.parametrize(
    ("ranks", "options"),
    spread(2, [2, 1], [{"kind": "FeatureLoader", "workers": 1}, {"kind": "batches"}]),
)
def test_lightning(run: Runs, ranks: int, options: dict[str, Any]) -> None:
    check_shares(run.place, run("lightning", ranks=ranks, devices=ranks, **options))


@pytest.mark.long
def test_lightning_starts_its_own_ranks(run: Runs) -> None:
    """Their environment names a world size and no rank until torch.distributed knows both."""
    check_shares(run.place, run.alone("lightning", kind="FeatureLoader", devices=2))


def test_lightning_puts_its_own_sampler_on_rows_by_number(run: Runs) -> None:
    check_once(run("lightning", ranks=2, kind="map", devices=2))


def test_lightning_with_a_limit_reads_another_epoch_each_time(run: Runs) -> None:
    (seen,) = run("lightning", kind="FeatureLoader", limit=2)
    assert seen == [share(run.place, 0, 1, epoch)[:8] for epoch in range(EPOCHS)]


def test_lightning_resumes_inside_of_an_epoch(run: Runs, tmp_path: Path) -> None:
    options = {"kind": "FeatureLoader", "devices": 2, "ranks": 2}
    whole = run("lightning", checkpoints=str(tmp_path), **options)
    (one,) = tmp_path.glob("*step=2.ckpt")
    resumed = run("lightning", go_on=str(one), **options)
    for before, after in zip(whole, resumed, strict=True):
        assert after == [before[0][8:], before[1]]


@pytest.mark.parametrize(
    ("ranks", "options", "repeated"),
    [
        pytest.param(1, {}, 0, marks=pytest.mark.long),
        (2, {}, 1),
        pytest.param(2, {"accelerator_config": DEALT}, 7, marks=pytest.mark.long),
    ],
    ids=["one", "two", "two that read for themselves"],
)
def test_transformers(
    run: Runs, tmp_path: Path, ranks: int, options: dict[str, Any], repeated: int
) -> None:
    check_once(run("transformers", ranks=ranks, out=str(tmp_path), **options), repeated)


def test_transformers_resumes_inside_of_an_epoch(run: Runs, tmp_path: Path) -> None:
    options = {"out": str(tmp_path), "save_strategy": "steps", "save_steps": 10}
    (whole,) = run("transformers", **options)
    # 7 steps an epoch: the checkpoint is after 3 of the second.
    (resumed,) = run("transformers", go_on="checkpoint-10", **options)
    assert resumed == [[], whole[1][12:]]


def test_frameworks_move_batches(run: Runs) -> None:
    """To a device by the functions that they call on batches, and nothing gets lost."""
    assert run("moves", collates=["collate", "collate_packed", "collate_jagged"]) == [[]]
