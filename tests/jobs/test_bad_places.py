"""Every command on every kind of bad place: one line, an exit code that says so, no traceback."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from earmill.jobs.cli import run
from earmill.pipeline.common.errors import CommitError
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.storage import retrying

READERS = ("inspect", "verify", "plot", "retry")
#: Kinds of place whose message passes through each command; `make test` has all with one command.
EVERYWHERE = ("missing", "a file", "half JSON", "no scheme", "no keys", "http 403")


@pytest.fixture(autouse=True)
def no_credentials(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither keys of whoever runs the tests nor those of the machine."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """A server that answers every request with the status in its path, 403 where there is none."""

    class Refusing(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = self.path.partition("?")[0].split("/")
            found = [part for part in parts if part.isdigit()]
            self.send_response(int(found[0]) if found else 403)
            self.send_header("Content-Length", "0")
            self.end_headers()

        do_HEAD = do_PUT = do_GET

        def log_message(self, format: str, *args: object) -> None:
            """Silent."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def closed() -> str:
    """An address on which nobody listens."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{listener.getsockname()[1]}"


def s3(endpoint: str, **keys: str) -> str:
    retries = {"retries": {"max_attempts": 0}, "connect_timeout": 5}
    return json.dumps({"endpoint_url": endpoint, "config_kwargs": retries, **keys})


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The only line on standard error."""
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("earmill: ") and "Traceback" not in line
    return line


def bad_places(folder: Path, refusing: str, closed: str) -> dict[str, tuple[list[str], str]]:
    """Arguments that name a bad place, and what must be said of it."""
    (folder / "file").write_text("hello")
    texts = {
        "half JSON": b'{"layout_version',
        "binary": b"\xff\xfe\x00",
        "other JSON": b'{"layout_version": 1, "streams": 3}',
        "list": b"[]",
        "deep": b"[" * 100_000,
    }
    for name, content in texts.items():
        (folder / name).mkdir()
        (folder / name / "dataset.json").write_bytes(content)
    (folder / "loop").symlink_to(folder / "loop")
    keys = {"key": "a", "secret": "b"}
    return {
        "missing": ([str(folder / "none")], "dataset.json"),
        "a file": ([str(folder / "file")], "got a file"),
        "a link to itself": ([str(folder / "loop")], "loop"),
        **{name: ([str(folder / name)], "dataset.json is not readable") for name in texts},
        "no scheme": (["s9://bucket/x"], "fsspec URI"),
        "no keys": (["s3://bucket/x", "--storage-options", s3(closed)], "no credentials"),
        "closed": (["s3://b/x", "--storage-options", s3(closed, **keys)], "cannot be reached"),
        "403": (["s3://b/x", "--storage-options", s3(refusing, **keys)], "access is refused"),
        "500": (["s3://500/x", "--storage-options", s3(refusing, **keys)], "answers 500"),
        "http closed": ([f"{closed}/x"], "cannot be reached"),
        "http 403": ([f"{refusing}/x"], "access is refused"),
        "http 503": ([f"{refusing}/503/x"], "answers 503"),
    }


