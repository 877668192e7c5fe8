"""A process that decodes untrusted bytes for a worker, and the messages between the two.

The command `python -P -m earmill.pipeline.audio.decoder_process SOCKET MEMORY_BYTES` serves
requests until the worker (`decoder_pool`) is gone. The process has no credentials in its
environment and can write no file. Memory and CPU time of a block are limited.

    frame = length of JSON, length of payload (two little-endian uint32), JSON, payload

Nothing is unpickled: a child that its input has taken over can send only numbers and text within
bounds. A request has an open file beside its JSON.
"""

from __future__ import annotations

import json
import os
import resource
import socket
import struct
import sys
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from earmill.pipeline.audio.decode import BlockReader, Limits
from earmill.pipeline.common.errors import RowError

LENGTHS = struct.Struct("<II")
MOST_JSON_BYTES = 1 << 16
MOST_PAYLOAD_BYTES = (1 << 16) * 1024 * 4  # A block of as many channels as libsndfile takes.


def send(peer: socket.socket, message: dict[str, Any], payload: Any = b"") -> None:
    text = json.dumps(message).encode()
    view = memoryview(payload).cast("B")
    peer.sendall(LENGTHS.pack(len(text), len(view)) + text)
    if len(view):
        peer.sendall(view)


def receive(peer: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """Return the next frame. TimeoutError if nothing came within the socket's timeout,
    ConnectionError if the other side is gone, ValueError if the frame is invalid."""
    text_bytes, payload_bytes = LENGTHS.unpack(_exactly(peer, LENGTHS.size))
    if text_bytes > MOST_JSON_BYTES or payload_bytes > MOST_PAYLOAD_BYTES:
        raise ValueError(f"a frame of {text_bytes} and {payload_bytes} bytes")
    message = json.loads(_exactly(peer, text_bytes))
    if not isinstance(message, dict):
        raise ValueError("a frame that is no object")
    return message, _exactly(peer, payload_bytes)


def _exactly(peer: socket.socket, nbytes: int) -> bytearray:
    whole = bytearray(nbytes)
    view = memoryview(whole)
    while len(view):
        count = peer.recv_into(view)
        if not count:
            raise ConnectionAbortedError("the other side is gone")
        view = view[count:]
    return whole


def serve(peer: socket.socket) -> None:
    while True:
        sent, handles, _, _ = socket.recv_fds(peer, 1, 1)
        if not sent:
            return
        with os.fdopen(handles[0], "rb") as file:
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


def _decode(peer: socket.socket, request: dict[str, Any], stream: BinaryIO) -> None:
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
    with socket.socket(fileno=handle) as peer:
        try:
            send(peer, {"ready": os.getpid()})
            serve(peer)
        except ConnectionError:
            return  # the worker is gone, or has closed this file


if __name__ == "__main__":
    main()
