"""GET over a connection that is kept, for a fraction of what `http.client` takes of a processor.

Connections are its own, with certificates and time-outs; but it reads the head of an answer by a
parser of e-mails, in 0.3 ms. What is known here is what stores answer who are asked for an object:
a body of a length that the head tells.
"""

from __future__ import annotations

import socket
import ssl
import struct
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from http import HTTPStatus
from http.client import HTTPConnection, HTTPSConnection

# Fills memory; False where there is not so much.
Fill = Callable[[memoryview], bool]
# As botocore has it, where nothing else is set.
STALL_S = 60.0
END, HEAD_BYTES, MAX_HEAD_BYTES = b"\r\n\r\n", 2**14, 2**16


def connect(scheme: str, netloc: str, stall_s: float, certificates: str | None) -> HTTPConnection:
    """A connection, made when it is first asked over.

    Args:
        stall_s: Without a byte for so long it is given up.
        certificates: File of those to trust; None for botocore's.
    """
    if scheme == "https":
        return HTTPSConnection(netloc, timeout=stall_s, context=_trust(certificates))
    return HTTPConnection(netloc, timeout=stall_s)


@lru_cache
def _trust(certificates: str | None) -> ssl.SSLContext:
    from botocore.httpsession import get_cert_path

    return ssl.create_default_context(cafile=certificates or get_cert_path(True))


@dataclass
class Answer:
    """A status and the fields of a head, their names in small letters.

    Args:
        sock: Where the body comes from.
        early: What of the body came with the head.
    """

    sock: socket.socket
    version: str
    status: int
    fields: Mapping[str, str]
    early: memoryview

    @property
    def length(self) -> int | None:
        """Bytes of the body; None where only its end tells."""
        if "transfer-encoding" in self.fields or "content-length" not in self.fields:
            return None
        return int(self.fields["content-length"])

    @property
    def will_close(self) -> bool:
        """Whether the connection ends with it."""
        told = self.fields.get("connection", "").lower()
        return self.version != "HTTP/1.1" or "close" in told

    def is_range(self, wanted: str, nbytes: int) -> bool:
        """Whether the body is exactly what was asked for."""
        place = self.fields.get("content-range", "")
        partial = self.status == HTTPStatus.PARTIAL_CONTENT
        return partial and place.startswith(f"bytes {wanted}/") and self.length == nbytes

    @contextmanager
    def receiving(self) -> Iterator[Fill]:
        """Inside, memory can be filled with the next bytes of the body."""
        sock, flags = self.sock, 0
        stall_s = sock.gettimeout() or STALL_S
        if type(sock) is socket.socket:
            # In as few calls as the kernel allows: after each a thread waits for the interpreter
            # anew, behind all others. With a time-out of Python's the kernel would give what is
            # there; this one is the kernel's own.
            flags, stall = socket.MSG_WAITALL, (int(stall_s), int(1e6 * (stall_s % 1)))
            sock.settimeout(None)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *stall))

        def fill(view: memoryview) -> bool:
            """False where the body ends too early."""
            done = min(len(view), len(self.early))
            view[:done], self.early = self.early[:done], self.early[done:]
            while done < len(view):
                count = sock.recv_into(view[done:], 0, flags)
                if not count:
                    return False
                done += count
            return True

        yield fill
        sock.settimeout(stall_s)


def ask(connection: HTTPConnection, host: str, target: str, headers: Mapping[str, str]) -> Answer:
    """Ask for an object; the connection is closed where no answer comes.

    Args:
        host: As the URL has it: it is signed. target: Path and query, quoted.
    Raises:
        ConnectionError: The store hung up; a connection that waited for long may have been closed.
        OSError, ValueError: Nothing that can be read came.
    """
    try:
        if connection.sock is None:
            connection.connect()
        fields = {"Host": host, "Accept-Encoding": "identity", **headers}
        lines = [f"GET {target} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items())]
        connection.sock.sendall("\r\n".join([*lines, "", ""]).encode("ascii"))
        found, end = b"", -1
        while end < 0:
            more = connection.sock.recv(HEAD_BYTES)
            if not more or len(found) > MAX_HEAD_BYTES:
                raise ConnectionResetError("the store hung up, or its answer has no end")
            found += more
            end = found.find(END)
        first, *rest = found[:end].decode("latin-1").split("\r\n")
        version, status, *_ = first.split(" ")
        told = (line.partition(":") for line in rest)
        fields = {name.lower(): value.strip() for name, _, value in told}
        return Answer(
            connection.sock, version, int(status), fields, memoryview(found)[end + len(END) :]
        )
    except BaseException:
        connection.close()
        raise
