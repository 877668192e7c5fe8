"""The share of an epoch that this process reads: its rank, and the number of processes.

The caller gives rank and world size, or they are looked up: in torch.distributed if it is
initialised, else in the environment of the launcher. They are looked up at every use, because
Lightning initialises torch.distributed after it gets its loaders. A contradiction is an error:
a default would train every rank on the same rows, or leave rows out, without a message.

accelerate splits the rows of any IterableDataset in a DataLoader that it has prepared, on top of a
share. So a stream that accelerate reads through such a DataLoader gives all rows.
"""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Any

import torch.distributed

from earmill.pipeline.loader.collate import takes_views
from earmill.pipeline.loader.epoch_order import check_split

# Names of rank and world size by torchrun and `accelerate launch`, by mpirun of Open MPI, and by
# mpirun of MPICH or Intel MPI. srun has other names.
LAUNCHERS = (
    ("RANK", "WORLD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
SLURM_RANK, SLURM_STEP_TASKS, SLURM_TASKS = (
    "SLURM_PROCID",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
)
SLURM_STEPS = ("SLURM_STEP_ID", "SLURM_STEPID")
# Names of SLURM jobs that are one shell, whatever number of tasks was requested.
SLURM_NAME, SHELLS = "SLURM_JOB_NAME", ("bash", "interactive")
WHOLE = (0, 1)
_WAYS = (
    "iterate earmill.FeatureLoader(stream), which accelerator.prepare leaves as it is and which "
    "reads the share of its rank"
)


@dataclass(frozen=True)
class Ranks:
    """The rank and world size of a process, given or looked up.

    Args:
        rank: From 0 to `world_size - 1`; None looks it up.
        world_size: Number of processes that share an epoch; None looks it up.
        distributed: False asks neither torch.distributed nor the environment: without `rank` and
            `world_size`, this process reads all rows.
    Raises:
        ValueError: Only one of rank and world size is given, or they differ from those found.
    """

    rank: int | None = None
    world_size: int | None = None
    distributed: bool = True

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            given, missing = (
                ("rank", "world_size")
                if self.world_size is None
                else (
                    "world_size",
                    "rank",
                )
            )
            raise ValueError(
                f"expected rank and world_size together, got {given}={getattr(self, given)!r} "
                f"without {missing}; leave both out to take those of torch.distributed or of the "
                "launcher"
            )
        if self.rank is not None and self.world_size is not None:
            check_split(self.rank, self.world_size)
            self._check(self.rank, self.world_size)

    @property
    def are_found(self) -> bool:
        """True if rank and world size are looked up, not given."""
        return self.rank is None and self.distributed

    def find(self) -> tuple[int, int]:
        """Return rank and world size.

        Raises:
            ValueError: The given values differ from those found, or the environment has only one of
                them.
        """
        if self.rank is not None and self.world_size is not None:
            self._check(self.rank, self.world_size)
            return self.rank, self.world_size
        if not self.distributed:
            return WHOLE
        return of_torch() or _of_launcher() or WHOLE

    def _check(self, rank: int, world_size: int) -> None:
        if not self.distributed:
            return
        found = of_torch()
        where = "torch.distributed" if found else "the launcher's environment"
        found = found or _of_launcher()
        if found is not None and found != (rank, world_size):
            raise ValueError(
                f"expected the rank of this process, {found[0]} of {found[1]} by {where}, got "
                f"rank={rank} of world_size={world_size}; leave both out, or add distributed=False "
                "if these ranks are others, as those of a data-parallel group"
            )


def of_torch() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed; None if it is not initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _of_launcher() -> tuple[int, int] | None:
    """Return rank and world size of the environment; None if it has neither."""
    for names in LAUNCHERS:
        rank, world_size = (_number(name) for name in names)
        if rank is None and world_size is None:
            continue
        if rank is None and world_size == 1:
            return WHOLE
        if rank is None or world_size is None:
            missing, named = names if rank is None else reversed(names)
            raise ValueError(
                f"expected {' and '.join(names)} in the environment, got {named}="
                f"{os.environ[named]} without {missing}; initialise torch.distributed before rows "
                "are read, or give rank= and world_size="
            )
        check_split(rank, world_size)
        return rank, world_size
    return _of_slurm()


def _of_slurm() -> tuple[int, int] | None:
    rank = _number(SLURM_RANK)
    tasks = _number(SLURM_STEP_TASKS) or _number(SLURM_TASKS) or 1
    if rank is None or tasks == 1 or os.environ.get(SLURM_NAME) in SHELLS:
        return None
    in_step = SLURM_STEP_TASKS in os.environ or any(name in os.environ for name in SLURM_STEPS)
    if rank == 0 and not in_step:
        # sbatch runs its script once, although several tasks were requested.
        raise ValueError(
            f"expected {tasks} tasks as {SLURM_TASKS} says, got a process that srun did not start; "
            "start it by srun, or give rank=0, world_size=1 and distributed=False to read all rows "
            "here"
        )
    check_split(rank, tasks)
    return rank, tasks


def _number(name: str) -> int | None:
    text = os.environ.get(name)
    if text is None:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(
            f"expected a whole number in the environment's {name}, got {text!r}"
        ) from None


def accelerate_deals(stream: Any) -> bool | None:
    """Return True if accelerate reads this stream through a DataLoader that it has prepared.

    None means that no `Accelerator` shares work among processes. False means that an `Accelerator`
    does, but no DataLoader that it has prepared reads the stream now.
    """
    module = sys.modules.get("accelerate.state")
    if module is None or not module.is_initialized() or module.PartialState().num_processes == 1:
        return None
    return _read_by_accelerate(module, stream) is not None


def check_accelerate(stream: Any, ranks: Ranks, *, collates: bool) -> None:
    """Refuse a way of reading through accelerate that does not give each row once.

    Args:
        stream: The stream that is read.
        ranks: Rank and world size of the stream.
        collates: True if the stream gives batches, which accelerate can neither join nor cut.
    Raises:
        RuntimeError: The message says what to do instead.
    """
    module = sys.modules.get("accelerate.state")
    if module is None or not module.is_initialized():
        return
    loader = _read_by_accelerate(module, stream)
    processes = module.PartialState().num_processes
    if loader is None:
        check_dealt(None if processes == 1 or not ranks.are_found else False)
        return
    if ranks.rank is not None and ranks.world_size != 1:
        raise RuntimeError(
            f"expected a stream without rank= and world_size=, got rank={ranks.rank} of "
            f"{ranks.world_size}: accelerate deals out the rows of a prepared DataLoader once "
            f"more, and most would be read by nobody; leave both out, or {_WAYS}"
        )
    joins = isinstance(loader, sys.modules["accelerate.data_loader"].DataLoaderDispatcher)
    if (collates and (joins or processes > 1)) or (joins and takes_views(loader.collate_fn)):
        raise RuntimeError(
            "expected rows, got a prepared DataLoader of batches: accelerate would join the "
            "batches of an IterableDataset and cut them anew, which rows of several lengths do not "
            f"allow; {_WAYS}, or prepare DataLoader(ds.torch(), batch_size=..., shuffle=True, "
            "collate_fn=earmill.collate)"
        )


def check_dealt(deals: bool | None) -> None:
    """Refuse a DataLoader that accelerate has not prepared, if it shares work among processes.

    Args:
        deals: The answer of `accelerate_deals`.
    """
    if deals is False:
        raise RuntimeError(
            "expected a DataLoader that accelerate has prepared, as an Accelerator shares the work "
            f"of several processes here, got one that it does not know; {_WAYS}"
        )


def _read_by_accelerate(module: Any, stream: Any) -> Any:
    """Return the prepared DataLoader that is being iterated, if it reads the stream."""
    loader = module.GradientState().active_dataloader
    dataset = getattr(loader, "dataset", None)
    if dataset is stream or (dataset is not None and getattr(dataset, "dataset", None) is stream):
        return loader
    return None
