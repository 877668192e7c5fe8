"""A pool of decoding processes, so that a file that crashes or hangs a decoder costs only its row.

    worker --> request, open file --> child --> rate, channels; blocks; facts  -->  ChildReader

A child serves file after file, and there are as many children as files are open at a time. A child
that died, or that was left in the middle of a file, is not used again.
"""

from __future__ import annotations

import io
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import Any, BinaryIO

import numpy as np

from earmill.pipeline.audio import decoder_process
from earmill.pipeline.audio.channels import AudioBlock
from earmill.pipeline.audio.decode import AudioFacts, Blocks, Limits
from earmill.pipeline.common import errors
from earmill.pipeline.common.byte_streams import digest_of
from earmill.pipeline.common.monitoring import count_process, doing

# Most address space of a child; Python and its libraries take 0.5 GB of it.
MEMORY_BYTES = 3 << 30
# CPU time for one block, and for skipping to a span in a file that is read from its start.
CPU_S, BYTES_PER_CPU_S = 30.0, 1 << 20
# Factor of the CPU limit: a child that is silent for longer waits for a disk, not for a decoder.
PATIENCE = 20.0
# Signals that come from other processes, never from a decoder.
FROM_OUTSIDE = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
START_S = 60.0
SMALL_BYTES = 64 << 20  # Largest stream without a file that is passed in memory.
KEPT_VARIABLES = frozenset({"PATH", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "TMPDIR", "HOME"})


class DecoderPool:
    """The decoding processes of this process. Safe in several threads."""

    def __init__(self) -> None:
        self._idle: deque[_Child] = deque()  # its appends and pops are thread-safe

    def open(self, stream: BinaryIO, *, limits: Limits, **options: Any) -> ChildReader:
        """Open the blocks of a stream in a child; for the `options` see `BlockReader`."""
        nbytes = stream.seek(0, io.SEEK_END)
        if not nbytes:
            raise errors.EmptyFileError(f"{options['uri']}: expected audio, got an empty file")
        with doing("hash"):
            digest = digest_of(stream)
        cpu_s = CPU_S + nbytes / BYTES_PER_CPU_S
        request = options | {"limits": asdict(limits), "digest": digest, "cpu_s": cpu_s}
        child = None
        with suppress(IndexError):
            while not (child := self._idle.pop()).is_alive():
                child.end()
                child = None
        return ChildReader(self._idle, child or _Child(), stream, request)

    def close(self) -> None:
        with suppress(IndexError):
            while True:
                self._idle.pop().end()


class _Child:
    """One decoding process."""

    def __init__(self) -> None:
        self._cpu_s = 0.0
        self.peer, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        paths = os.pathsep.join(path for path in sys.path if path)
        kept = {name: value for name, value in os.environ.items() if name in KEPT_VARIABLES}
        # Each thread of OpenBLAS reserves address space.
        extra = {"PYTHONPATH": paths, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        module, handle = "earmill.pipeline.audio.decoder_process", theirs.fileno()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", module, str(handle), str(MEMORY_BYTES)],
                env=kept | extra,
                pass_fds=[handle],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C is for the worker
            )
        self.peer.settimeout(START_S)
        try:
            decoder_process.receive(self.peer)
        except (ConnectionError, ValueError, TimeoutError) as error:
            code = self.end()
            raise ChildProcessError(
                f"a decoding process does not start (exit code {code}); leave out "
                "run.decode_in_child, or give this machine more memory"
            ) from error

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def count_cpu(self) -> None:
        """Count the child's CPU time since the last call, its start included, as decoding."""
        self._cpu_s = count_process("decode", self._process.pid, self._cpu_s)

    def ask(self, request: Mapping[str, Any], stream: BinaryIO) -> None:
        self.peer.settimeout(PATIENCE * request["cpu_s"])
        with _as_file(stream) as file, suppress(ConnectionError):
            socket.send_fds(self.peer, [b"f"], [file.fileno()])
            decoder_process.send(self.peer, dict(request))

    def end(self) -> int:
        """End the process, and return its exit code; a signal is negative."""
        self.count_cpu()
        self.peer.close()
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(0.5)  # it ends by itself without its peer
        self._process.kill()
        return self._process.wait()


