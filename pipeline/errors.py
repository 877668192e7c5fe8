"""Every error the pipeline raises on purpose, in one place.

Job errors stop the run before work starts and map to an exit code; row errors travel into the
quarantine table and stop nothing else. Each class also inherits the built-in a caller would expect.
"""

from __future__ import annotations


class EarmillError(Exception):
    """Base of all deliberate errors. `exit_code` is what the command line returns for it."""

    exit_code = 1


class SpecError(EarmillError, ValueError):
    """The job spec is wrong: unknown key, bad value, unknown model or parameter."""

    exit_code = 2


class SourceError(EarmillError, FileNotFoundError):
    """The source is missing, empty, or its items cannot be told apart."""

    exit_code = 2


class OutputError(EarmillError, OSError):
    """The output cannot be written, or belongs to another spec."""

    exit_code = 2


class LockedError(OutputError):
    """Another live driver works on the same output."""


class CommitError(EarmillError, RuntimeError):
    """Plan, commits and files do not add up, or a shard could not be published."""


class RowError(EarmillError, ValueError):
    """One row cannot be processed; it becomes a quarantine row.

    Args:
        message: Expected, got, what to do; one line.
    Attributes:
        stage: Where it failed: fetch, decode, channels, resample, extract or worker.
        error_class: Snake-case name of the reason, stable across releases.
    """

    stage = "decode"
    error_class = "row_error"


class UnreadableError(RowError):
    """The bytes could not be fetched."""

    stage = "fetch"
    error_class = "unreadable"


class EmptyFileError(RowError):
    """The object has no bytes at all."""

    error_class = "empty_file"


class NotAudioError(RowError):
    """The bytes are not audio in any supported container."""

    error_class = "not_audio"


class TruncatedError(RowError):
    """The stream ends before its header says, or breaks in the middle."""

    error_class = "truncated"


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


class TooShortError(RowError):
    """Not enough samples for one frame of every stream."""

    stage = "extract"
    error_class = "too_short"


class TooLongError(RowError):
    """Too long for a stream that needs whole clips."""

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
