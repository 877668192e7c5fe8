"""Rank and world size: found where they are known, refused where they contradict each other."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from earmill import FeatureLoader, Features, open_features
from tests.pipeline.reader_data import forks, ids, write_set

N_ROWS = 25


@pytest.fixture(scope="module")
def ds(tmp_path_factory: pytest.TempPathFactory) -> Features:
    path: Path = tmp_path_factory.mktemp("ranks")
    write_set(path, n_rows=N_ROWS, rows_per_shard=7)
    return open_features(path)


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests may themselves run below a launcher."""
    for name in os.environ:
        if name.endswith(("RANK", "WORLD_SIZE", "PMI_SIZE")) or name.startswith("SLURM_"):
            monkeypatch.delenv(name)


@pytest.fixture
def torch_rank(tmp_path: Path) -> Iterator[None]:
    """This process is the one rank of torch.distributed."""
    at = f"file://{tmp_path / 'meeting'}"
    torch.distributed.init_process_group("gloo", init_method=at, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def set_all(monkeypatch: pytest.MonkeyPatch, **values: Any) -> None:
    for name, value in values.items():
        monkeypatch.setenv(name, str(value))


LAUNCHERS = {
    "torchrun": {"RANK": 1, "WORLD_SIZE": 3, "LOCAL_RANK": 1},
    "srun": {"SLURM_PROCID": 1, "SLURM_STEP_NUM_TASKS": 3, "SLURM_NTASKS": 9},
    "mpirun of Open MPI": {"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 3},
    "mpirun of MPICH": {"PMI_RANK": 1, "PMI_SIZE": 3},
    "srun of before": {"SLURM_PROCID": 1, "SLURM_NTASKS": 3},
    "torchrun below srun": {
        "RANK": 1,
        "WORLD_SIZE": 3,
        "SLURM_PROCID": 0,
        "SLURM_STEP_NUM_TASKS": 2,
    },
}


@forks
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_the_launcher_says_the_rank(
    ds: Features, monkeypatch: pytest.MonkeyPatch, launcher: str
) -> None:
    set_all(monkeypatch, **LAUNCHERS[launcher])
    for options in ({}, {"batch_size": 4}):
        stream = ds.iterable(seed=2, **options)
        assert (stream.rank, stream.world_size) == (1, 3)
        even = {"even": "pad"} if options else {}
        wanted = ids(ds.iterable(seed=2, rank=1, world_size=3, **options, **even))
        assert ids(stream) == wanted
    loader = FeatureLoader(ds.iterable(seed=2, batch_size=4), num_workers=1)
    assert ids(loader) == wanted


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {"WORLD_SIZE": 1},
        {"RANK": 0, "WORLD_SIZE": 1},
        {"SLURM_PROCID": 0, "SLURM_NTASKS": 1},
        {"SLURM_NTASKS": 4},
        {"SLURM_PROCID": 0, "SLURM_STEP_NUM_TASKS": 4, "SLURM_JOB_NAME": "bash"},
    ],
    ids=str,
)
def test_one_process_reads_all(
    ds: Features, monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any]
) -> None:
    set_all(monkeypatch, **environment)
    assert sorted(ids(ds.iterable())) == list(range(N_ROWS))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": 2}, "expected RANK and WORLD_SIZE in the environment, got WORLD_SIZE=2"),
        ({"RANK": 1}, "got RANK=1 without WORLD_SIZE"),
        ({"PMI_RANK": 1}, "expected PMI_RANK and PMI_SIZE in the environment, got PMI_RANK=1"),
        ({"RANK": 2, "WORLD_SIZE": 2}, "rank must be from 0 to world_size - 1 = 1, got 2"),
        ({"RANK": "one", "WORLD_SIZE": 2}, "whole number in the environment's RANK, got 'one'"),
        (
            {"SLURM_PROCID": 0, "SLURM_NTASKS": 4, "SLURM_JOB_ID": 7},
            "expected 4 tasks as SLURM_NTASKS says, got a process that srun did not start",
        ),
    ],
    ids=str,
)
def test_half_of_a_rank_is_an_error(
    ds: Features, monkeypatch: pytest.MonkeyPatch, environment: dict[str, Any], message: str
) -> None:
    set_all(monkeypatch, **environment)
    stream = ds.iterable(batch_size=4)
    for use in (lambda: list(stream), lambda: len(stream), lambda: list(FeatureLoader(stream))):
        with pytest.raises(ValueError, match=message):
            use()
    assert len(ids(ds.iterable(distributed=False))) == N_ROWS


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"rank": 1}, "expected rank and world_size together, got rank=1 without world_size"),
        ({"world_size": 2}, "got world_size=2 without rank"),
        ({"rank": 0, "world_size": 3}, "rank of this process, 1 of 3 by the launcher's environ"),
        ({"rank": 1, "world_size": 2}, "1 of 3 by the launcher's environment, got rank=1 of"),
        ({"rank": 0, "world_size": 1}, "1 of 3 by the launcher's environment, got rank=0 of"),
    ],
    ids=str,
)
def test_given_ranks_are_those_of_the_process(
    ds: Features, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], message: str
) -> None:
    early = ds.iterable(rank=0, world_size=2)
    set_all(monkeypatch, RANK=1, WORLD_SIZE=3)
    with pytest.raises(ValueError, match=message):
        ds.iterable(**given)
    assert ds.iterable(rank=1, world_size=3).rank == 1
    # A rank that was given before the launcher's was known.
    with pytest.raises(ValueError, match="1 of 3 by the launcher's environment, got rank=0 of"):
        next(iter(early))


