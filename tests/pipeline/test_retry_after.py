"""A store that says when to come back is left alone until then, whoever's client told us."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest

from earmill.pipeline.common.errors import ErrorKind, classify, retry_after_s
from earmill.pipeline.common.redact import redact_text
from tests.pipeline.outages import Clock


class Refused(Exception):
    """An error with whatever a client keeps in it."""

    def __init__(self, **kept: Any) -> None:
        super().__init__("no")
        self.__dict__.update(kept)


def errors(header: str) -> dict[str, Exception]:
    """The same answer as each client has it."""
    headers = {"retry-after": header}
    said = {"HTTPStatusCode": 503, "HTTPHeaders": headers}
    return {
        "botocore": Refused(response={"Error": {"Code": "SlowDown"}, "ResponseMetadata": said}),
        "aiohttp": Refused(status=503, headers=headers),
        "requests": Refused(response=SimpleNamespace(status_code=503, headers=headers)),
    }


@pytest.mark.parametrize("client", ["botocore", "aiohttp", "requests"])
def test_the_header_is_found_in_every_client_s_error(client: str) -> None:
    assert retry_after_s(errors("12")[client]) == 12
    when = format_datetime(datetime.now(UTC) + timedelta(seconds=40), usegmt=True)
    assert 35 < retry_after_s(errors(when)[client]) <= 40
    for nonsense in ("soon", "-3", "", "nan"):
        assert retry_after_s(errors(nonsense)[client]) == 0
    wrapped = OSError("cannot be read")
    wrapped.__cause__ = errors("7")[client]
    assert retry_after_s(wrapped) == 7


def test_nobody_comes_back_before_the_store_wants_it() -> None:
    clock, asked = Clock(), []

    def work() -> int:
        asked.append(clock.now_s)
        if len(asked) < 3:
            raise errors("10")["aiohttp"]
        return 1

    assert clock.retries(60).run(work, lambda error: True) == 1
    assert [round(later - sooner, 1) for sooner, later in pairwise(asked)] == [10.2, 10.4]


def test_nobody_waits_for_what_comes_after_the_budget() -> None:
    clock = Clock()

    def work() -> None:
        raise errors("3600")["botocore"]

    with pytest.raises(Refused):
        clock.retries(60).run(work, lambda error: True)
    assert clock.now_s == 0


def named(name: str, base: type[Exception] = Exception, **kept: Any) -> Exception:
    """An error of a class that only its name tells."""
    error = type(name, (base,), {})("what happened")
    error.__dict__.update(kept)
    return error


def azure(status: int, code: str) -> Exception:
    """An answer in the form of Azure's client."""
    return named("HttpResponseError", response=SimpleNamespace(status_code=status), error_code=code)


@pytest.mark.parametrize(
    ("error", "fault"),
    [
        (OSError("Forbidden: https://storage.googleapis.com/b\nno"), ErrorKind.REFUSED),
        (named("HttpError", code=429), ErrorKind.OUTAGE),
        (named("HttpError", code=404), ErrorKind.REFUSED),
        (named("ProxyError", OSError), ErrorKind.OUTAGE),
        (named("RefreshError", type(named("GoogleAuthError"))), ErrorKind.OUTAGE),
        (named("ServiceRequestError"), ErrorKind.OUTAGE),
        (named("ServiceResponseError"), ErrorKind.OUTAGE),
        (azure(403, "AuthorizationFailure"), ErrorKind.REFUSED),
        (azure(403, "AuthenticationFailed"), ErrorKind.OUTAGE),
    ],
)
def test_what_google_s_and_azure_s_clients_raise(error: Exception, fault: ErrorKind) -> None:
    assert classify(error) is fault


def test_a_connection_string_in_a_message_loses_its_key() -> None:
    text = "cannot use AccountName=me;AccountKey=c2VjcmV0+/==;BlobEndpoint=http://h/me;"
    assert redact_text(text) == "cannot use AccountName=me;AccountKey=***;BlobEndpoint=http://h/me;"
