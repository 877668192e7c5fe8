# Public names of earmill and their homes, for type checkers and for `__init__.py`, which loads each
# name when it is first used. A line: from MODULE import NAME as PUBLIC_NAME.

from amtcore import models as models
from amtcore import stages as stages
from amtcore.features.feature_model import Extractor as Extractor
from amtcore.features.registry import ModelInfo as ModelInfo
from amtcore.features.registry import build_extractor as build_extractor
from amtcore.features.registry import list_models as list_models
from amtcore.features.spike_encoder import SpikeEncoder as SpikeEncoder
from amtcore.features.spike_encoder import SpikeOptions as SpikeOptions
from amtcore.features.spike_events import SpikeEvents as SpikeEvents
from amtcore.features.stream_info import StreamInfo as StreamInfo
from amtcore.units import Calibration as Calibration
from earmill import formats as formats
from earmill import ray as ray
from earmill import sources as sources
from earmill import testing as testing
from earmill.api import JobFailedError as JobFailedError
from earmill.api import add_features as add_features
from earmill.api import compact as compact
from earmill.api import diff as diff
from earmill.api import extract as extract
from earmill.api import gc as gc
from earmill.api import log as log
from earmill.api import plan as plan
from earmill.api import push as push
from earmill.api import report as report
from earmill.api import retry as retry
from earmill.api import verify as verify
from earmill.api import verify_deep as verify_deep
from earmill.pipeline.common.errors import CommitError as CommitError
from earmill.pipeline.common.errors import EarmillError as EarmillError
from earmill.pipeline.common.errors import HubError as HubError
from earmill.pipeline.common.errors import LockedError as LockedError
from earmill.pipeline.common.errors import OutputError as OutputError
from earmill.pipeline.common.errors import OvertakenError as OvertakenError
from earmill.pipeline.common.errors import RunStopped as RunStopped
from earmill.pipeline.common.errors import SourceError as SourceError
from earmill.pipeline.common.errors import SpecError as SpecError
from earmill.pipeline.dataset.garbage import Collected as Collected
from earmill.pipeline.dataset.snapshot import LogEntry as LogEntry
from earmill.pipeline.dataset.snapshot import SnapshotDiff as SnapshotDiff
from earmill.pipeline.dataset.verify import Report as Report
from earmill.pipeline.driver import events as events
from earmill.pipeline.driver.events import JobFinished as JobFinished
from earmill.pipeline.driver.events import StopRequest as StopRequest
from earmill.pipeline.formats.moments import StreamStatistics as StreamStatistics
from earmill.pipeline.hub.push import Pushed as Pushed
from earmill.pipeline.loader.collate import Batch as Batch
from earmill.pipeline.loader.collate import collate_jagged as collate_jagged
from earmill.pipeline.loader.collate import collate_packed as collate_packed
from earmill.pipeline.loader.collate import collate_padded as collate
from earmill.pipeline.loader.collate import collate_padded as collate_padded
from earmill.pipeline.loader.collate import per_channel as per_channel
from earmill.pipeline.loader.crops import Crop as Crop
from earmill.pipeline.loader.feature_loader import FeatureLoader as FeatureLoader
from earmill.pipeline.loader.rows import Row as Row
from earmill.pipeline.loader.statistics import compute_statistics as compute_statistics
from earmill.pipeline.loader.stream import FeatureDataset as FeatureDataset
from earmill.pipeline.loader.stream import FeatureStream as FeatureStream
from earmill.pipeline.operations.batch_extractor import BatchExtractor as BatchExtractor
from earmill.pipeline.operations.deep_verify import DeepReport as DeepReport
from earmill.pipeline.planning.estimate import JobCost as JobCost
from earmill.pipeline.reader.combined import ConcatenatedFeatures as ConcatenatedFeatures
from earmill.pipeline.reader.combined import JoinedFeatures as JoinedFeatures
from earmill.pipeline.reader.combined import MixedFeatures as MixedFeatures
from earmill.pipeline.reader.combined import mix as mix
from earmill.pipeline.reader.features import Features as Features
from earmill.pipeline.reader.lhotse_cuts import to_lhotse as to_lhotse
from earmill.pipeline.reader.open import open_features as open_features
from earmill.pipeline.reader.recordings import Recordings as Recordings
from earmill.pipeline.spec.job import JobSpec as JobSpec

# Type checkers need this for a name that is imported as another.
__all__ = ["collate"]
__version__: str
