"""Every error the pipeline raises on purpose, in one place.

Job errors stop the run before work starts and map to an exit code; row errors travel into the
quarantine table and stop nothing else; outages are neither: what they hit is tried again later.
Each class also inherits the built-in a caller would expect.
"""

from __future__ import annotations

from collections.abc import Callable

from earmill.pipeline.common.faults import http_status
from earmill.pipeline.common.redact import redact_text


class EarmillError(Exception):
    """Base of all deliberate errors. `exit_code` is what the command line returns for it,
    `help_topic` what `earmill explain` has of it.

    Messages name uris and quote other programs: what is secret in them is removed here.
    """

    exit_code = 1
    help_topic = "when-something-fails"

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact_text(arg) if isinstance(arg, str) else arg for arg in args))


class SpecError(EarmillError, ValueError):
    """The job spec is wrong: unknown key, bad value, unknown model or parameter."""

    help_topic = "the-job-file"
    exit_code = 2


class ExtensionError(EarmillError, ImportError):
    """A source kind or format that no distribution offers, that several do, or that is broken."""

    help_topic = "an-extension"
    exit_code = 2


class SourceError(EarmillError, FileNotFoundError):
    """The source is missing, empty, or its items cannot be told apart."""

    help_topic = "the-source"
    exit_code = 2


class OutputError(EarmillError, OSError):
    """The output cannot be written, or belongs to another spec."""

    help_topic = "the-output"
    exit_code = 2


class MissingPackageError(EarmillError, ImportError):
    """A package that is needed is not installed; the message says what to install."""

    help_topic = "a-package"
    exit_code = 2


class LockedError(OutputError):
    """Another live driver works on the same output."""

    help_topic = "another-driver"


class OvertakenError(LockedError):
    """Another command took the output over while this run gave no sign of life, or the output was
    removed; the run ends and writes no more."""

    exit_code = 1


class CommitError(EarmillError, RuntimeError):
    """Plan, commits and files do not add up, or a shard could not be published."""

    help_topic = "going-on"


class HubError(EarmillError, OSError):
    """The Hugging Face hub refuses, does not answer, or somebody else committed meanwhile."""

    help_topic = "the-hub"


class SpillError(EarmillError, OSError):
    """The features of a long row cannot be held in a temporary file: says nothing of the row."""

    help_topic = "no-space"


class SourceOutage(EarmillError, OSError):
    """The source does not answer, or this machine cannot take its bytes; says nothing of a row.

    Args:
        message: What, where; one line.
        kind: `source`, or `missing` where the source answers but nothing of it was ever read.
    """

    help_topic = "no-answer"

    def __init__(self, message: str, kind: str = "source") -> None:
        super().__init__(message)
        self.kind = kind

    def __reduce__(self) -> tuple[type[SourceOutage], tuple[str, str]]:
        return type(self), (str(self), self.kind)


class StorageError(EarmillError, OSError):
    """A file of the output could not be read or written; `errno` is that of the cause, if any.

    Args:
        message: What, where; one line.
        transient: It was a store's "not now", or its silence, and may go by itself.
    """

    help_topic = "no-answer"

    def __init__(self, message: str, *, transient: bool = False, errno: int | None = None) -> None:
        super().__init__(message)
        self.transient = transient
        self.errno = errno

    @property
    def is_not_now(self) -> bool:
        """The store answered, and put it off."""
        return self.transient and self.errno is None and http_status(self) is not None

    def __reduce__(self) -> tuple[Callable[..., StorageError], tuple[str, bool, int | None]]:
        return _storage_error, (str(self), self.transient, self.errno)


def _storage_error(message: str, transient: bool, errno: int | None) -> StorageError:
    return StorageError(message, transient=transient, errno=errno)


class DeviceError(EarmillError, RuntimeError):
    """The device that the job asks for is not there, does not work, or computes other values."""

    help_topic = "a-device"
    exit_code = 2


class DeviceLost(EarmillError, RuntimeError):
    """The device failed under a running process; another process may find it well."""

    help_topic = "a-device"


class RunStopped(EarmillError, RuntimeError):
    """The run ends here; what is committed stays, and `--resume` goes on."""

    help_topic = "going-on"


class ClusterLost(RunStopped):
    """Ray, under the run, is gone."""


class RowError(EarmillError, ValueError):
    """One row cannot be processed; it becomes a quarantine row.

    Args:
        message: Expected, got, what to do; one line.
    Attributes:
        stage: Where it failed: fetch, decode, channels, resample, extract or worker.
        error_class: Snake-case name of the reason, stable across releases.
    """

    help_topic = "quarantine"
    stage = "decode"
    error_class = "row_error"


class UnreadableError(RowError):
    """The bytes could not be had, or are not those that were planned."""

    stage = "fetch"
    error_class = "unreadable"


class NotRegularError(RowError):
    """A pipe, device, socket or folder stands where a file was named."""

    stage = "fetch"
    error_class = "not_regular"


class OutsideError(RowError):
    """A table names something that the source may not read."""

    stage = "fetch"
    error_class = "outside_source"


class AbsentError(UnreadableError):
    """The store said no to this name: missing or forbidden. A doubt until other names are had."""


class EmptyFileError(RowError):
    """The object has no bytes at all."""

    error_class = "empty_file"


class NotAudioError(RowError):
    """The bytes are not audio in any supported container."""

    error_class = "not_audio"


class UnsupportedError(RowError):
    """The container is known, and the codec in it is not."""

    error_class = "unsupported"


class TruncatedError(RowError):
    """The stream ends before or behind the end that its header states, or breaks in the middle."""

    error_class = "truncated"


class DecoderCrashError(RowError):
    """The bytes crash the decoder; known only where it runs in a process of its own."""

    error_class = "decoder_crash"


class DecoderLimitError(RowError):
    """The decoder takes more time or memory for the bytes than a file may; known only there too."""

    error_class = "decoder_limit"


class ZeroLengthError(RowError):
    """A valid container that holds no samples."""

    error_class = "zero_length"


class NonFiniteError(RowError):
    """NaN or infinite samples."""

    error_class = "non_finite"


class SampleRateError(RowError):
    """A sample rate outside the accepted range."""

    error_class = "sample_rate"


class SpanError(RowError):
    """Start and end do not select samples of this file."""

    error_class = "span"


class ChannelIndexError(RowError):
    """The wanted channel does not exist."""

    stage = "channels"
    error_class = "channel_index"


class ResampleRatioError(RowError):
    """The job's resampler cannot convert between these two rates."""

    stage = "resample"
    error_class = "resample_ratio"


class TooShortError(RowError):
    """Not enough samples for one frame of every stream."""

    stage = "extract"
    error_class = "too_short"


class TooLongError(RowError):
    """Longer than the job takes, or too long for a stream that needs whole clips."""

    stage = "extract"
    error_class = "too_long"


class NonFiniteFeatureError(RowError):
    """The model returned NaN or infinity for finite input."""

    stage = "extract"
    error_class = "non_finite_feature"


class DtypeRangeError(RowError):
    """A feature value does not fit the output dtype."""

    stage = "extract"
    error_class = "dtype_range"


class WorkerCrashError(RowError):
    """Processing this row kills or hangs its worker process."""

    stage = "worker"
    error_class = "worker_crash"


CLOSE_AGAIN = "run `earmill extract` with --resume, which closes the dataset again"
