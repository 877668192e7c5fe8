"""Training as its frameworks' users write it: run as a process of its own, alone or as a rank.

    python -m tests.pipeline.framework_runs NAME FEATURES OUT [OPTIONS as JSON]

writes to OUT/<rank>.json what the process has seen: for each epoch the positions of its rows.
Without arguments it reads runs from its input, one JSON list a line: arguments, and the environment
of each rank. It forks the ranks, because importing the packages takes longer than a run.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import sys
import traceback
import warnings
from collections.abc import Callable
from importlib import import_module
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import earmill

SEED = 5
WIDTH = 7


class Line(torch.nn.Module):
    """A line through the mean of the frames of each clip."""

    def __init__(self) -> None:
        super().__init__()
        self.line = torch.nn.Linear(WIDTH, 1)

    def forward(self, batch: earmill.Batch) -> torch.Tensor:
        modulation = batch.features["modulation"]
        mean = modulation.values.sum(1) / modulation.lengths[:, None]
        return self.line(mean / 1000)[:, 0]


def loss_of(model: Any, batch: earmill.Batch) -> torch.Tensor:
    """In the types in which features and labels come."""
    return torch.nn.functional.mse_loss(model(batch), batch.label.float())


def stream(place: str, **options: Any) -> Any:
    return earmill.open_features(place).iterable(seed=SEED, label="label", **options)


def loader_of(place: str, kind: str, **options: Any) -> Any:
    """A loader as the documentation of earmill and of its framework say."""
    workers = {"num_workers": options.pop("workers", 0)}
    if kind == "FeatureLoader":
        return earmill.FeatureLoader(stream(place, batch_size=4, **options), **workers)
    if kind == "batches":
        return DataLoader(stream(place, batch_size=4, **options), batch_size=None, **workers)
    if kind == "rows":
        return DataLoader(
            stream(place, **options), batch_size=4, collate_fn=earmill.collate, **workers
        )
    if kind == "map":
        ds = earmill.open_features(place).torch(label="label")
        return DataLoader(ds, batch_size=4, shuffle=True, collate_fn=earmill.collate, **workers)
    raise ValueError(kind)


def plain(place: str, *, kind: str, epochs: int = 2, **options: Any) -> None:
    """A loop by hand under torchrun."""
    torch.distributed.init_process_group("gloo")
    loader = loader_of(place, kind, **options)
    model = torch.nn.parallel.DistributedDataParallel(Line())
    seen = []
    for _ in range(epochs):
        seen.append([])
        with model.join():
            for batch in loader:
                loss_of(model, batch).backward()
                seen[-1] += batch.indices.tolist()
    return finish(seen)


def stateful(place: str, *, state: str, save_at: int | None = None, workers: int) -> None:
    """torchdata's loader under torchrun, stopped after some steps and gone on with."""
    from torchdata.stateful_dataloader import StatefulDataLoader

    torch.distributed.init_process_group("gloo")
    loader = StatefulDataLoader(stream(place, batch_size=4), batch_size=None, num_workers=workers)
    path = Path(state, f"{torch.distributed.get_rank()}.json")
    if save_at is None:
        loader.load_state_dict(json.loads(path.read_text()))
    seen: list[list[int]] = [[], []]
    for epoch in seen:
        for step, batch in enumerate(loader, start=1):
            epoch += batch.indices.tolist()
            if step == save_at:
                path.write_text(json.dumps(loader.state_dict()))
                return finish(seen)
    return finish(seen)


