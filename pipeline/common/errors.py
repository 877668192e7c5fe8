"""Errors that are raised on purpose, and the classification of foreign exceptions.

Job errors stop the run before work starts and map to an exit code; row errors travel into the
quarantine table and stop nothing else; outages are neither: what they hit is tried again later.
Each class also inherits the built-in a caller would expect.

`fault_of` classifies exceptions of other libraries. Backends raise classes of their own (botocore,
aiohttp, httpx, errno in many dresses), and this is the one place that knows them. Four answers,
looked for along the chain of causes:

- REFUSED: the store answered and said no to this name: missing, forbidden, no such form of name. It
  is a property of the object only while others can be had.
- OUTAGE: nobody answered, or the answer was "not now", or this machine ran out of something. It is
  never a property of the object.
- DEFECT: a program failed over this very name or content. Asking again gives the same, so a row is
  lost and no outage is waited for.
- UNKNOWN: none of them; the caller decides.

`is_out_of_memory` recognises that memory ran out, whatever class and words a library uses.
"""

from __future__ import annotations

import errno
import lzma
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum

from earmill.pipeline.common.redact import redact_text
from earmill.pipeline.common.text import named_line


class Fault(Enum):
    """See the module."""

    REFUSED = "refused"
    OUTAGE = "outage"
    DEFECT = "defect"
    UNKNOWN = "unknown"


DEFECT_CLASSES = (
    # Programs raise these over a name or value that they were not written for.
    *(ArithmeticError, AssertionError, AttributeError, LookupError, NameError),
    *(NotImplementedError, RecursionError, TypeError),
    # An archive that is damaged.
    *(lzma.LZMAError, struct.error, tarfile.TarError, zipfile.BadZipFile, zlib.error),
)
# What the system says of a name. Every other number is about a device, a network or this process.
REFUSED_ERRNOS = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ENAMETOOLONG,
        errno.ELOOP,
        errno.EACCES,
        errno.EPERM,
        errno.EINVAL,
        errno.EEXIST,
    }
)
# Stores answer 400 and 403 for credentials that ran out as well as for a bad name; codes tell.
OUTAGE_CODES = frozenset(
    {
        "ExpiredToken",
        "ExpiredTokenException",
        "AuthenticationFailed",  # of Azure, for signatures and tokens past their time
        "InternalError",
        "InvalidToken",
        "RequestExpired",
        "RequestLimitExceeded",
        "RequestTimeTooSkewed",
        "RequestTimeout",
        "ServiceUnavailable",
        "SlowDown",
        "Throttling",
        "ThrottlingException",
        "TokenRefreshRequired",
        "TooManyRequestsException",
        "500",
        "502",
        "503",
        "504",
    }
)
OUTAGE_STATUS = frozenset({408, 425, 429})
# By name, because their packages are imported only where they are used.
REFUSED_CLASSES = frozenset({"ParamValidationError", "InvalidURL", "EntryNotFoundError"})
OUTAGE_CLASSES = frozenset(
    {
        "BotoCoreError",  # endpoint, DNS, TLS, time-out, no credentials; not an answer of the store
        "ChunkedEncodingError",
        "ClientConnectionError",
        "ClientPayloadError",
        "ChecksumError",  # gcsfs: what arrived is not what was sent
        "ConnectTimeout",
        "ConnectionError",  # that of requests is not Python's
        "FSTimeoutError",
        "HTTPClientError",
        "GoogleAuthError",
        "IncompleteRead",
        "IncompleteReadError",
        "ProxyError",  # gcsfs makes it of 502
        "ServerDisconnectedError",
        "ServiceRequestError",  # Azure: no connection
        "ServiceResponseError",  # Azure: no whole answer
        "Timeout",
        "TimeoutException",
        "TransportError",
        "gaierror",
    }
)


def fault_of(error: BaseException) -> Fault:
    """What the exception says."""
    # An answer of the store says more than the class a wrapper made of it.
    for one in chain(error):
        code, status = _code(one), _status(one)
        if code in OUTAGE_CODES:
            return Fault.OUTAGE
        if status is not None:
            return _by_status(status)
    for one in chain(error):
        found = _by_class(one)
        if found is not Fault.UNKNOWN:
            return found
    # Last: clients that meet an outage may fail over it.
    is_defect = any(isinstance(one, DEFECT_CLASSES) for one in chain(error))
    return Fault.DEFECT if is_defect else Fault.UNKNOWN


def http_status(error: BaseException) -> int | None:
    """The HTTP status inside a store's error, wherever the backend keeps it."""
    return next((found for one in chain(error) if (found := _status(one)) is not None), None)