def test_a_group_of_its_own_is_given_without_asking(
    ds: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks of data-parallel groups are others than those of the process; an evaluation reads
    all."""
    set_all(monkeypatch, RANK=5, WORLD_SIZE=8)
    half = ds.iterable(seed=1, rank=1, world_size=2, distributed=False)
    whole = ds.iterable(seed=1, distributed=False)
    other = ds.iterable(seed=1, rank=0, world_size=2, distributed=False)
    assert sorted(ids(half) + ids(other)) == sorted(ids(whole)) == list(range(N_ROWS))


def test_torch_distributed_is_asked_before_the_environment(
    ds: Features, torch_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_all(monkeypatch, WORLD_SIZE=2)  # as Lightning leaves it in the process that it starts from
    assert (ds.iterable().rank, ds.iterable().world_size) == (0, 1)
    with pytest.raises(ValueError, match=r"0 of 1 by torch\.distributed, got rank=1 of world_si"):
        ds.iterable(rank=1, world_size=2)


def test_the_rank_is_found_when_it_is_needed(ds: Features, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning starts ranks, and initialises torch.distributed, after it was given the loader."""
    loader = FeatureLoader(ds.iterable(seed=2, batch_size=4))
    assert len(loader) == 7
    set_all(monkeypatch, RANK=1, WORLD_SIZE=2)
    assert len(loader) == 4
    wanted = ids(ds.iterable(seed=2, batch_size=4, rank=1, world_size=2, even="pad"))
    assert ids(loader) == wanted


def test_a_spawned_worker_knows_the_rank_of_its_parent(
    ds: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has no torch.distributed; a process that is to become a rank itself is told nothing."""
    inside: Any = object()
    told = pickle.dumps(ds.iterable(seed=2))
    monkeypatch.setattr("earmill.pipeline.loader.ranks.of_torch", lambda: (1, 2))
    stream = ds.iterable(seed=2)
    there = pickle.loads(pickle.dumps(stream))
    monkeypatch.undo()
    assert (there.rank, there.world_size) == (0, 1)
    monkeypatch.setattr("earmill.pipeline.loader.stream.get_worker_info", lambda: inside)
    assert (there.rank, there.world_size) == (1, 2)
    assert pickle.loads(told).world_size == 1


@pytest.mark.parametrize(
    ("options", "sizes"),
    [
        ({"batch_size": 4}, [13, 13]),  # one row again
        ({"batch_size": 11}, [12, 13]),  # as many batches without
        ({}, [12, 13]),
        ({"batch_size": 4, "even": False}, [12, 13]),
        ({"batch_size": 4, "even": "drop"}, [12, 12]),
    ],
    ids=str,
)
def test_found_ranks_have_as_many_batches(
    ds: Features, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], sizes: list[int]
) -> None:
    """A rank with a batch more would wait for the others for ever."""
    found, batches = [], []
    for rank in range(2):
        set_all(monkeypatch, RANK=rank, WORLD_SIZE=2)
        stream = ds.iterable(seed=1, **options)
        batches.append(stream.n_batches)
        found.append(len(ids(stream)))
    assert found == sizes
    if options.get("even") is None and options:
        assert len({*batches}) == 1


@pytest.mark.parametrize("world", [2, 3, 4])
def test_found_ranks_have_as_many_batches_of_a_budget(
    ds: Features, monkeypatch: pytest.MonkeyPatch, world: int
) -> None:
    seen: list[int] = []
    counts = []
    for rank in range(world):
        set_all(monkeypatch, RANK=rank, WORLD_SIZE=world)
        loader = FeatureLoader(ds.iterable(seed=1, batch_frames=200))
        seen += ids(loader)
        loader.set_epoch(0)
        counts.append(len([*loader]))
    assert set(seen) == set(range(N_ROWS)) and len({*counts}) == 1


def test_a_sampler_on_top_is_refused(ds: Features) -> None:
    """Rows would be shared out twice; torch and the loader both say no."""
    stream = ds.iterable(batch_size=4)
    sampler: Any = DistributedSampler(stream, num_replicas=2, rank=0)
    with pytest.raises(ValueError, match="IterableDataset: expected unspecified sampler option"):
        DataLoader(stream, batch_size=None, sampler=sampler)
    with pytest.raises(TypeError, match="sampler is not an option of FeatureLoader"):
        FeatureLoader(stream, sampler=sampler)


def test_a_state_goes_from_given_to_found_ranks(
    ds: Features, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state that was saved with given ranks resumes where ranks are found."""
    given = ds.iterable(seed=1, batch_size=4, rank=1, world_size=2)
    batches = iter(given)
    next(batches), next(batches)
    set_all(monkeypatch, RANK=1, WORLD_SIZE=2)
    found = ds.iterable(seed=1, batch_size=4)
    found.load_state_dict(given.state_dict())
    assert ids(found)[:4] == ids(batches)[:4]
