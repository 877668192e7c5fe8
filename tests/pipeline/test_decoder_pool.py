"""Decoding in children: the same samples and errors, and what kills a child costs its row alone.

Decoders that crash, hang or eat memory are planted in the children by a `sitecustomize` on the path
that they inherit: what they do depends on the sample rate of the file.
"""

from __future__ import annotations

import io
import os
import signal
import socket
from collections import deque
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pytest

from earmill.pipeline.audio import decoder_pool, decoder_process
from earmill.pipeline.audio.decode import BlockReader, Limits
from earmill.pipeline.audio.decoder_pool import ChildReader, DecoderPool, _Child
from earmill.pipeline.common.errors import DecoderCrashError, RowError, SourceOutage
from earmill.pipeline.common.monitoring import CpuSeconds, doing
from earmill.pipeline.sources.fetch import Blob, check_arrived
from earmill.pipeline.spec.job import JobSpec
from tests.pipeline import audio_factory
from tests.pipeline.test_row_pipeline import Job, make_spec

SEGFAULT_HZ, HANG_HZ, EAT_HZ, QUIT_HZ, ABORT_HZ = 11025, 12000, 13000, 14000, 15000
BUSY_HZ, BUSY_S = 17000, 0.4
PLANTED = f"""
import os, signal, time, soundfile
read, read_bytes = soundfile.SoundFile.read, soundfile.SoundFile.buffer_read_into
def misbehave(self):
    if self.samplerate == {SEGFAULT_HZ}:
        os.kill(os.getpid(), signal.SIGSEGV)
    if self.samplerate == {ABORT_HZ}:
        os.abort()
    if self.samplerate == {QUIT_HZ}:
        os._exit(7)
    if self.samplerate == {EAT_HZ}:
        bytearray(8 << 30)
    while self.samplerate == {HANG_HZ}:
        pass
    while self.samplerate == {BUSY_HZ} and time.process_time() < BUSY_UNTIL:
        pass

def planted(self, *args, **kwargs):
    misbehave(self)
    return read(self, *args, **kwargs)

def planted_in_bytes(self, *args, **kwargs):
    misbehave(self)
    return read_bytes(self, *args, **kwargs)

soundfile.SoundFile.read = planted
soundfile.SoundFile.buffer_read_into = planted_in_bytes
BUSY_UNTIL = time.process_time() + {BUSY_S}
"""


@pytest.fixture(scope="module")
def warm() -> Iterator[DecoderPool]:
    children = DecoderPool()
    yield children
    children.close()


@pytest.fixture
def planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(decoder_pool, "CPU_S", 0.5)


def opened(children: DecoderPool, stream: BinaryIO, **changes: Any) -> ChildReader:
    options: dict[str, Any] = {"start_s": None, "end_s": None, "channels": "each"}
    return children.open(stream, **{"uri": "x", "limits": Limits(), **options, **changes})


@pytest.mark.parametrize("kind", ["wav", "flac", "ogg", "mp3"])
def test_samples_and_facts_are_those_of_decoding_here(
    kind: str, warm: DecoderPool, tmp_path: Path
) -> None:
    data = audio_factory.clip(kind, 4.0, channels=2)
    (tmp_path / "x").write_bytes(data)
    for span in ((None, None), (0.5, 3.1)):
        for stream in (io.BytesIO(data), (tmp_path / "x").open("rb")):
            with BlockReader(
                io.BytesIO(data), uri="x", start_s=span[0], end_s=span[1], channels="each"
            ) as here:
                wanted = list(here)
            with stream, opened(warm, stream, start_s=span[0], end_s=span[1]) as there:
                found = list(there)
            assert there.rate_hz == here.rate_hz and there.channel_ids == here.channel_ids
            assert there.facts == here.facts
            np.testing.assert_array_equal(np.concatenate(found, 1), np.concatenate(wanted, 1))
    assert len(warm._idle) == 1  # one child served them all


def test_what_a_child_spends_is_counted_as_decoding(planted: None) -> None:
    """The parts of a job's CPU time lacked it, as did its estimate."""
    children, tally = DecoderPool(), CpuSeconds()
    file = audio_factory.encode(audio_factory.speech_like(0.1, BUSY_HZ), "wav", BUSY_HZ)
    with doing("decode", tally), opened(children, io.BytesIO(file)) as reader:
        list(reader)
    children.close()
    assert BUSY_S <= tally.seconds()["decode"] < BUSY_S + 30


@pytest.mark.parametrize(
    ("data", "changes"),
    [
        (b"", {}),
        (b"no audio at all" * 99, {}),
        (audio_factory.clip("flac", 2.0)[:-4000], {}),
        (audio_factory.clip("wav"), {"start_s": 5.0}),
        (audio_factory.clip("wav"), {"channels": 3}),
        (audio_factory.clip("wav"), {"limits": Limits(max_seconds=0.1)}),
        (audio_factory.clip("wav"), {"limits": replace(Limits(), min_rate_hz=1e5)}),
    ],
)
def test_errors_are_those_of_decoding_here(
    data: bytes, changes: dict[str, Any], warm: DecoderPool
) -> None:
    with pytest.raises(RowError) as here, BlockReader(io.BytesIO(data), uri="x", **changes) as one:
        list(one)
    with (
        pytest.raises(RowError) as there,
        opened(warm, io.BytesIO(data), **{"channels": "mean", **changes}) as other,
    ):
        list(other)
    assert (type(there.value), str(there.value)) == (type(here.value), str(here.value))


