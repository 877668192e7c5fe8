"""`ray job submit` to a head with a token and two GPUs, as infra/README.md says it."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import earmill
from earmill.pipeline.dataset.commit_record import commits
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import FEW, write_corpus, write_job
from tests.infra import gpu_actors
from tests.infra.test_pods import HEALTH
from tests.pipeline.audio_factory import clip

BIN = Path(sys.executable).parent
JOB = """\
source: {{kind: files, uri: {root}/corpus}}
extract:
  - model: melspectrogram
    fs_hz: 16000
    streams: {{mel: {{}}}}
output: {{uri: {output}, formats: [parquet]}}
"""


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens at now."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(server.getsockname()[1]) for server in held]
    for server in held:
        server.close()
    return ports


@pytest.fixture(scope="module")
def agent() -> int:
    """The port of the head's agent."""
    return free_ports(1)[0]


@pytest.fixture(scope="module")
def head(
    agent: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[str, dict[str, str]]]:
    """Address of a dashboard, and the environment that may submit to it."""
    port, dashboard, client = free_ports(3)
    auth = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    # Despite its name this makes the head listen on loopback.
    auth["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    # The interpreter of the kernels stands in for both GPUs.
    auth["AMTCORE_GPU"] = "interpreted"
    environment = {**os.environ, **auth, "PATH": f"{BIN}:{os.environ['PATH']}"}
    environment.pop("RAY_ADDRESS", None)
    options = f"--head --node-ip-address=127.0.0.1 --port={port} --dashboard-host=127.0.0.1"
    options += f" --dashboard-port={dashboard}"
    options += f" --ray-client-server-port={client} --dashboard-agent-listen-port={agent}"
    options += " --num-cpus=2 --num-gpus=2 --disable-usage-stats --block"
    # A path short enough for the names of sockets.
    folder = f"/tmp/earmill-submit-{os.getpid()}"
    log = tmp_path_factory.mktemp("ray") / "head.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [BIN / "ray", "start", *options.split(), f"--temp-dir={folder}"],
            env=environment,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    address = f"http://127.0.0.1:{dashboard}"
    try:
        deadline = time.monotonic() + 150
        while not answers(f"{address}/api/version"):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.5)
        yield address, environment
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)
        subprocess.run(["rm", "-rf", folder], check=True)


def answers(url: str) -> bool:
    """Whether a server is there, whatever it says."""
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except urllib.error.HTTPError as refused:
        refused.close()
        return True
    except OSError:
        return False
    return True


def submit(head: str, environment: dict[str, str], folder: Path, *entry: object) -> tuple[int, str]:
    """Submit from a folder of the user's own, and again while the head has no agent yet."""
    deadline = time.monotonic() + 120
    while "No available agent" in (end := submit_once(head, environment, folder, entry))[1]:
        assert time.monotonic() < deadline, end[1]
        time.sleep(2)
    return end


def submit_once(
    head: str, environment: dict[str, str], folder: Path, entry: tuple[object, ...]
) -> tuple[int, str]:
    """Return the exit code of `ray job submit` and what it says."""
    command = [BIN / "ray", "job", "submit", "--address", head, "--"]
    done = subprocess.run(
        [*command, *map(str, entry)],
        env=environment,
        cwd=folder,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=240,
        check=False,
    )
    return done.returncode, done.stdout


def job_file(root: Path, output: str) -> Path:
    """A small job on two tones."""
    (root / "corpus").mkdir()
    for seed in range(2):
        (root / "corpus" / f"{seed}.wav").write_bytes(clip(seed=seed))
    path = root / "job.yaml"
    path.write_text(JOB.format(root=root, output=output))
    return path


def extract(job: Path, *options: str) -> tuple[object, ...]:
    return ("earmill", "extract", job, "--resume", *options)


def json_lines(said: str) -> list[dict[str, Any]]:
    """Return the lines of JSON in the output of `ray job submit`."""
    return [json.loads(line) for line in said.splitlines() if line.startswith("{")]


def test_a_submitted_job_runs_on_both_gpus_of_the_head(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "corpus", 2, seconds=0.12)
    options = {"params": FEW, "formats": ["parquet"], "shard_rows": 1}
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", **options)
    code, said = submit(*head, tmp_path, *extract(job, "--json", "--set", "run.device=cuda"))
    assert code == 0 and "succeeded" in said, said
    by_kind = {event["event"]: event for event in json_lines(said)}
    assert (by_kind["workers_ready"]["workers"], by_kind["summary"]["rows_ok"]) == (2, 2)
    assert by_kind["workers_ready"]["device"] == "interpreted"
    assert earmill.verify(f"{tmp_path}/out").ok
    for record in commits(Layout.open(str(tmp_path / "out"))).values():
        assert record.info["worker"]["ray_node"]
        assert record.info["device"]["backends"] == {"dau1997": "interpreted"}


def test_the_probes_of_kuberay_need_no_token(head: tuple[str, dict[str, str]], agent: int) -> None:
    probe = f"http://127.0.0.1:{agent}{HEALTH['path']}"
    deadline = time.monotonic() + 120  # the agent comes up after the dashboard
    while not answers(probe):
        assert time.monotonic() < deadline
        time.sleep(0.5)
    with urllib.request.urlopen(probe, timeout=10) as answer:
        assert answer.status == 200
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{head[0]}/api/jobs/", timeout=10)
    refused.value.close()
    assert refused.value.code == 401


@pytest.mark.long  # Ray deals out two GPUs to two actors above
def test_each_actor_has_a_gpu_of_its_own(head: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    code, said = submit(*head, tmp_path, sys.executable, Path(gpu_actors.__file__))
    assert code == 0, said
    assert json_lines(said)[-1] == {"gpus": ["0", "1"]}


@pytest.mark.long
def test_a_submitted_job_is_verified_and_then_has_nothing_to_do(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    job = job_file(tmp_path, f"{tmp_path}/out")
    code, said = submit(*head, tmp_path, *extract(job))
    assert code == 0 and "succeeded" in said, said
    assert earmill.verify(f"{tmp_path}/out").ok
    code, said = submit(*head, tmp_path, *extract(job))
    assert code == 0 and "nothing to do" in said, said


@pytest.mark.long
def test_who_has_no_token_submits_nothing(head: tuple[str, dict[str, str]], tmp_path: Path) -> None:
    address, environment = head
    stranger = {**environment, "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    code, said = submit(
        address, stranger, tmp_path, *extract(job_file(tmp_path, f"{tmp_path}/out"))
    )
    assert code != 0 and not (tmp_path / "out").exists(), said


@pytest.mark.long
def test_a_submitted_job_with_a_relative_output_says_why_not(
    head: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    code, said = submit(*head, tmp_path, *extract(job_file(tmp_path, "out")))
    assert code != 0 and "output.uri" in said, said
