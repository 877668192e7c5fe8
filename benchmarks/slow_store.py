"""An S3 stand-in on loopback that waits before it answers: moto behind a fixed latency.

It is a process of its own, so that what it costs is not counted as the reader's; its cores are the
reader's all the same.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from earmill.pipeline.storage.layout import Layout

BUCKET = "features"


def _serve(latency_s: float) -> None:
    import logging

    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import WSGIRequestHandler, make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    answers = DomainDispatcherApplication(create_backend_app)

    def waiting(environ: Any, start_response: Any) -> Any:
        if environ["REQUEST_METHOD"] == "GET":
            time.sleep(latency_s)
        return answers(environ, start_response)

    class Handler(WSGIRequestHandler):
        protocol_version = "HTTP/1.1"

    server = make_server("127.0.0.1", 0, waiting, threaded=True, request_handler=Handler)
    print(server.server_port, flush=True)
    server.serve_forever()


@contextmanager
def slow_store(place: Path, latency_s: float) -> Iterator[tuple[str, dict[str, Any]]]:
    """A bucket with what is in a folder; yields its address and the options to open it."""
    command = [sys.executable, "-m", "benchmarks.slow_store", str(latency_s)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            url = f"http://127.0.0.1:{int(server.stdout.readline())}"
            options = {"key": "user", "secret": "secret", "endpoint_url": url}
            layout = Layout.open(f"s3://{BUCKET}/set", options)
            layout.fs.mkdir(BUCKET)
            files = [path for path in sorted(place.rglob("*")) if path.is_file()]
            for path in files:
                layout.fs.pipe_file(
                    layout.path(path.relative_to(place).as_posix()), path.read_bytes()
                )
            yield f"s3://{BUCKET}/set", options
        finally:
            server.terminate()


if __name__ == "__main__":
    _serve(float(sys.argv[1]))