@pytest.mark.parametrize(
    ("command", "kinds"),
    [
        ("inspect", None),
        *((command, EVERYWHERE) for command in READERS[1:]),
        *(pytest.param(command, None, marks=pytest.mark.long) for command in READERS[1:]),
    ],
)
def test_a_bad_place_is_one_line(
    command: str,
    kinds: tuple[str, ...] | None,
    tmp_path: Path,
    refusing: str,
    closed: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(retrying, "BRIEF", RetryPolicy(budget_s=0.0))
    places = bad_places(tmp_path, refusing, closed)
    for name in kinds or places:
        arguments, said = places[name]
        assert run([command, *arguments]) == 2, name
        line = one_line(capsys)
        assert said in line, name
        assert ";" in line, f"{name}: nothing is said of what to do: {line}"


def test_a_job_file_at_a_bad_place_is_one_line(
    tmp_path: Path, refusing: str, closed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    places = [
        str(tmp_path / "folder"),
        str(tmp_path / "file" / "job.yaml"),
        f"{closed}/job.yaml",
        f"{refusing}/job.yaml",
        f"{refusing}/503/job.yaml",
        "s3://bucket/job.yaml",
        "s9://bucket/job.yaml",
        "/dev/zero",
    ]
    for command in ("extract", "plan"):
        for place in places:
            assert run([command, place]) == 2, place
            assert place in one_line(capsys)


def test_a_job_file_is_read_through_fsspec(
    refusing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import fsspec

    with fsspec.open("memory://jobs/job.yaml", "w") as file:
        file.write("source: {kind: files, uri: /no/such}\nextract: []\noutput: {uri: out}\n")
    assert run(["plan", "memory://jobs/job.yaml"]) == 2
    assert "extract: expected at least one entry" in one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["extract", "/no/such.yaml"], 2),
        (["plan", "/no/such.yaml"], 2),
        (["inspect", "/no/such"], 2),
        (["verify", "/no/such"], 2),
        (["models", "no-such-model"], 2),
        (["extract"], 2),
        (["inspect", "/no/such", "--storage-options", "{"], 2),
    ],
)
def test_with_json_a_failure_ends_with_an_error_event(
    arguments: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--json"]) == code
    event = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert event["event"] == "error" and event["exit_code"] == code
    assert event["message"] and "\n" not in event["message"]


def caused(error: Exception, cause: Exception) -> Exception:
    """Return an error that was raised from another one."""
    error.__cause__ = cause
    return error


class TestTheLastResort:
    """A command that fails for a reason nobody thought of."""

    @pytest.fixture
    def broken(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*arguments: object, **options: object) -> None:
            raise RuntimeError("first\nsecond \x1b[31mred")

        monkeypatch.setattr("earmill.jobs.commands.models.listed_models", fail)

    def test_is_one_line_that_names_the_file_with_the_traceback(
        self, broken: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert run(["models"]) == 1
        line = one_line(capsys)
        assert "RuntimeError: first second \\x1b[31mred" in line and "\x1b" not in line
        (written,) = tmp_path.glob("earmill-traceback-*.txt")
        assert str(written) in line and "--debug" in line
        assert "Traceback" in written.read_text() and written.stat().st_mode & 0o077 == 0

    def test_shows_the_traceback_on_request(
        self, broken: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert run(["--debug", "models"]) == 1
        lines = capsys.readouterr().err.splitlines()
        assert lines[0].startswith("Traceback") and lines[-1].startswith("earmill: unexpected")

    @pytest.mark.parametrize(
        ("error", "code", "said"),
        [
            (OSError(28, "No space left on device"), 1, "no space is left"),
            (ConnectionResetError(104, "Connection reset by peer"), 1, "cannot be reached"),
            (CommitError("shard 1: gone"), 1, "shard 1: gone"),
            (KeyboardInterrupt(), 130, "interrupted"),
            (MemoryError(), 1, "too little memory"),
            (OSError(12, "Cannot allocate memory"), 1, "too little memory"),
            (RuntimeError("can't start new thread"), 1, "too little memory"),
            (
                RuntimeError(
                    "[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to "
                    "allocate 8000000000 bytes"
                ),
                1,
                "too little memory",
            ),
            (
                ImportError("libtorch_cpu.so: failed to map segment from shared object"),
                1,
                "too little memory",
            ),
            (RuntimeError("std::bad_alloc"), 1, "too little memory"),
            (RuntimeError("CUDA out of memory. Tried to allocate 2 GiB"), 1, "too little memory"),
            (caused(CommitError("shard 1: not written"), MemoryError()), 1, "shard 1: not written"),
            (caused(CommitError("shard 1: not written"), MemoryError()), 1, "too little memory"),
        ],
    )
    def test_a_fault_of_a_place_says_what_to_do(
        self, error: BaseException, code: int, said: str,
        monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    ) -> None:  # fmt: skip
        def fail(*arguments: object, **options: object) -> None:
            raise error

        monkeypatch.setattr("earmill.jobs.commands.models.listed_models", fail)
        assert run(["models", "--json"]) == code
        captured = capsys.readouterr()
        (line,) = captured.err.splitlines()
        assert said in line and "defect" not in line
        assert json.loads(captured.out)["exit_code"] == code


def test_a_library_that_finds_no_memory_is_no_broken_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def load(point: EntryPoint) -> None:
        raise ImportError("libarrow.so.2600: failed to map segment from shared object")

    monkeypatch.setattr(EntryPoint, "load", load)
    job = tmp_path / "job.yaml"
    job.write_text("name: x\nsource: {kind: files, uri: a}\noutput: {uri: b}\n")
    assert run(["plan", str(job)]) == 1
    assert "too little memory: ImportError: libarrow" in capsys.readouterr().err


def test_version_and_short_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.startswith("earmill 0.")
    for arguments in (["-h"], ["extract", "-h"]):
        assert run(arguments) == 0
        assert "Usage" in capsys.readouterr().out


def test_the_entry_point_exits_with_the_code() -> None:
    command = [sys.executable, "-m", "earmill.jobs.start", "inspect"]  # no dataset is named
    assert subprocess.run(command, capture_output=True, check=False).returncode == 2


@pytest.mark.parametrize(
    "command", [["report", "in", "--out"], ["plot", "in", "--out"], ["demo", "--out"], ["kernels"]]
)
def test_a_uri_is_no_path_of_this_machine(
    command: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A folder `s3:` was made here."""
    monkeypatch.chdir(tmp_path)
    assert run([*command, "s3://bucket/name.html"]) == 2
    assert "expected a path of this machine" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