def test_poison_is_quarantined_with_its_reason_and_costs_nothing_else(
    tmp_path: Path, planted: None
) -> None:
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for number, rate_hz in enumerate(
        (16000, SEGFAULT_HZ, 22050, HANG_HZ, EAT_HZ, 16000, QUIT_HZ, ABORT_HZ, 16000)
    ):
        samples = audio_factory.speech_like(0.3, rate_hz, seed=number)
        (corpus / f"{number}.wav").write_bytes(audio_factory.encode(samples, "wav", rate_hz))
    found = Job(make_spec(corpus, run__decode_in_child="true"))
    rows = found()
    assert [(row.row_id, row.error_class) for row in rows.bad] == [
        ("1.wav", "decoder_crash"),
        ("3.wav", "decoder_limit"),
        ("4.wav", "decoder_limit"),
        ("6.wav", "decoder_crash"),
        ("7.wav", "decoder_crash"),
    ]
    for words, row in zip(("SEGV", "CPU", "memory", "code 7", "ABRT"), rows.bad, strict=True):
        assert words in row.message
    idle = [child._process for child in found.rows._children._idle]  # type: ignore[union-attr]
    found.rows.close()
    assert idle and all(process.returncode is not None for process in idle)

    plain = Job(make_spec(corpus))()
    wanted = {row.row_id: row for row in plain.good}
    assert [row.row_id for row in rows.good] == ["0.wav", "2.wav", "5.wav", "8.wav"]
    for row in rows.good:
        assert row.facts == wanted[row.row_id].facts
        np.testing.assert_array_equal(
            row.streams["modulation"], wanted[row.row_id].streams["modulation"]
        )


def test_a_long_clip_goes_through_a_child_too(tmp_path: Path) -> None:
    (tmp_path / "a.wav").write_bytes(audio_factory.clip("wav", 3.0))
    jobs = [
        Job(make_spec(tmp_path, run__decode_in_child=child, **level), long_s=1.0)
        for level in ({}, {"audio__calibration": "{level_db_spl: 60, rms1_db_spl: null}"})
        for child in ("false", "true")
    ]
    rows = [job().good[0] for job in jobs]
    for here, there in (rows[:2], rows[2:]):
        np.testing.assert_array_equal(
            np.asarray(there.streams["modulation"]), np.asarray(here.streams["modulation"])
        )
        assert there.facts == here.facts
    for job in jobs:
        job.rows.close()


def test_it_is_no_part_of_what_the_job_is(tmp_path: Path) -> None:
    specs = [make_spec(tmp_path, run__decode_in_child=word) for word in ("true", "false")]
    assert specs[0].sha256() == specs[1].sha256()
    assert not JobSpec.load(specs[1]).run.decode_in_child


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_child_that_others_end_says_nothing_of_the_row(number: int) -> None:
    children = DecoderPool()
    data = audio_factory.clip("wav", 60.0)
    with opened(children, io.BytesIO(data)) as reader:
        blocks = iter(reader)
        next(blocks)
        assert reader._child is not None
        os.kill(reader._child._process.pid, number)
        with pytest.raises(ChildProcessError, match="the decoder was killed"):
            list(blocks)
    assert not children._idle


def test_a_child_has_no_credentials_and_can_write_no_file(
    warm: DecoderPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    child = _Child()
    process = Path(f"/proc/{child._process.pid}")
    assert b"PATH=" in (process / "environ").read_bytes()
    assert b"hush" not in (process / "environ").read_bytes()
    (line,) = [
        one
        for one in (process / "limits").read_text().splitlines()
        if one.startswith("Max file size")
    ]
    assert line.split()[3] == "0"
    assert child.end() == 0


def test_a_read_that_fails_in_a_child_is_an_outage_as_it_is_here(tmp_path: Path) -> None:
    (tmp_path / "x.wav").write_bytes(audio_factory.clip("wav"))
    stream = Blob(path=str(tmp_path / "x.wav")).open()
    said = {"error": "UnreadableError", "message": "x: read failed: gone", "errno": 5}
    with stream, pytest.raises(RowError, match="read failed"):
        answered({"rate_hz": 16000, "channel_ids": [0]}, said, stream=stream)
    with pytest.raises(SourceOutage, match="Input/output error"):
        check_arrived(stream, "x")


@pytest.mark.parametrize(
    ("said", "payload"),
    [
        ({"rows": 3}, bytes(24)),
        ({"rows": 2}, bytes(12)),
        ({"rows": 2}, b""),
        ({"facts": {"container": "WAV"}}, b""),
        ({"facts": 3}, b""),
        ({"error": "SystemExit", "message": "x"}, b""),
        ({"error": ["x"]}, b""),
    ],
)
def test_nonsense_of_a_child_is_a_crash(said: dict[str, Any], payload: bytes) -> None:
    with pytest.raises(DecoderCrashError, match="it sent"):
        answered({"rate_hz": 16000, "channel_ids": [0, 1]}, said, payload)


def answered(
    opened: dict[str, Any], then: dict[str, Any], payload: bytes = b"", *, stream: Any = None
) -> None:
    """Read a file with a child that says this."""
    ours, theirs = socket.socketpair()
    child: Any = _Stand(ours)
    decoder_process.send(theirs, opened)
    decoder_process.send(theirs, then, payload)
    request = {"uri": "x", "cpu_s": 1.0}
    data = stream or io.BytesIO(b"x")
    with ours, theirs, ChildReader(deque(), child, data, request) as reader:
        list(reader)


class _Stand:
    """In the place of a child."""

    def __init__(self, peer: socket.socket) -> None:
        self.peer = peer

    def ask(self, request: Any, stream: Any) -> None:
        self.peer.settimeout(5)

    def count_cpu(self) -> None:
        """It spends none."""

    def end(self) -> int:
        self.peer.close()
        return 0
