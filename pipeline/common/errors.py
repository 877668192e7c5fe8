"""Errors that are raised on purpose, and the classification of foreign exceptions.

A job error stops the run before work starts and maps to an exit code. A row error becomes a row of
the quarantine table and stops nothing else. After an outage the work is tried again later. Each
class also inherits the built-in exception that a caller would expect.

Only this module knows the classes of backends. The chain of causes is searched, with these answers:

- REFUSED: the store answered and refused this name. The object is at fault only if other objects
  can be read.
- OUTAGE: nobody answered, or the answer was "not now", or this machine ran out of a resource.
- DEFECT: a program failed on this name or content. It would fail again, so the row is quarantined.
- UNKNOWN: none of them; the caller decides.
"""

from __future__ import annotations

import errno
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from functools import partial
from typing import Any, NamedTuple

from earmill.pipeline.common.redact import redact_text
from earmill.pipeline.common.text import named_line


class ErrorKind(Enum):
    REFUSED = "refused"
    OUTAGE = "outage"
    DEFECT = "defect"
    UNKNOWN = "unknown"


# Programs raise these for a name or value that they were not written for, or a damaged archive.
DEFECT_CLASSES = (
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, RecursionError, TypeError),
    *(lzma.LZMAError, struct.error, tarfile.TarError, zipfile.BadZipFile, zlib.error),
)
# Errors of the system about a name. All others are about a device, a network or this process.
REFUSED_ERRNOS = frozenset(
    getattr(errno, name)
    for name in "ENOENT ENOTDIR EISDIR ENAMETOOLONG ELOOP EACCES EPERM EINVAL EEXIST".split()
)
# Stores answer 400 and 403 for expired credentials and for bad names; the codes differ. Here are
# credentials that expired, too many requests, and trouble of the store itself.
OUTAGE_CODES = frozenset(
    "ExpiredToken ExpiredTokenException AuthenticationFailed InvalidToken RequestExpired "
    "RequestTimeTooSkewed TokenRefreshRequired RequestLimitExceeded SlowDown Throttling "
    "ThrottlingException TooManyRequestsException InternalError RequestTimeout ServiceUnavailable "
    "500 502 503 504".split()
)
OUTAGE_STATUS = frozenset({408, 425, 429})
# By name, because their packages are imported only where they are used.
REFUSED_CLASSES = frozenset({"ParamValidationError", "InvalidURL", "EntryNotFoundError"})
# The network, in the words of several clients (no class of requests is Python's); answers that are
# cut off or damaged. gcsfs makes ProxyError of 502; BotoCoreError is no answer of the store.
OUTAGE_CLASSES = frozenset(
    "ClientConnectionError ConnectTimeout ConnectionError HTTPClientError ServerDisconnectedError "
    "Timeout TimeoutException TransportError gaierror ChecksumError ChunkedEncodingError "
    "ClientPayloadError IncompleteRead IncompleteReadError BotoCoreError FSTimeoutError "
    "GoogleAuthError ProxyError ServiceRequestError ServiceResponseError".split()
)


def classify(error: BaseException) -> ErrorKind:
    # The answer of the store is more exact than the class that a wrapper gave it.
    for each in chain(error):
        code, status, _ = _answer(each)
        if code in OUTAGE_CODES:
            return ErrorKind.OUTAGE
        if status is not None:
            # 501 and 505 are permanent, but not a property of the object either.
            is_away = status >= 500 or status in OUTAGE_STATUS
            return ErrorKind.OUTAGE if is_away else ErrorKind.REFUSED
    for kind in map(_by_class, chain(error)):
        if kind is not ErrorKind.UNKNOWN:
            return kind
    # Defects come last, because an outage can make a client fail in any way.
    is_defect = any(isinstance(each, DEFECT_CLASSES) for each in chain(error))
    return ErrorKind.DEFECT if is_defect else ErrorKind.UNKNOWN


def is_outage(error: BaseException) -> bool:
    return classify(error) is ErrorKind.OUTAGE


def http_status(error: BaseException) -> int | None:
    return next((status for e in chain(error) if (status := _answer(e).status) is not None), None)


def store_code(error: BaseException) -> str | None:
    return next((code for e in chain(error) if (code := _answer(e).code) is not None), None)


def retry_after_s(error: BaseException) -> float:
    """Return the seconds of a store's header Retry-After (`120` or a date); 0 without it."""
    headers = (_answer(e).headers.get("retry-after") for e in chain(error))
    header = str(next((value for value in headers if value is not None), ""))
    try:
        if header.strip().isdigit():
            return float(header)
        when = parsedate_to_datetime(header)
        return max(0.0, (when - datetime.now(when.tzinfo or UTC)).total_seconds())
    except (ValueError, TypeError):
        return 0.0