def accelerated(
    place: str,
    *,
    kind: str,
    epochs: int = 2,
    dispatch: bool | None = None,
    given: bool = False,
    prepared: bool = True,
    **options: Any,
) -> None:
    """accelerate, in a loop as its documentation has it.

    Args:
        dispatch: `dispatch_batches` of accelerate.
        given: Rank and world size are given to the stream.
        prepared: The loader is prepared.
    """
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration

    config = DataLoaderConfiguration(dispatch_batches=dispatch)
    accelerator = Accelerator(cpu=True, dataloader_config=config)
    model = Line()
    optimizer = torch.optim.SGD(model.parameters(), 1e-3)
    ranks = {"rank": accelerator.process_index, "world_size": accelerator.num_processes}
    loader = loader_of(place, kind, **options, **(ranks if given else {}))
    model, optimizer = accelerator.prepare(model, optimizer)
    loader = accelerator.prepare(loader) if prepared else loader
    seen = []
    for _ in range(epochs):
        seen.append([])
        for batch in loader:
            accelerator.backward(loss_of(model, batch))
            optimizer.step()
            seen[-1] += batch.indices.tolist()
    return finish(seen)


def resumed_by_accelerate(place: str, *, state: str, save_at: int | None = None) -> None:
    """A checkpoint in the middle of an epoch, and what a new process goes on with."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    loader = loader_of(place, "FeatureLoader")
    loader = accelerator.prepare(loader)
    accelerator.register_for_checkpointing(loader)
    if save_at is None:
        accelerator.load_state(state)
    seen: list[list[int]] = [[]]
    for step, batch in enumerate(loader, start=1):
        seen[0] += batch.indices.tolist()
        if step == save_at:
            accelerator.save_state(state)
            break
    return finish(seen)


def by_lightning(
    place: str,
    *,
    kind: str,
    devices: int = 1,
    epochs: int = 2,
    checkpoints: str | None = None,
    go_on: str | None = None,
    limit: int | None = None,
    **options: Any,
) -> None:
    """Lightning's Trainer with a module as its users write it.

    Args:
        checkpoints: Folder for a checkpoint after every second step.
        go_on: Checkpoint to go on from.
        limit: Batches of an epoch.
    """
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    seen: list[list[int]] = []
    saving = [ModelCheckpoint(checkpoints, every_n_train_steps=2, save_top_k=-1)]

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = Line()

        def training_step(self, batch: earmill.Batch, number: int) -> torch.Tensor:
            while len(seen) <= self.current_epoch:
                seen.append([])
            seen[self.current_epoch] += batch.indices.tolist()
            return loss_of(self.model, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 1e-3)

    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy="ddp" if devices > 1 else "auto",
        max_epochs=epochs,
        limit_train_batches=limit,
        callbacks=saving if checkpoints else [],
        logger=False,
        enable_checkpointing=checkpoints is not None,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Module(), loader_of(place, kind, **options), ckpt_path=go_on)
    return finish(seen)


def by_transformers(
    place: str, *, out: str, epochs: int = 2, go_on: str | None = None, **options: Any
) -> None:
    """The Trainer of transformers, with a collate that makes what a model of it takes.

    Args:
        out: Its folder.
        go_on: Checkpoint in it to go on from.
    """
    from transformers import Trainer, TrainingArguments

    seen: list[list[int]] = [[]]

    class Model(Line):
        def forward(self, values: Any, n_frames: Any, labels: Any, rows: Any) -> dict[str, Any]:
            mean = values.sum(1) / n_frames[:, None]
            seen[-1].extend(rows.tolist())
            loss = torch.nn.functional.mse_loss(self.line(mean / 1000)[:, 0], labels)
            return {"loss": loss}

    def collated(rows: list[Any]) -> dict[str, Any]:
        batch = earmill.collate(rows, multiple_of=256)
        modulation = batch.features["modulation"]
        return {
            "values": modulation.values,
            "n_frames": modulation.lengths,
            "labels": batch.label.float(),
            "rows": batch.indices,
        }

    arguments = TrainingArguments(
        output_dir=out,
        per_device_train_batch_size=4,
        num_train_epochs=epochs,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        **options,
    )

    class Seeing(Trainer):
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            while len(seen) <= int(self.state.epoch or 0):
                seen.append([])
            return super().training_step(*args, **kwargs)

    trainer = Seeing(
        model=Model(), args=arguments, train_dataset=stream(place), data_collator=collated
    )
    trainer.train(resume_from_checkpoint=go_on and f"{out}/{go_on}")
    return finish(seen)


def moved(place: str, *, collates: list[str]) -> None:
    """Batches through the functions by which accelerate and Lightning move them to a device."""
    from accelerate.utils import send_to_device
    from lightning.fabric.utilities import move_data_to_device

    for collate, move in product(collates, (send_to_device, move_data_to_device)):
        rows = stream(place, batch_size=4, collate_fn=getattr(earmill, collate))
        batch: Any = next(iter(earmill.FeatureLoader(rows)))
        there = move(batch, torch.device("meta"))
        assert type(there) is type(batch) and there.row_ids == batch.row_ids
        assert there.extra["text"] == batch.extra["text"]
        assert batch.label.device.type == "cpu"
        tensors = [there.indices, there.seconds, there.label, there.extra["label"]]
        for value in there.features.values():
            tensors += [value] if isinstance(value, torch.Tensor) else [value.values]
        assert {tensor.device.type for tensor in tensors} == {"meta"}
        same = move(batch, torch.device("cpu"))
        assert torch.equal(same.indices, batch.indices)
    return finish([])


def finish(seen: list[list[int]]) -> None:
    """Write what was seen, and end: gloo's destructor may wait for Python, which waits for it."""
    rank = os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or "0"
    Path(os.environ["OUT"], f"{rank}.json").write_text(json.dumps(seen))
    if torch.distributed.is_initialized():
        torch.distributed.barrier()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


