"""An S3 server on loopback (moto) that takes one request after the other.

A store answers each request as if it were alone. Moto does not: its handlers share dictionaries
without a lock, so that a part which arrives while its upload is given up makes an error 500 of it,
and of two that create one name both may win. Bodies are read before a request's turn comes, so that
a sender who stalls holds up nobody else.
"""

from __future__ import annotations

import io
import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

App = Callable[..., Any]
# All servers of one process share their buckets.
_turn = threading.Lock()


def one_at_a_time(app: App) -> App:
    """The WSGI application with no two requests in it."""

    def call(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
        given = environ.get("CONTENT_LENGTH")
        if given or environ.get("wsgi.input_terminated"):
            stream = environ["wsgi.input"]
            environ["wsgi.input"] = io.BytesIO(stream.read(int(given)) if given else stream.read())
        with _turn:
            return app(environ, start_response)

    return call


@contextmanager
def s3_stand_in(around: Callable[[App], App] = lambda app: app) -> Iterator[str]:
    """The server's address while the block lasts.

    Args:
        around: What stands before the store.
    """
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    running: Any = server._server
    running.app = around(one_at_a_time(running.app))
    try:
        yield f"http://{host}:{port}"
    finally:
        server.stop()
