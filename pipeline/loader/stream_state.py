"""What the state of a stream holds, and when one is refused.

A state is a few plain numbers: the epoch, a place in it, and everything that must be equal for that
place to mean the same row.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch.utils.data import get_worker_info

from earmill.pipeline.loader import epoch_order as order
from earmill.pipeline.loader.batches import Plan, check_within
from earmill.pipeline.loader.epoch_place import Begun

if TYPE_CHECKING:
    from earmill.pipeline.loader.stream import FeatureStream

__all__ = ["STATE_VERSION", "after_whole_steps", "check_state", "check_within", "identity"]

# 2: another order, drawn by Philox.
STATE_VERSION = 2
_PLACE = ("epoch", "start", "position", "world_size")
# What states written before these settings do not name.
_LATER = ("batch_frames", "batch_seconds", "crop", "mixture")


def identity(stream: FeatureStream) -> dict[str, Any]:
    """What must be equal for a place to mean the same row."""
    chosen, mixture = stream.settings, stream.features.mixture
    found = {
        "seed": stream.seed,
        "shuffle": chosen.shuffle,
        **stream.batching.identity(),
        "lanes": chosen.lanes,
        "window_rows": chosen.window_rows,
        # None repeats batches at the end, behind every place that a state can name.
        "even": "pad" if stream.even is True else stream.even or False,
        "dataset": stream.features.fingerprint,
    }
    if stream.crop is not None:
        found["crop"] = [stream.crop.seconds, stream.crop.start_s]
    if mixture is not None:
        found["mixture"] = [*mixture]
    return found


def of_worker(stream: FeatureStream, begun: Begun, worker: int, workers: int) -> dict[str, Any]:
    """The state of a stream in one worker of a DataLoader."""
    return {
        "version": STATE_VERSION,
        **begun._asdict(),
        "position": 0,
        "worker": worker,
        "workers": workers,
        "world_size": stream.world_size,
    } | identity(stream)


def begun_of_worker(state: Mapping[str, Any], worker: int, workers: int, world_size: int) -> Begun:
    """Return the iteration that a worker continues, from the saved state of its number."""
    wanted = {"worker": worker, "workers": workers, "world_size": world_size}
    found = {name: state.get(name) for name in wanted}
    if found != wanted:
        raise ValueError(
            f"expected the state of {wanted}, got that of {found}; go on with the same number of "
            "workers and ranks, or use earmill.FeatureLoader, whose state any number takes over"
        )
    return Begun(**{name: order.check_whole(name, state.get(name)) for name in Begun._fields})


def check_state(state: Any, here: Mapping[str, Any]) -> None:
    """Refuse what is no state, or one of another stream.

    Args:
        here: What `identity` says of the stream that is to go on.
    """
    if not isinstance(state, Mapping):
        raise TypeError(f"expected what state_dict() returned, got {type(state).__name__}")
    if state.get("version") != STATE_VERSION:
        raise ValueError(
            f"expected a reader state of version {STATE_VERSION}, got "
            f"{state.get('version')!r}, whose rows come in another order; go on with the "
            f"release that wrote it, or begin its epoch anew: set_epoch({state.get('epoch')!r})"
        )
    missing = sorted({*here, *_PLACE} - {*state, *_LATER})
    if missing:
        raise ValueError(f"expected what state_dict() returned, got one without {missing}")
    if "worker" in state and get_worker_info() is None:
        raise ValueError(
            "expected the state of a whole stream, got that of one worker of a DataLoader; load it "
            "with the StatefulDataLoader that gave it"
        )
    order.check_counter("epoch", state["epoch"])
    order.check_split(0, state["world_size"])
    for name in ("start", "position"):
        if order.check_whole(name, state[name]) < 0:
            raise ValueError(f"the state has {name}={state[name]}, expected a number from 0")
    for name in (*here, *_LATER):
        if state.get(name) != here.get(name):
            raise ValueError(
                f"the state was taken with {name}={state.get(name)!r}, this stream has "
                f"{here.get(name)!r}; open the same dataset with the same settings"
            )


def after_whole_steps(stream: FeatureStream, whole: Plan, state: Mapping[str, Any]) -> int:
    """Where all ranks of another world stand, if that is a prefix of the order."""
    try:
        return stream.batching.start_after(whole, state)
    except ValueError as err:
        raise ValueError(
            f"{err}, so world_size={stream.world_size} cannot take over; resume with the old world "
            "size or save between batches"
        ) from None
