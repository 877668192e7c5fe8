"""earmill: audio corpora into auditory-model features.

    import earmill

    earmill.extract("job.yaml")                       # the job, as `earmill extract job.yaml`
    ds = earmill.open_features("features")            # rows by number, by id, by seconds
    loader = DataLoader(ds.torch(), batch_size=32, collate_fn=earmill.collate)
    earmill.models.Dau1997(fs=16000)                  # a model as a PyTorch module

Every name is loaded when it is first used: importing the package costs a few milliseconds and needs
neither torch nor Ray. It may import `api`, `pipeline`, `jobs` and `amtcore`; none of them imports
it.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from amtcore import models as models
    from amtcore import stages as stages
    from amtcore.features.base import Extractor, StreamInfo
    from amtcore.features.build import ModelInfo, build_extractor, list_models
    from amtcore.features.spike_encoder import SpikeEncoder, SpikeOptions
    from amtcore.features.spike_events import SpikeEvents
    from amtcore.units import Calibration
    from earmill import formats as formats
    from earmill import sources as sources
    from earmill import testing as testing
    from earmill.api import (
        JobFailedError,
        add_features,
        extract,
        plan,
        retry,
        verify,
        verify_deep,
    )
    from earmill.pipeline.common.errors import (
        CommitError,
        EarmillError,
        HubError,
        LockedError,
        OutputError,
        OvertakenError,
        RunStopped,
        SourceError,
        SpecError,
    )
    from earmill.pipeline.dataset.garbage import Collected
    from earmill.pipeline.dataset.history import SnapshotDiff
    from earmill.pipeline.dataset.snapshot import LogEntry
    from earmill.pipeline.dataset.verify import Report
    from earmill.pipeline.driver import events as events
    from earmill.pipeline.driver.deep_verify import DeepReport
    from earmill.pipeline.driver.events import JobFinished
    from earmill.pipeline.driver.stop_request import StopRequest
    from earmill.pipeline.formats.moments import StreamStatistics
    from earmill.pipeline.hub.push import Pushed
    from earmill.pipeline.loader.collate import (
        Batch,
        collate_jagged,
        collate_packed,
        collate_padded,
        per_channel,
    )
    from earmill.pipeline.loader.collate import collate_padded as collate
    from earmill.pipeline.loader.crops import Crop
    from earmill.pipeline.loader.feature_loader import FeatureLoader
    from earmill.pipeline.loader.rows import Row
    from earmill.pipeline.loader.statistics import compute_statistics
    from earmill.pipeline.loader.stream import FeatureDataset, FeatureStream
    from earmill.pipeline.planning.estimate import JobCost
    from earmill.pipeline.reader.concat import ConcatenatedFeatures, MixedFeatures, mix
    from earmill.pipeline.reader.features import Features
    from earmill.pipeline.reader.joined import JoinedFeatures
    from earmill.pipeline.reader.open import open_features
    from earmill.pipeline.reader.recordings import Recordings
    from earmill.pipeline.spec.job import JobSpec
    from earmill.upkeep import compact, diff, gc, log, push, report

_ERRORS = "earmill.pipeline.common.errors"
_COLLATE = "earmill.pipeline.loader.collate"
_TORCH = "earmill.pipeline.loader.stream"

# Name -> where it is: a module, or a module and the name there.
_HOMES: dict[str, str | tuple[str, str]] = {
    "Batch": (_COLLATE, "Batch"),
    "Calibration": ("amtcore.units", "Calibration"),
    "Collected": ("earmill.pipeline.dataset.garbage", "Collected"),
    "CommitError": (_ERRORS, "CommitError"),
    "ConcatenatedFeatures": ("earmill.pipeline.reader.concat", "ConcatenatedFeatures"),
    "Crop": ("earmill.pipeline.loader.crops", "Crop"),
    "DeepReport": ("earmill.pipeline.driver.deep_verify", "DeepReport"),
    "EarmillError": (_ERRORS, "EarmillError"),
    "Extractor": ("amtcore.features.base", "Extractor"),
    "FeatureDataset": (_TORCH, "FeatureDataset"),
    "FeatureLoader": ("earmill.pipeline.loader.feature_loader", "FeatureLoader"),
    "FeatureStream": (_TORCH, "FeatureStream"),
    "Features": ("earmill.pipeline.reader.features", "Features"),
    "HubError": (_ERRORS, "HubError"),
    "JobCost": ("earmill.pipeline.planning.estimate", "JobCost"),
    "JobFailedError": ("earmill.api", "JobFailedError"),
    "JobFinished": ("earmill.pipeline.driver.events", "JobFinished"),
    "JobSpec": ("earmill.pipeline.spec.job", "JobSpec"),
    "LockedError": (_ERRORS, "LockedError"),
    "JoinedFeatures": ("earmill.pipeline.reader.joined", "JoinedFeatures"),
    "LogEntry": ("earmill.pipeline.dataset.snapshot", "LogEntry"),
    "MixedFeatures": ("earmill.pipeline.reader.concat", "MixedFeatures"),
    "ModelInfo": ("amtcore.features.build", "ModelInfo"),
    "OutputError": (_ERRORS, "OutputError"),
    "OvertakenError": (_ERRORS, "OvertakenError"),
    "Pushed": ("earmill.pipeline.hub.push", "Pushed"),
    "Recordings": ("earmill.pipeline.reader.recordings", "Recordings"),
    "Report": ("earmill.pipeline.dataset.verify", "Report"),
    "Row": ("earmill.pipeline.loader.rows", "Row"),
    "RunStopped": (_ERRORS, "RunStopped"),
    "SourceError": (_ERRORS, "SourceError"),
    "SnapshotDiff": ("earmill.pipeline.dataset.history", "SnapshotDiff"),
    "SpecError": (_ERRORS, "SpecError"),
    "SpikeEncoder": ("amtcore.features.spike_encoder", "SpikeEncoder"),
    "SpikeEvents": ("amtcore.features.spike_events", "SpikeEvents"),
    "SpikeOptions": ("amtcore.features.spike_encoder", "SpikeOptions"),
    "StopRequest": ("earmill.pipeline.driver.stop_request", "StopRequest"),
    "StreamInfo": ("amtcore.features.base", "StreamInfo"),
    "StreamStatistics": ("earmill.pipeline.formats.moments", "StreamStatistics"),
    "add_features": ("earmill.api", "add_features"),
    "build_extractor": ("amtcore.features.build", "build_extractor"),
    "collate": (_COLLATE, "collate_padded"),
    "collate_jagged": (_COLLATE, "collate_jagged"),
    "collate_packed": (_COLLATE, "collate_packed"),
    "collate_padded": (_COLLATE, "collate_padded"),
    "compact": ("earmill.upkeep", "compact"),
    "compute_statistics": ("earmill.pipeline.loader.statistics", "compute_statistics"),
    "diff": ("earmill.upkeep", "diff"),
    "events": "earmill.pipeline.driver.events",
    "extract": ("earmill.api", "extract"),
    "formats": "earmill.formats",
    "gc": ("earmill.upkeep", "gc"),
    "list_models": ("amtcore.features.build", "list_models"),
    "log": ("earmill.upkeep", "log"),
    "mix": ("earmill.pipeline.reader.concat", "mix"),
    "models": "amtcore.models",
    "open_features": ("earmill.pipeline.reader.open", "open_features"),
    "per_channel": (_COLLATE, "per_channel"),
    "plan": ("earmill.api", "plan"),
    "push": ("earmill.upkeep", "push"),
    "report": ("earmill.upkeep", "report"),
    "retry": ("earmill.api", "retry"),
    "sources": "earmill.sources",
    "stages": "amtcore.stages",
    "testing": "earmill.testing",
    "verify": ("earmill.api", "verify"),
    "verify_deep": ("earmill.api", "verify_deep"),
}

__all__ = [
    "Batch",
    "Calibration",
    "Collected",
    "CommitError",
    "ConcatenatedFeatures",
    "Crop",
    "DeepReport",
    "EarmillError",
    "Extractor",
    "FeatureDataset",
    "FeatureLoader",
    "FeatureStream",
    "Features",
    "HubError",
    "JobCost",
    "JobFailedError",
    "JobFinished",
    "JobSpec",
    "JoinedFeatures",
    "LockedError",
    "LogEntry",
    "MixedFeatures",
    "ModelInfo",
    "OutputError",
    "OvertakenError",
    "Pushed",
    "Recordings",
    "Report",
    "Row",
    "RunStopped",
    "SnapshotDiff",
    "SourceError",
    "SpecError",
    "SpikeEncoder",
    "SpikeEvents",
    "SpikeOptions",
    "StopRequest",
    "StreamInfo",
    "StreamStatistics",
    "__version__",
    "add_features",
    "build_extractor",
    "collate",
    "collate_jagged",
    "collate_packed",
    "collate_padded",
    "compact",
    "compute_statistics",
    "diff",
    "events",
    "extract",
    "formats",
    "gc",
    "list_models",
    "log",
    "mix",
    "models",
    "open_features",
    "per_channel",
    "plan",
    "push",
    "report",
    "retry",
    "sources",
    "stages",
    "testing",
    "verify",
    "verify_deep",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("earmill")
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from earmill.pipeline.common.missing_modules import needed_modules

    with needed_modules(f"earmill.{name}"):
        module = import_module(home if isinstance(home, str) else home[0])
    found = module if isinstance(home, str) else getattr(module, home[1])
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