def is_machine_fault(error: BaseException) -> bool:
    """Return True if a system call failed for a device, memory, open files or space."""
    return any(
        isinstance(each, OSError) and each.errno is not None and each.errno not in REFUSED_ERRNOS
        for each in chain(error)
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the exception, and the exceptions that it was raised from or while handling."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


class _Answer(NamedTuple):
    code: str | None  # The store's own error code.
    status: int | None
    headers: Mapping[str, Any]


def _answer(error: BaseException) -> _Answer:
    """Return a store's answer that a client keeps in its exception; without one, all is empty."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):  # botocore
        about = response.get("ResponseMetadata", {})
        code, headers = response.get("Error", {}).get("Code"), about.get("HTTPHeaders")
        value = about.get("HTTPStatusCode")
    else:  # requests and httpx have a response; aiohttp, gcsfs and Azure's client have attributes
        code = getattr(error, "error_code", None)
        code = getattr(code, "value", code)
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
        value = getattr(response, "status_code", None)
        for name in ("status", "code"):
            value = getattr(error, name, None) if value is None else value
    try:
        status = int(value) if isinstance(value, int | str) else 0
    except ValueError:
        status = 0
    return _Answer(
        None if code is None else str(code),
        status if 100 <= status < 600 else None,
        headers if isinstance(headers, Mapping) else {},
    )


def _by_class(error: BaseException) -> ErrorKind:
    for kind in type(error).__mro__:
        if kind.__name__ in REFUSED_CLASSES:
            return ErrorKind.REFUSED
        if kind.__name__ in OUTAGE_CLASSES:
            return ErrorKind.OUTAGE
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return ErrorKind.REFUSED
    # gcsfs raises a plain OSError for a 403.
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):
        return ErrorKind.REFUSED
    if isinstance(error, ConnectionError | TimeoutError | MemoryError | EOFError | ImportError):
        return ErrorKind.OUTAGE
    if isinstance(error, OSError) and error.errno is not None:
        return ErrorKind.REFUSED if error.errno in REFUSED_ERRNOS else ErrorKind.OUTAGE
    return ErrorKind.REFUSED if isinstance(error, ValueError) else ErrorKind.UNKNOWN


class EarmillError(Exception):
    """Base of all deliberate errors; secrets in the URIs of its message are removed here."""

    exit_code = 1
    help_topic = "when-something-fails"

    def __init_subclass__(cls, **attributes: str | int) -> None:
        """Set class attributes, written behind the bases: `class A(EarmillError, exit_code=2)`."""
        super().__init_subclass__()
        for name, value in attributes.items():
            setattr(cls, name, value)

    def __init__(self, *args: object) -> None:
        super().__init__(*(redact_text(arg) if isinstance(arg, str) else arg for arg in args))


class SpecError(EarmillError, ValueError, help_topic="the-job-file", exit_code=2):
    """The job spec is wrong: unknown key, bad value, unknown model or parameter."""


class ExtensionError(EarmillError, ImportError, help_topic="an-extension", exit_code=2):
    """A source kind or format is broken, or not registered by exactly one distribution."""


class SourceError(EarmillError, FileNotFoundError, help_topic="the-source", exit_code=2):
    """The source is missing or empty, or its row ids are not unique."""


class OutputError(EarmillError, OSError, help_topic="the-output", exit_code=2):
    """The output cannot be written, or belongs to another spec."""


class MissingPackageError(EarmillError, ImportError, help_topic="a-package", exit_code=2):
    """A needed package is not installed; the message has the command that installs it."""


class LockedError(OutputError, help_topic="another-driver"):
    """Another live driver works on the same output."""


class OvertakenError(LockedError, exit_code=1):
    """The run lost the output to another command or a removal, and ends without writing more."""


class CommitError(EarmillError, RuntimeError, help_topic="going-on"):
    """Plan, commits and files do not add up, or a shard could not be published."""


class HubError(EarmillError, OSError, help_topic="the-hub"):
    """The Hugging Face hub refuses, does not answer, or somebody else committed meanwhile."""


class SpillError(EarmillError, OSError, help_topic="no-space"):
    """The features of a long row cannot be held in a temporary file; the row may be good."""


class SourceOutage(EarmillError, OSError, help_topic="no-answer"):
    """The source does not answer, or this machine cannot read its bytes; rows may be good. The kind
    is `source`, or `missing` if the source answers but no object was ever read."""

    def __init__(self, message: str, kind: str = "source") -> None:
        super().__init__(message)
        self.kind = kind


class StorageError(EarmillError, OSError, help_topic="no-answer"):
    """A file of the output could not be read or written. If it is transient, a later try may
    succeed. The cause may have an error number."""

    def __init__(self, message: str, *, transient: bool = False, errno: int | None = None) -> None:
        super().__init__(message)
        self.transient = transient
        self.errno = errno

    @property
    def is_not_now(self) -> bool:
        """True if the store answered "not now"."""
        return self.transient and self.errno is None and http_status(self) is not None

    def __reduce__(self) -> tuple[partial[StorageError], tuple[str]]:
        make = partial(StorageError, transient=self.transient, errno=self.errno)
        return make, (str(self),)


class DeviceError(EarmillError, RuntimeError, help_topic="a-device", exit_code=2):
    """The job's device is missing, does not work, or computes wrong values."""


class DeviceLost(EarmillError, RuntimeError, help_topic="a-device"):
    """The device failed in a running process; it may work in another process."""


class RunStopped(EarmillError, RuntimeError, help_topic="going-on"):
    """The run ended early; committed shards stay, and `--resume` continues."""


class ClusterLost(RunStopped):
    """The run lost its Ray cluster."""


class RowError(EarmillError, ValueError):
    """One row cannot be processed; it becomes a quarantine row. `stage` is fetch, decode, channels,
    resample, extract or worker. `error_class` is the reason's name, stable across releases. The
    message says what was expected, got, and what to do."""

    help_topic = "quarantine"
    stage = "decode"
    error_class = "row_error"


class UnreadableError(RowError, stage="fetch", error_class="unreadable"):
    """The bytes could not be read, or are not the planned bytes."""


class NotRegularError(RowError, stage="fetch", error_class="not_regular"):
    """The named file is a pipe, device, socket or folder."""


class OutsideError(RowError, stage="fetch", error_class="outside_source"):
    """A table names a file that the source may not read."""


class AbsentError(UnreadableError):
    """The store refused this name: missing or forbidden. Certain once another object was read."""


class EmptyFileError(RowError, error_class="empty_file"):
    """The object has no bytes at all."""


class NotAudioError(RowError, error_class="not_audio"):
    """The bytes are not audio in any supported container."""


class UnsupportedError(RowError, error_class="unsupported"):
    """The container is known, but the codec in it is not supported."""


class TruncatedError(RowError, error_class="truncated"):
    """The stream does not end where its header states, or is damaged."""


class DecoderCrashError(RowError, error_class="decoder_crash"):
    """The bytes crash the decoder; found only with `run.decode_in_child`."""


class DecoderLimitError(RowError, error_class="decoder_limit"):
    """The decoder takes too much time or memory; found only with `run.decode_in_child`."""


class ZeroLengthError(RowError, error_class="zero_length"):
    """A valid container that holds no samples."""


class NonFiniteError(RowError, error_class="non_finite"):
    """NaN or infinite samples."""


class SampleRateError(RowError, error_class="sample_rate"):
    """A sample rate outside the accepted range."""


class SpanError(RowError, error_class="span"):
    """Start and end do not lie in this file."""


class ChannelIndexError(RowError, stage="channels", error_class="channel_index"):
    """The wanted channel does not exist."""


class ResampleRatioError(RowError, stage="resample", error_class="resample_ratio"):
    """The job's resampler cannot convert between these two rates."""


class MissingReferenceError(RowError, stage="fetch", error_class="missing_reference"):
    """The row names no reference recording, or its bytes cannot be read."""


class BadReferenceError(RowError, error_class="bad_reference"):
    """The reference recording of the row cannot be decoded or resampled."""


class PairLengthError(RowError, stage="resample", error_class="pair_length"):
    """The row and its reference recording differ too much in length."""


class BadListenerError(RowError, stage="extract", error_class="bad_listener"):
    """The column of the listener has no valid audiogram for the row."""


class TooShortError(RowError, stage="extract", error_class="too_short"):
    """Not enough samples for one frame of every stream."""


class TooLongError(RowError, stage="extract", error_class="too_long"):
    """Longer than the job allows, or too long for a stream that needs whole clips."""


class NonFiniteFeatureError(RowError, stage="extract", error_class="non_finite_feature"):
    """The model returned NaN or infinity for finite input."""


class DtypeRangeError(RowError, stage="extract", error_class="dtype_range"):
    """A feature value does not fit the output dtype."""


class WorkerCrashError(RowError, stage="worker", error_class="worker_crash"):
    """Processing this row kills or hangs its worker process."""


CLOSE_AGAIN = "run `earmill extract` with --resume, which closes the dataset again"


# Python and numpy raise MemoryError; torch, the dynamic linker and C++ raise other classes.
WORDS = (
    "allocate memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",
    "out of memory",
    "unable to allocate",
)
# Advice for a process that was killed, most likely by the system.
TOO_LITTLE = "most likely too little memory: give the machine more, or set fewer run.workers"
# The system answers EAGAIN if there are too many processes or threads.
_ERRNOS = (errno.ENOMEM, errno.EAGAIN)


def is_out_of_memory(error: BaseException) -> bool:
    return any(map(_is_memory_error, chain(error)))


def memory_text(error: BaseException) -> str:
    return (
        f"too little memory: {named_line(error)}; give this command more (`ulimit -v`, `ulimit "
        "-u`, the limit of its container or batch job), or let it take less: fewer run.workers, "
        "a smaller output.shard_seconds"
    )


def speaks_of_memory(text: str) -> bool:
    lower = text.lower()
    return any(word in lower for word in WORDS)


def _is_memory_error(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    if not isinstance(error, RuntimeError | ImportError | OSError):
        return False
    return speaks_of_memory(str(error))
