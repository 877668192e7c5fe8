"""A DataLoader over a `FeatureStream`: whole batches over shared memory, and a place to resume at.

Workers collate what they read into memory that the main process sees as well (see
`loader.shared_batches`); the loader counts what it hands out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from earmill.pipeline.loader.collate import Batch, takes_lent
from earmill.pipeline.loader.epoch_order import check_whole
from earmill.pipeline.loader.shared_batches import BatchRing, can_share
from earmill.pipeline.loader.stream import FeatureStream

if TYPE_CHECKING:
    from earmill.pipeline.loader.read_row import Row

PREFETCHED = 2
# Beside the batches that wait in the queue: one that is filled, and two in the loop's hands, as
# the one before is let go of only when the next is there.
MORE_SLOTS = 3
_OURS = ("batch_size", "shuffle", "sampler", "batch_sampler", "drop_last")


class _Batches(IterableDataset[Any]):
    """Collated batches of a stream, in a process that reads."""

    def __init__(self, stream: FeatureStream, collate_fn: Callable[[list[Row]], Any]) -> None:
        self.stream, self.collate_fn = stream, collate_fn
        self.ring: BatchRing | None = None

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        worker, workers = (0, 1) if info is None else (info.id, info.num_workers)
        lent = takes_lent(self.collate_fn)
        for rows in self.stream.worker_batches(worker, workers, lent=lent):
            read = list(rows)
            if self.ring is None:
                yield self.collate_fn(read)
            else:
                yield self._sent(self.ring, worker, read)

    def _sent(self, ring: BatchRing, worker: int, rows: list[Row]) -> Any:
        with ring.slot(worker) as slot:
            if slot is not None:
                batch = self.collate_fn(rows)
                if not isinstance(batch, Batch):
                    self.ring = None  # nor will the next ones be
                sent = slot.sent(batch)
                if sent is not None:
                    return sent
        return self.collate_fn(rows)


class FeatureLoader:
    """A DataLoader over a `FeatureStream` that knows how far it got, workers or not.

    Args:
        stream: It says what a batch is.
        num_workers: Reading processes; 0 reads in this one.
        collate_fn: One of `earmill.pipeline.loader.collate`, or any function of a list of rows;
            None takes that of the stream.
        device: Where batches are moved to; None leaves them in memory. Lightning moves them itself,
            accelerate those of its own loaders only: give it `accelerator.device`.
        options: Passed on to `torch.utils.data.DataLoader`; batches stay in order.
    Example:
        for epoch in range(loader.epoch, 10):
            for batch in loader:
                ...
                checkpoint = {"data": loader.state_dict()}
    """

    def __init__(
        self,
        stream: FeatureStream,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Row]], Any] | None = None,
        device: Any = None,
        **options: Any,
    ) -> None:
        if not isinstance(stream, FeatureStream):
            raise TypeError(
                "expected a FeatureStream, as FeatureStream(ds, batch_size=8) makes it, got "
                f"{type(stream).__name__}"
            )
        if check_whole("num_workers", num_workers) < 0:
            raise ValueError(f"num_workers must be 0 or more, got {num_workers}")
        if not (collate_fn is None or callable(collate_fn)):
            raise TypeError(f"collate_fn must be a function of a list of rows, got {collate_fn!r}")
        if not options.get("in_order", True):
            raise ValueError(
                "in_order=False would make positions meaningless; leave it out, or use a bare "
                "DataLoader without resume"
            )
        refused = [name for name in _OURS if name in options]
        if refused:
            raise TypeError(
                f"{refused[0]} is not an option of FeatureLoader: the stream says what a batch is; "
                "give ds.iterable(...) batch_size, batch_frames, shuffle or even"
            )
        self.stream, self._device = stream, device
        stream.is_in_loader = True
        self._batches = _Batches(stream, collate_fn or stream.collate_fn)
        self._slots = num_workers and (options.get("prefetch_factor") or PREFETCHED) + MORE_SLOTS
        self._loader: DataLoader[Any] = DataLoader(
            self._batches,
            batch_size=None,
            num_workers=num_workers,
            collate_fn=_as_it_is,
            **options,
        )

    @property
    def epoch(self) -> int:
        """The epoch that iterating gives."""
        return self.stream.epoch

    def __len__(self) -> int:
        """Batches of a whole epoch on this rank."""
        return self.stream.n_batches

    def padding_share(self) -> float:
        """See `FeatureStream.padding_share`."""
        return self.stream.padding_share()

    def __iter__(self) -> Iterator[Any]:
        stream = self.stream
        with stream.iterating():
            skip, plan = stream.begin(), stream.left()
            self._share_memory()
            for batch, end in zip(self._loader, plan.offsets[1:].tolist(), strict=True):
                stream.hand_out(skip + end)
                yield batch if self._device is None else batch.to(self._device, non_blocking=True)
            stream.complete()

    def set_epoch(self, epoch: int) -> None:
        """See `FeatureStream.set_epoch`."""
        self.stream.set_epoch(epoch)

    def state_dict(self) -> dict[str, Any]:
        """Where this rank stands, after the batches handed out so far."""
        return self.stream.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `FeatureStream.load_state_dict`; call it before iterating."""
        self.stream.load_state_dict(state)

    def _share_memory(self) -> None:
        """Slots for the workers of this epoch; those that stay keep theirs."""
        stays = self._loader.persistent_workers and self._batches.ring is not None
        if self._slots and can_share() and not stays:
            workers = self._loader.num_workers
            self._batches.ring = BatchRing(workers, self._slots, self.stream.batch_bytes())


def _as_it_is(batch: Any) -> Any:
    return batch
