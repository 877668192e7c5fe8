"""What a worker and its decoding child say to each other, over a socket.

    frame = length of JSON, length of payload (two little-endian uint32), JSON, payload

Nothing is unpickled: a child that was taken over by the bytes it decodes can send numbers and text,
within bounds, and no more. A request carries an open file beside its JSON.
"""

from __future__ import annotations

import json
import socket
import struct
from typing import Any

LENGTHS = struct.Struct("<II")
MOST_JSON_BYTES = 1 << 16
# A block of as many channels as libsndfile takes.
MOST_PAYLOAD_BYTES = (1 << 16) * 1024 * 4


class MessageError(Exception):
    """The other side is gone, or says what it may not."""


def send(peer: socket.socket, message: dict[str, Any], payload: Any = b"") -> None:
    """One frame."""
    text = json.dumps(message).encode()
    view = memoryview(payload).cast("B")
    peer.sendall(LENGTHS.pack(len(text), len(view)) + text)
    if len(view):
        peer.sendall(view)


def receive(peer: socket.socket) -> tuple[dict[str, Any], bytearray]:
    """The next frame.

    Raises:
        MessageError: There is none, or it is none of ours.
        TimeoutError: Nothing came for as long as the socket waits.
    """
    text_bytes, payload_bytes = LENGTHS.unpack(_exactly(peer, LENGTHS.size))
    if text_bytes > MOST_JSON_BYTES or payload_bytes > MOST_PAYLOAD_BYTES:
        raise MessageError(f"a frame of {text_bytes} and {payload_bytes} bytes")
    try:
        message = json.loads(_exactly(peer, text_bytes))
    except ValueError as error:
        raise MessageError("a frame that is no JSON") from error
    if not isinstance(message, dict):
        raise MessageError("a frame that is no object")
    return message, _exactly(peer, payload_bytes)


def _exactly(peer: socket.socket, nbytes: int) -> bytearray:
    whole = bytearray(nbytes)
    view = memoryview(whole)
    while len(view):
        try:
            count = peer.recv_into(view)
        except ConnectionError as error:
            raise MessageError("gone") from error
        if not count:
            raise MessageError("gone")
        view = view[count:]
    return whole
