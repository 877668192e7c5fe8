"""The share of an epoch that this process reads: its rank, and the number of processes.

They are looked up at every use, because Lightning initialises torch.distributed after it gets its
loaders. A contradiction is an error, because a default would repeat or leave out rows without a
message. The library accelerate splits the rows of any IterableDataset in a DataLoader that it has
prepared, so a stream that accelerate reads in this way gives all rows.
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
SLURM_RANK, SLURM_STEP_TASKS, SLURM_TASKS = "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"
SLURM_STEPS = ("SLURM_STEP_ID", "SLURM_STEPID")
# Names of SLURM jobs that are one shell, whatever number of tasks was requested.
SLURM_NAME, SHELLS = "SLURM_JOB_NAME", ("bash", "interactive")
WHOLE = (0, 1)
_ADVICE = (
    "iterate earmill.FeatureLoader(stream), which accelerator.prepare leaves as it is and which "
    "reads the share of its rank"
)


@dataclass(frozen=True)
class Ranks:
    """The rank and world size of a process: given, else looked up, unless `distributed=False`."""

    rank: int | None = None
    world_size: int | None = None
    distributed: bool = True

    def __post_init__(self) -> None:
        if (self.rank is None) != (self.world_size is None):
            names = "rank", "world_size"
            given, missing = names if self.world_size is None else reversed(names)
            raise ValueError(
                f"expected rank and world_size together, got {given}={getattr(self, given)!r} "
                f"without {missing}; leave both out to take those of torch.distributed or of the "
                "launcher"
            )
        if self.rank is not None:
            self.find()

    @property
    def are_found(self) -> bool:
        return self.rank is None and self.distributed

    def find(self) -> tuple[int, int]:
        """Return rank and world size; ValueError if given values differ from those found, or the
        environment has only one of them."""
        if self.rank is None or self.world_size is None:
            return (of_torch() or _of_launcher() or WHOLE) if self.distributed else WHOLE
        check_split(self.rank, self.world_size)
        ranks = self.rank, self.world_size
        if not self.distributed:
            return ranks
        in_torch = of_torch()
        known = in_torch or _of_launcher()
        if known is not None and known != ranks:
            where = "torch.distributed" if in_torch else "the launcher's environment"
            raise ValueError(
                f"expected the rank of this process, {known[0]} of {known[1]} by {where}, got "
                f"rank={self.rank} of world_size={self.world_size}; leave both out, or add "
                "distributed=False if these ranks are others, as those of a data-parallel group"
            )
        return ranks


def of_torch() -> tuple[int, int] | None:
    """Return rank and world size of torch.distributed; None if it is not initialised."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def _of_launcher() -> tuple[int, int] | None:
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
    try:
        return None if text is None else int(text)
    except ValueError:
        raise ValueError(
            f"expected a whole number in the environment's {name}, got {text!r}"
        ) from None


def accelerate_deals(stream: Any) -> bool | None:
    """Return True if accelerate reads this stream through a DataLoader that it has prepared, False
    if it does not, None if no `Accelerator` shares work among processes."""
    processes, loader = _accelerate(stream)
    return None if processes == 1 else loader is not None


def check_accelerate(stream: Any, ranks: Ranks, *, collates: bool) -> None:
    """Refuse a way of reading through accelerate that does not give each row once. With `collates`,
    the stream gives batches, which accelerate can neither join nor cut."""
    processes, loader = _accelerate(stream)
    if loader is None:
        check_dealt(None if processes == 1 or not ranks.are_found else False)
        return
    if ranks.rank is not None and ranks.world_size != 1:
        raise RuntimeError(
            f"expected a stream without rank= and world_size=, got rank={ranks.rank} of "
            f"{ranks.world_size}: accelerate deals out the rows of a prepared DataLoader once "
            f"more, and most would not be read; leave both out, or {_ADVICE}"
        )
    joins = isinstance(loader, sys.modules["accelerate.data_loader"].DataLoaderDispatcher)
    if (collates and (joins or processes > 1)) or (joins and takes_views(loader.collate_fn)):
        raise RuntimeError(
            "expected rows, got a prepared DataLoader of batches: accelerate would join the "
            "batches of an IterableDataset and cut them anew, which rows of several lengths do not "
            f"allow; {_ADVICE}, or prepare DataLoader(ds.torch(), batch_size=..., shuffle=True, "
            "collate_fn=earmill.collate)"
        )


def check_dealt(deals: bool | None) -> None:
    """Refuse a DataLoader that accelerate has not prepared, given `accelerate_deals`."""
    if deals is False:
        raise RuntimeError(
            "expected a DataLoader that accelerate has prepared, as an Accelerator shares the work "
            f"of several processes here, got one that it does not know; {_ADVICE}"
        )


def _accelerate(stream: Any) -> tuple[int, Any]:
    """Return accelerate's number of processes, and its DataLoader if it reads the stream."""
    module = sys.modules.get("accelerate.state")
    if module is None or not module.is_initialized():
        return 1, None
    loader = module.GradientState().active_dataloader
    dataset = getattr(loader, "dataset", None)
    is_read = stream is dataset or stream is getattr(dataset, "dataset", None)
    return module.PartialState().num_processes, loader if is_read else None
