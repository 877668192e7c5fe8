"""A process that decodes untrusted bytes for a worker, and the messages between the two.

The command `python -P -m earmill.pipeline.audio.decoder_process SOCKET MEMORY_BYTES` serves
requests until the worker (`decoder_pool`) is gone. The process has no credentials in its
environment and can write no file. Memory and CPU time of a block are limited.

    message = JSON, payload; each of them bytes with their length in front (`Connection`)

Nothing is unpickled: a child that its input has taken over can send only numbers and text within
bounds. An open file goes ahead of each request.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from contextlib import suppress
from dataclasses import asdict
from multiprocessing import reduction
from multiprocessing.connection import Connection
from typing import Any, BinaryIO

import numpy as np

from earmill.pipeline.audio.decode import BlockReader, Limits
from earmill.pipeline.common.errors import RowError

MOST_JSON_BYTES = 1 << 16
MOST_PAYLOAD_BYTES = (1 << 16) * 1024 * 4  # A block of as many channels as libsndfile takes.


class MessageError(Exception):
    """The other side is gone, or sent an invalid message."""


def send(peer: Connection[Any, Any], message: dict[str, Any], payload: Any = b"") -> None:
    peer.send_bytes(json.dumps(message).encode())
    peer.send_bytes(payload)


def receive(
    peer: Connection[Any, Any], timeout_s: float | None = None
) -> tuple[dict[str, Any], bytes]:
    """Return the next message and its payload; TimeoutError if none begins within `timeout_s`."""
    if not peer.poll(timeout_s):
        raise TimeoutError("timed out")
    try:
        message = json.loads(peer.recv_bytes(MOST_JSON_BYTES))
        payload = peer.recv_bytes(MOST_PAYLOAD_BYTES)
    except (EOFError, OSError, ValueError) as error:
        raise MessageError("gone, or a message that is too long or no JSON") from error
    if not isinstance(message, dict):
        raise MessageError("a message that is no object")
    return message, payload


def serve(peer: Connection[Any, Any]) -> None:
    while True:
        with os.fdopen(reduction.recv_handle(peer), "rb") as file:
            request, _ = receive(peer)
            try:
                _decode(peer, request, file)
            except RowError as error:
                cause = error.__cause__
                number = cause.errno if isinstance(cause, OSError) else None
                name = type(error).__name__
                send(peer, {"error": name, "message": str(error), "errno": number})
            except MemoryError:
                send(peer, {"error": "memory"})


def _decode(peer: Connection[Any, Any], request: dict[str, Any], stream: BinaryIO) -> None:
    cpu_s, limits = request.pop("cpu_s"), Limits(**request.pop("limits"))
    _allow_cpu(cpu_s)
    with BlockReader(stream, limits=limits, **request) as reader:
        send(peer, {"rate_hz": reader.rate_hz, "channel_ids": list(reader.channel_ids)})
        for block in reader:
            send(peer, {"rows": len(block)}, np.ascontiguousarray(block, "<f4"))
            _allow_cpu(cpu_s)
        send(peer, {"facts": asdict(reader.facts)})


def _allow_cpu(seconds: float) -> None:
    """Let the system end this process after this many more seconds of CPU time."""
    spent = resource.getrusage(resource.RUSAGE_SELF)
    whole = int(spent.ru_utime + spent.ru_stime + seconds) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (whole, resource.RLIM_INFINITY))


def main() -> None:
    handle, memory_bytes = int(sys.argv[1]), int(sys.argv[2])
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    for limit in (resource.RLIMIT_FSIZE, resource.RLIMIT_CORE):
        resource.setrlimit(limit, (0, 0))
    peer: Connection[Any, Any] = Connection(handle)
    # The worker is gone, or has closed this file.
    with suppress(MessageError, EOFError, BrokenPipeError, ConnectionResetError):
        send(peer, {"ready": os.getpid()})
        serve(peer)


if __name__ == "__main__":
    main()