class ChildReader(Blocks):
    """Blocks of one file that a child decodes, equal to the blocks of `BlockReader`; the child is
    `idle` behind them. Beside its errors, DecoderCrashError if the file crashed the child,
    DecoderLimitError if it took more time or memory than a file may."""

    def __init__(
        self, idle: deque[_Child], child: _Child, stream: BinaryIO, request: Mapping[str, Any]
    ) -> None:
        self._idle, self._stream, self._request = idle, stream, request
        self._child: _Child | None = child
        try:
            child.ask(request, stream)
            message, _ = self._answer()
            rate_hz, ids = message.get("rate_hz"), message.get("channel_ids")
            numbers: list[Any] = [rate_hz, *ids] if isinstance(ids, list) and ids else [None]
            if not all(type(each) is int for each in numbers) or numbers[0] <= 0:
                raise self._invalid("an invalid rate or invalid channels")
            self.rate_hz, self.channel_ids = numbers[0], tuple(numbers[1:])
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the child if it is in the middle of a file."""
        child, self._child = self._child, None
        if child is not None:
            child.end()

    def __iter__(self) -> Iterator[AudioBlock]:
        while True:
            message, payload = self._answer()
            if "facts" in message:
                try:
                    self._facts = AudioFacts(**message["facts"])
                except TypeError as error:
                    raise self._invalid("invalid facts") from error
                self._give_back()
                return
            rows = len(self.channel_ids)
            if message.get("rows") != rows or len(payload) % (4 * rows) or not payload:
                raise self._invalid("a block of another shape")
            yield np.frombuffer(payload, "<f4").reshape(rows, -1).astype(np.float32, copy=False)

    def _give_back(self) -> None:
        if self._child is not None:
            self._idle.append(self._child)
            self._child = None

    def _answer(self) -> tuple[dict[str, Any], bytearray]:
        """Return the child's next message; raise an error that it reports."""
        if self._child is None:
            raise ValueError("the reader is closed")
        try:
            message, payload = decoder_process.receive(self._child.peer)
        except (ConnectionError, ValueError) as error:
            raise self._died() from error
        except TimeoutError:
            self.close()
            raise
        self._child.count_cpu()
        if "error" in message:
            raise self._failed(message)
        return message, payload

    def _failed(self, message: Mapping[str, Any]) -> errors.RowError:
        if message["error"] == "memory":
            self.close()
            return errors.DecoderLimitError(
                f"{self._request['uri']}: the decoder took more than {MEMORY_BYTES >> 30} GiB of "
                "memory for one file"
            )
        kind = getattr(errors, str(message["error"]), None)
        if not (isinstance(kind, type) and issubclass(kind, errors.RowError)):
            return self._invalid("an invalid error")
        number = message.get("errno")
        if isinstance(number, int) and hasattr(self._stream, "failure"):
            self._stream.failure = OSError(number, os.strerror(number))
        self._give_back()
        reported: errors.RowError = kind(str(message.get("message")))
        return reported

    def _died(self) -> Exception:
        child, self._child = self._child, None
        code, uri = 0 if child is None else child.end(), self._request["uri"]
        if code == -signal.SIGXCPU:
            return errors.DecoderLimitError(
                f"{uri}: the decoder took more than {math.ceil(self._request['cpu_s'])} s of CPU "
                "time for one block"
            )
        name = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if -code in FROM_OUTSIDE:
            # The host is out of memory, or somebody ended the job, so it is not the row's fault.
            return ChildProcessError(f"{uri}: the decoder was killed ({name})")
        return errors.DecoderCrashError(f"{uri}: the decoder crashed ({name})")

    def _invalid(self, what: str) -> errors.DecoderCrashError:
        self.close()
        uri = self._request["uri"]
        return errors.DecoderCrashError(f"{uri}: the decoder was broken: it sent {what}")


def _as_file(stream: BinaryIO) -> Any:
    """Return the bytes as an open file that another process can read from its start."""
    stream.seek(0)
    with suppress(io.UnsupportedOperation, AttributeError):
        return os.fdopen(os.dup(stream.fileno()), "rb")
    small = stream.seek(0, io.SEEK_END) <= SMALL_BYTES
    file = os.fdopen(os.memfd_create("audio"), "w+b") if small else tempfile.TemporaryFile()
    stream.seek(0)
    shutil.copyfileobj(stream, file, 1 << 20)
    file.seek(0)
    return file
