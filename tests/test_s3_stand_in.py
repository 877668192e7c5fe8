"""The S3 server of the tests answers each request as if it were alone."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tests.s3_stand_in import one_at_a_time

REQUESTS = 16


class Store:
    """An application that keeps the bodies, and sees how many requests are in it at once."""

    def __init__(self) -> None:
        self.inside, self.most = 0, 0
        self.bodies: list[bytes] = []

    def __call__(self, environ: dict[str, Any], start_response: Callable[..., Any]) -> list[bytes]:
        self.inside += 1
        self.most = max(self.most, self.inside)
        time.sleep(0.005)
        self.bodies.append(environ["wsgi.input"].read())
        self.inside -= 1
        return []


def test_no_two_requests_are_in_the_store() -> None:
    store = Store()
    app = one_at_a_time(store)

    def put(number: int) -> None:
        body = io.BytesIO(bytes([number]) * 9 + b"the next request")
        app({"CONTENT_LENGTH": "9", "wsgi.input": body}, lambda *_: None)

    with ThreadPoolExecutor(REQUESTS) as pool:
        list(pool.map(put, range(REQUESTS)))
    assert store.most == 1
    assert sorted(store.bodies) == [bytes([number]) * 9 for number in range(REQUESTS)]


def test_a_body_without_a_length_is_read_to_its_end() -> None:
    store = Store()
    body = io.BytesIO(b"in chunks")
    one_at_a_time(store)({"wsgi.input_terminated": True, "wsgi.input": body}, lambda *_: None)
    one_at_a_time(store)({"wsgi.input": io.BytesIO()}, lambda *_: None)
    assert store.bodies == [b"in chunks", b""]
