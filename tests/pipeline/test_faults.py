"""What exceptions say, one by one, each as its backend really raises it or a class of its name."""

from __future__ import annotations

import errno
import os
import pickle
import socket
import zipfile
import zlib
from itertools import pairwise

import aiohttp
import pytest
import s3fs.errors
from botocore import exceptions as botocore
from fsspec.exceptions import FSTimeoutError

from earmill.pipeline.common.errors import (
    ErrorKind,
    SourceOutage,
    StorageError,
    classify,
    http_status,
    is_machine_fault,
)
from earmill.pipeline.common.retries import RetryPolicy
from tests.pipeline.outages import Clock

DEFECT, OUTAGE, REFUSED, UNKNOWN = (
    ErrorKind.DEFECT,
    ErrorKind.OUTAGE,
    ErrorKind.REFUSED,
    ErrorKind.UNKNOWN,
)


def client_error(code: str, status: int) -> botocore.ClientError:
    response = {
        "Error": {"Code": code, "Message": code},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return botocore.ClientError(response, "GetObject")  # type: ignore[arg-type]


def s3(code: str, status: int) -> BaseException:
    """As s3fs hands it on: a Python exception with botocore's behind it."""
    return s3fs.errors.translate_boto_error(client_error(code, status))


def http(status: int) -> BaseException:
    info = aiohttp.RequestInfo(None, "GET", None, None)  # type: ignore[arg-type]
    return aiohttp.ClientResponseError(info, (), status=status)


def wrapped(error: BaseException) -> BaseException:
    """Behind a class that says nothing, as fsspec and datasets do."""
    try:
        raise RuntimeError("could not read") from error
    except RuntimeError as outer:
        return outer


class HfHubHTTPError(Exception):
    """As huggingface_hub raises it: the response is an object."""

    def __init__(self, status: int) -> None:
        super().__init__(f"{status}")
        self.response = type("Response", (), {"status_code": status})()


class ConnectTimeout(Exception):
    """As httpx names it; no OSError."""


SAID = [
    (FileNotFoundError(errno.ENOENT, "gone"), REFUSED),
    (FileNotFoundError("http://x/a.wav"), REFUSED),
    (PermissionError(errno.EACCES, "no"), REFUSED),
    (IsADirectoryError(errno.EISDIR, "folder"), REFUSED),
    (OSError(errno.ENAMETOOLONG, "long"), REFUSED),
    (OSError(errno.ELOOP, "loop"), REFUSED),
    (ValueError("Protocol not known: nope"), REFUSED),
    (s3("NoSuchKey", 404), REFUSED),
    (s3("404", 404), REFUSED),
    (s3("NoSuchBucket", 404), REFUSED),
    (s3("AccessDenied", 403), REFUSED),
    (s3("403", 403), REFUSED),
    (s3("400", 400), REFUSED),
    (http(404), REFUSED),
    (http(410), REFUSED),
    (http(401), REFUSED),
    (HfHubHTTPError(404), REFUSED),
    (botocore.ParamValidationError(report="bucket"), REFUSED),
    *[(OSError(getattr(errno, name), name), OUTAGE) for name in (
        "EIO ESTALE EMFILE ENFILE ENOMEM ENOSPC EDQUOT EROFS ENODEV ENOTCONN EHOSTUNREACH EBUSY "
        "ENETUNREACH ETIMEDOUT ECONNRESET ECONNREFUSED EPIPE EHOSTDOWN EAGAIN".split()
    )],
    (s3("SlowDown", 503), OUTAGE),
    (s3("503", 503), OUTAGE),
    (s3("InternalError", 500), OUTAGE),
    (s3("500", 500), OUTAGE),
    (s3("RequestTimeout", 400), OUTAGE),
    (s3("ExpiredToken", 400), OUTAGE),
    (s3("TokenRefreshRequired", 400), OUTAGE),
    (s3("RequestTimeTooSkewed", 403), OUTAGE),
    (s3("TooManyRequests", 429), OUTAGE),
    (http(429), OUTAGE),
    (http(408), OUTAGE),
    (http(500), OUTAGE),
    (http(502), OUTAGE),
    (http(504), OUTAGE),
    (HfHubHTTPError(503), OUTAGE),
    (ConnectTimeout("no answer"), OUTAGE),
    (botocore.EndpointConnectionError(endpoint_url="http://x"), OUTAGE),
    (botocore.ConnectTimeoutError(endpoint_url="http://x"), OUTAGE),
    (botocore.ReadTimeoutError(endpoint_url="http://x"), OUTAGE),
    (botocore.NoCredentialsError(), OUTAGE),
    (aiohttp.ServerDisconnectedError(), OUTAGE),
    (aiohttp.ClientPayloadError("not all data"), OUTAGE),
    (aiohttp.ClientOSError(errno.ECONNRESET, "reset"), OUTAGE),
    (FSTimeoutError(), OUTAGE),
    (TimeoutError(), OUTAGE),
    (socket.gaierror(socket.EAI_NONAME, "Name or service not known"), OUTAGE),
    (ConnectionError("Server Disconnected"), OUTAGE),
    (MemoryError(), OUTAGE),
    (ImportError("install gcsfs"), OUTAGE),
    (RuntimeError("who knows"), UNKNOWN),
    (OSError("Corrupt snappy compressed data"), UNKNOWN),
    (KeyError("x"), DEFECT),
    (TypeError("unexpected keyword"), DEFECT),
    (AttributeError("no such attribute"), DEFECT),
    (zipfile.BadZipFile("no archive"), DEFECT),
    (zlib.error("incorrect data check"), DEFECT),
]  # fmt: skip


@pytest.mark.parametrize(("error", "expected"), SAID, ids=lambda value: str(value)[:40])
def test_what_an_exception_says(error: BaseException, expected: ErrorKind) -> None:
    assert classify(error) is expected
    assert classify(wrapped(error)) is expected


def test_an_answer_of_the_store_outweighs_the_class_around_it() -> None:
    try:
        try:
            raise client_error("SlowDown", 503)
        except botocore.ClientError as error:
            raise FileNotFoundError("corpus/a.wav") from error
    except FileNotFoundError as error:
        assert classify(error) is OUTAGE and http_status(error) == 503


def test_a_chain_that_bites_its_tail_ends() -> None:
    one, other = RuntimeError("a"), RuntimeError("b")
    one.__cause__, other.__cause__ = other, one
    assert classify(one) is UNKNOWN


def test_faults_of_the_machine_are_told_from_those_of_a_name() -> None:
    assert is_machine_fault(wrapped(OSError(errno.EMFILE, "too many open files")))
    assert not is_machine_fault(FileNotFoundError(errno.ENOENT, "gone"))
    assert not is_machine_fault(MemoryError()) and not is_machine_fault(OSError("no number"))


def test_errors_survive_a_trip_between_processes() -> None:
    outage = pickle.loads(pickle.dumps(SourceOutage("away", "missing")))
    assert (str(outage), outage.kind, outage.exit_code) == ("away", "missing", 1)
    error = pickle.loads(pickle.dumps(StorageError("full", transient=True, errno=errno.ENOSPC)))
    assert (str(error), error.transient, error.errno) == ("full", True, errno.ENOSPC)
    assert not isinstance(outage, FileNotFoundError) and os.strerror(error.errno)


def test_pauses_grow_within_the_budget_and_only_for_what_is_worth_it() -> None:
    clock, calls = Clock(), []

    def work() -> None:
        calls.append(clock())
        raise ConnectionError("away")

    with pytest.raises(ConnectionError):
        clock.retries(budget_s=20.0).run(work, lambda error: True)
    pauses = [after - before for before, after in pairwise(calls)]
    assert pauses == pytest.approx([0.2, 0.4, 0.8, 1.6, 3.2, 6.4])
    assert calls[-1] <= 20.0 < calls[-1] + 8.0
    calls.clear()
    with pytest.raises(ConnectionError):
        clock.retries().run(work, lambda error: False)
    assert len(calls) == 1


def test_pauses_are_drawn_between_half_and_whole() -> None:
    for drawn, expected in ((0.0, 0.1), (0.5, 0.15)):
        clock, answers = Clock(), [True]

        def work(answers: list[bool] = answers) -> str:
            if answers.pop() if answers else False:
                raise ConnectionError("away")
            return "there"

        retries = RetryPolicy(9.0, clock=clock, sleep=clock.sleep, jitter=lambda drawn=drawn: drawn)
        assert retries.run(work, lambda error: True) == "there"
        assert clock() == pytest.approx(expected)
