"""A server in front of another one, which disturbs what goes through it; a process, to be killed.

    python -m tests.chaos.faulty_server PORT PORT_BEHIND RULES.json MET.log

A rule says which requests it disturbs and how:

    status         answers so, and asks nobody                    (500, 503, 429 of a store)
    lost           carries the request out and answers 500
    reset          closes with a reset, and asks nobody
    reset_after    carries the request out and closes with a reset
    cut            answers with half of the body, and closes
    short          answers with half of the body as if that were all
    stall          waits before it asks; who asked has left, and it is carried out late
    slow           sends the body in pieces, with pauses

What each rule has met is in a log that outlives the process, so that one that was killed and comes
back goes on counting. Imports nothing but the standard library: it must be back at once.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import struct
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

REFUSED = ("status", "reset")
# Of one answer on its way to whoever asked; the others are the front's to say.
NOT_PASSED_ON = {"transfer-encoding", "connection", "content-length", "date", "server"}
SLOW_PIECES = 8


@dataclass(frozen=True)
class Rule:
    """Which requests are disturbed, and how.

    Args:
        kind: See the module. method, path: Regular expressions of whole names.
        after: So many requests go through before. times: So many are disturbed then.
        status: Of the kind `status`. seconds: Of `stall` and `slow`.
    """

    kind: str
    method: str = "GET|HEAD|PUT|POST|DELETE"
    path: str = ".*"
    after: int = 0
    times: int = 1
    status: int = 503
    seconds: float = 0.0

    def matches(self, method: str, path: str) -> bool:
        """Whether it is about this request."""
        return bool(re.fullmatch(self.method, method) and re.fullmatch(self.path, path))


class Rules:
    """The rules, and how often each was met.

    Args:
        rules: In order; the first that is due counts. log: Where every meeting is noted.
    """

    def __init__(self, rules: list[Rule], log: Path) -> None:
        self._rules, self._lock = rules, threading.Lock()
        before = log.read_text().split() if log.exists() else []
        self._met = Counter(int(line.split(":")[0]) for line in before)
        self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def of(self, method: str, path: str) -> Rule | None:
        """What is to be done to a request."""
        found: Rule | None = None
        with self._lock:
            for number, rule in enumerate(self._rules):
                if not rule.matches(method, path):
                    continue
                self._met[number] += 1
                due = rule.after < self._met[number] <= rule.after + rule.times
                if due and found is None:
                    found = rule
                os.write(self._log, f"{number}:{int(due)}\n".encode())
        return found


def fired(log: Path) -> set[int]:
    """Numbers of the rules that have disturbed something."""
    lines = log.read_text().split() if log.exists() else []
    return {int(line.split(":")[0]) for line in lines if line.endswith(":1")}


class Handler(BaseHTTPRequestHandler):
    """Hands requests on."""

    protocol_version = "HTTP/1.1"
    rules: Rules
    behind: int

    def _go(self) -> None:
        body = self._body()
        rule = self.rules.of(self.command, self.path)
        kind = "" if rule is None else rule.kind
        if rule is not None and kind == "stall":
            time.sleep(rule.seconds)
        if rule is not None and kind in REFUSED:
            return self._say_no(rule.status) if kind == "status" else self._reset()
        status, headers, content = self._ask(body)
        if kind == "reset_after":
            return self._reset()
        if kind == "lost":
            return self._say_no(500)
        if kind == "short":
            content = content[: len(content) // 2]
        self._answer(status, headers, content, rule)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _go

    def _body(self) -> bytes:
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        found = []
        while size := int(self.rfile.readline().split(b";")[0], 16):
            found.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(found)

    def _ask(self, body: bytes) -> tuple[int, list[tuple[str, str]], bytes]:
        hidden = {"expect", "transfer-encoding", "connection", "content-length"}
        headers = {k: v for k, v in self.headers.items() if k.lower() not in hidden}
        connection = http.client.HTTPConnection("127.0.0.1", self.behind, timeout=60)
        try:
            headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            self._length = answer.headers.get("Content-Length", str(len(content)))
            return answer.status, answer.getheaders(), content
        finally:
            connection.close()

    def _answer(
        self, status: int, headers: list[tuple[str, str]], content: bytes, rule: Rule | None
    ) -> None:
        kind = "" if rule is None else rule.kind
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in NOT_PASSED_ON:
                self.send_header(name, value)
        is_head = self.command == "HEAD"
        self.send_header("Content-Length", self._length if is_head else str(len(content)))
        self.end_headers()
        if kind == "cut":
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif rule is not None and kind == "slow":
            step = -(-len(content) // SLOW_PIECES) or 1
            for start in range(0, len(content), step):
                self.wfile.write(content[start : start + step])
                time.sleep(rule.seconds / SLOW_PIECES)
        else:
            self.wfile.write(content)

    def _say_no(self, status: int) -> None:
        code = {503: "SlowDown", 429: "TooManyRequests"}.get(status, "InternalError")
        text = f"<Error><Code>{code}</Code><Message>{code}</Message></Error>".encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(text)

    def _reset(self) -> None:
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        # As it is: a shutdown before would end the connection in good order.
        self.connection.close()

    def log_message(self, *args: Any) -> None:
        pass


class Front(ThreadingHTTPServer):
    """Connections that break are what it is for."""

    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def main(port: int, behind: int, rules: Path, log: Path) -> None:
    """Serve until killed."""
    said = [Rule(**one) for one in json.loads(rules.read_text())]
    handler = type("Front", (Handler,), {"rules": Rules(said, log), "behind": behind})
    Front(("127.0.0.1", port), handler).serve_forever()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4]))