RUNS: dict[str, Callable[..., None]] = {
    "plain": plain,
    "stateful": stateful,
    "accelerate": accelerated,
    "accelerate resumed": resumed_by_accelerate,
    "lightning": by_lightning,
    "transformers": by_transformers,
    "moves": moved,
}


# Lightning imports what the others do, and of torch what distributed models need. The rest is what
# reading features and torchdata's loader import.
PACKAGES = (
    *("earmill.pipeline.formats.half", "lightning", "accelerate", "pandas", "pyarrow.parquet"),
    *("earmill.pipeline.reader.features", "earmill.pipeline.loader.stream", "numcodecs"),
    *("earmill.pipeline.formats.parquet.format", "earmill.pipeline.formats.zarr.format"),
    *("torchdata.stateful_dataloader", "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"),
)


def serve() -> None:
    """Run what the input names; for each line answer with the exit codes of its ranks."""
    for line in sys.stdin:
        arguments, environments = json.loads(line)
        gc.disable()  # imports leave little garbage, and collections would walk all of it
        for package in (*PACKAGES, *(["transformers.trainer"] * (arguments[0] == "transformers"))):
            import_module(package)
        gc.freeze()  # collections in the ranks would walk, and so copy, all that was imported
        gc.enable()
        ranks = {_forked(arguments, environment) for environment in environments}
        codes = []
        while ranks:
            rank, status = os.waitpid(-1, 0)
            ranks.discard(rank)
            codes.append(os.waitstatus_to_exitcode(status))
            if codes[-1]:  # the others would wait for it
                for other in ranks:
                    os.kill(other, signal.SIGKILL)
        print(json.dumps(codes), flush=True)


def _forked(arguments: list[str], environment: dict[str, str]) -> int:
    rank = os.fork()
    if rank:
        return rank
    try:
        os.environ.update(environment)
        log = os.open(f"{arguments[2]}/{os.getpid()}.log", os.O_CREAT | os.O_WRONLY)
        os.dup2(log, 1)
        os.dup2(log, 2)
        main(*arguments)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(1)


def main(name: str, place: str, out: str, options: str = "{}") -> None:
    warnings.simplefilter("ignore")  # The frameworks warn of much.
    torch.manual_seed(0)
    os.environ["OUT"] = out
    RUNS[name](place, **json.loads(options))


if __name__ == "__main__":
    main(*sys.argv[1:]) if len(sys.argv) > 1 else serve()