def store_code(error: BaseException) -> str | None:
    """The store's own word for what is wrong, where it has one."""
    return next((found for one in chain(error) if (found := _code(one)) is not None), None)


def retry_after_s(error: BaseException) -> float:
    """Seconds that a store asks to be left alone (the header Retry-After); 0 if it does not."""
    for one in chain(error):
        asked = _header(one, "retry-after")
        if asked is not None:
            return _seconds(asked)
    return 0.0


def is_machine_fault(error: BaseException) -> bool:
    """Whether a system call failed for this machine's sake: a device, memory, open files, space."""
    return any(
        isinstance(one, OSError) and one.errno is not None and one.errno not in REFUSED_ERRNOS
        for one in chain(error)
    )


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from or while handling; each once."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _code(error: BaseException) -> str | None:
    """A store's own error code, as botocore and Azure's client keep it."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        code = response.get("Error", {}).get("Code")
    else:
        code = getattr(error, "error_code", None)
        code = getattr(code, "value", code)
    return None if code is None else str(code)


def _header(error: BaseException, name: str) -> str | None:
    """botocore: a dictionary in lower case; aiohttp: `headers`; the others: those of a response."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        headers = response.get("ResponseMetadata", {}).get("HTTPHeaders")
    else:
        headers = getattr(response, "headers", None) or getattr(error, "headers", None)
    found = headers.get(name) if isinstance(headers, Mapping) else None
    return None if found is None else str(found)


def _seconds(header: str) -> float:
    """Of `120` or of a date; 0 for nonsense."""
    try:
        return max(0.0, float(header)) if header.strip().isdigit() else _until(header)
    except (ValueError, TypeError):
        return 0.0


def _until(date: str) -> float:
    when = parsedate_to_datetime(date)
    return max(0.0, (when - datetime.now(when.tzinfo or UTC)).total_seconds())


def _status(error: BaseException) -> int | None:
    """botocore: a dictionary; requests and httpx: an object; aiohttp: `status`; gcsfs: `code`."""
    response = getattr(error, "response", None)
    if isinstance(response, dict):
        found = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    else:
        found = getattr(response, "status_code", None)
        for name in ("status", "code"):
            found = getattr(error, name, None) if found is None else found
    try:
        status = int(found) if isinstance(found, int | str) else 0
    except ValueError:
        return None
    return status if 100 <= status < 600 else None


def _by_status(status: int) -> Fault:
    # 501 and 505 are of no use to anybody, but say nothing of the object either.
    return Fault.OUTAGE if status >= 500 or status in OUTAGE_STATUS else Fault.REFUSED


def _by_class(error: BaseException) -> Fault:
    for kind in type(error).__mro__:
        if kind.__name__ in REFUSED_CLASSES:
            return Fault.REFUSED
        if kind.__name__ in OUTAGE_CLASSES:
            return Fault.OUTAGE
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return Fault.REFUSED
    # gcsfs makes a plain OSError of a 403.
    if isinstance(error, PermissionError) or str(error).startswith("Forbidden: "):
        return Fault.REFUSED
    if isinstance(error, ConnectionError | TimeoutError | MemoryError | EOFError | ImportError):
        return Fault.OUTAGE
    if isinstance(error, OSError) and error.errno is not None:
        return Fault.REFUSED if error.errno in REFUSED_ERRNOS else Fault.OUTAGE
    return Fault.REFUSED if isinstance(error, ValueError) else Fault.UNKNOWN


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


# Python and numpy raise MemoryError; torch, the loader of shared libraries and C++ have words.
WORDS = (
    "allocate memory",
    "bad_alloc",
    "can't start new thread",
    "failed to map segment",
    "out of memory",
    "unable to allocate",
)
# For a process that the system has killed, as far as anybody can tell.
TOO_LITTLE = "most likely too little memory: give the machine more, or set fewer run.workers"
# EAGAIN is what the system says of one process or thread too many.
_ERRNOS = (errno.ENOMEM, errno.EAGAIN)


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an exception, or one that it was raised from, says that memory ran out."""
    return any(map(_says_so, chain(error)))


def memory_text(error: BaseException) -> str:
    """Return a line for people: what happened, and what to do."""
    return (
        f"too little memory: {named_line(error)}; give this command more (`ulimit -v`, `ulimit "
        "-u`, the limit of its container or batch job), or let it take less: fewer run.workers, "
        "a smaller output.shard_seconds"
    )


def speaks_of_memory(text: str) -> bool:
    """Return True if the last words of a process say that memory ran out."""
    said = text.lower()
    return any(word in said for word in WORDS)


def _says_so(error: BaseException) -> bool:
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _ERRNOS
    if not isinstance(error, RuntimeError | ImportError | OSError):
        return False
    return speaks_of_memory(str(error))
