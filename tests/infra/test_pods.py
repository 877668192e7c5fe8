"""The pods of infra/: kuberay-rayjob.yaml, and kubernetes-job.yaml as processes of this machine."""

from __future__ import annotations

import copy
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import earmill
from tests.chaos.jobs import write_corpus, write_job
from tests.docs.test_code_of_pages import complaint
from tests.infra.test_cluster_files import INFRA, read

Pod = dict[str, Any]
# The path that the kubelet asks, and the port of Ray's agent: Ray 2.53 and later.
HEALTH = {"path": "/api/healthz", "port": 52365}


FILLED = [
    INFRA / name
    for name in (
        "aws-batch.json",
        "kuberay-rayjob.yaml",
        "kubernetes-account.yaml",
        "kubernetes-job.yaml",
        "modal_app.py",
        "ray-cluster.yaml",
        "sky.yaml",
    )
]


def ray_pods() -> Iterator[tuple[str, Pod]]:
    """Yield the pod template of every group of the RayJob."""
    cluster = read("kuberay-rayjob.yaml")["spec"]["rayClusterSpec"]
    yield "head", cluster["headGroupSpec"]["template"]
    for group in cluster["workerGroupSpecs"]:
        yield group["groupName"], group["template"]


def job_pod() -> Pod:
    template: Pod = read("kubernetes-job.yaml")["spec"]["template"]
    return template


def pods() -> list[tuple[str, Pod]]:
    return [*ray_pods(), ("job", job_pod())]


def faults(pod: Pod, *, has_ray: bool) -> list[str]:
    """Return the reasons why a pod would not start, reach its bucket, or end in time."""
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    variables = {each["name"]: each["value"] for each in container.get("env", [])}
    limits = container["resources"]["limits"]
    account = read("kubernetes-account.yaml")["metadata"]["name"]
    is_hidden = variables.get("NVIDIA_VISIBLE_DEVICES") == "void"
    grace = re.findall(r"run\.grace_s=(\d+)", " ".join(container.get("args", [])))
    found = {
        "account": spec.get("serviceAccountName") != account,
        "image": re.fullmatch(r"REGISTRY/earmill:\d+\.\d+\.\d+", container["image"]) is None,
        "root": spec.get("securityContext") != {"runAsNonRoot": True},
        "limits": limits != container["resources"]["requests"]
        or not {"cpu", "memory"} <= {*limits},
        "gpu": ("nvidia.com/gpu" in limits) == is_hidden,
        "grace": any(
            int(seconds) + 10 > spec.get("terminationGracePeriodSeconds", 30) for seconds in grace
        ),
        "probes": has_ray
        and any(
            container.get(name, {}).get("httpGet") != HEALTH
            for name in ("livenessProbe", "readinessProbe")
        ),
    }
    return [name for name, is_wrong in found.items() if is_wrong]


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_a_pod_has_no_fault(name: str, pod: Pod) -> None:
    assert faults(pod, has_ray=name != "job") == []


def without(pod: Pod, *keys: str) -> None:
    """Remove a key of the pod's spec, or of its container."""
    place = pod["spec"]
    if keys[0] == "containers":
        place, keys = place["containers"][0], keys[1:]
    del place[keys[0]]


@pytest.mark.parametrize(
    ("fault", "name", "change"),
    [
        ("account", "cpu-spot", lambda pod: without(pod, "serviceAccountName")),
        ("root", "head", lambda pod: without(pod, "securityContext")),
        ("gpu", "head", lambda pod: without(pod, "containers", "env")),
        ("gpu", "gpu-spot", lambda pod: limits_of(pod).pop("nvidia.com/gpu")),
        ("limits", "head", lambda pod: limits_of(pod).pop("memory")),
        ("probes", "cpu-spot", lambda pod: without(pod, "containers", "readinessProbe")),
        ("grace", "job", lambda pod: without(pod, "terminationGracePeriodSeconds")),
        ("image", "job", lambda pod: pod["spec"]["containers"][0].update(image="earmill:latest")),
    ],
)
def test_a_planted_fault_is_found(fault: str, name: str, change: Any) -> None:
    pod = copy.deepcopy(dict(pods())[name])
    change(pod)
    assert fault in faults(pod, has_ray=name != "job")


def limits_of(pod: Pod) -> dict[str, Any]:
    limits: dict[str, Any] = pod["spec"]["containers"][0]["resources"]["limits"]
    return limits


def test_all_files_name_one_image_and_the_release_of_this_folder() -> None:
    named = {
        (path.name, image)
        for path in INFRA.iterdir()
        if path.suffix in (".yaml", ".json", ".py") or path.name == "Dockerfile"
        for image in re.findall(r"[\w.]+/earmill:[\w.]+", path.read_text())
    }
    assert {image for _, image in named} == {f"REGISTRY/earmill:{earmill.__version__}"}
    assert len({name for name, _ in named}) == 6


def words_to_fill_in() -> dict[str, set[str]]:
    """Return the capitals that infra/README.md explains, and the files that it names for each."""
    rows = re.findall(r"^\| `([A-Z]+)` \| .* \| (.*) \|$", (INFRA / "README.md").read_text(), re.M)
    return {word: set(re.findall(r"`([\w.-]+)`", names)) for word, names in rows}


def test_words_to_fill_in_are_where_the_page_says() -> None:
    words = words_to_fill_in()
    for word in ("BUCKET", "ACCOUNT", "AMI"):
        named = {path.name for path in FILLED if re.search(rf"\b{word}\b", code_of(path))}
        assert named == words[word], word
    without = {path.name for path in FILLED if "REGISTRY" not in code_of(path)}
    assert without == words["REGISTRY"] | {"kubernetes-account.yaml"}


def code_of(path: Path) -> str:
    """Return the lines of a file that are not comments."""
    lines = path.read_text().splitlines()
    return "\n".join(line for line in lines if not line.lstrip().startswith("# "))


def test_a_command_of_a_pod_is_one_of_earmill() -> None:
    spec = read("kubernetes-job.yaml")["spec"]
    args = spec["template"]["spec"]["containers"][0]["args"]
    assert complaint(["earmill", *args]) is None
    assert complaint(["earmill", *args, "--joim"]) is not None
    assert args[-1] == f"run.array=$(JOB_COMPLETION_INDEX)/{spec['completions']}"
    entry = read("kuberay-rayjob.yaml")["spec"]["entrypoint"].split()
    assert complaint(entry) is None


def expanded(argument: str, variables: dict[str, str]) -> str:
    """Replace $(NAME) as the kubelet does: a name that it does not know stays."""
    return re.sub(r"\$\((\w+)\)", lambda match: variables.get(match[1], match[0]), argument)


def start_pod(index: int, job: Path, log: Path) -> subprocess.Popen[bytes]:
    """Start the container of one pod of the Job as a process, with the job file of its volume."""
    variables = {"JOB_COMPLETION_INDEX": str(index)}
    args = job_pod()["spec"]["containers"][0]["args"]
    command = [expanded(arg, variables).replace("/jobs/job.yaml", str(job)) for arg in args]
    with log.open("ab") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "earmill.jobs.start", *command],
            env={**os.environ, **variables},
            stdout=out,
            stderr=out,
        )


def committed(log: Path) -> int:
    """Return the number of shards that a member has committed."""
    return log.read_text().count('"event": "shard_done"')


@pytest.mark.long  # claims of a dead member are free after a minute
@pytest.mark.timeout(600)
def test_members_of_the_job_share_it_and_one_whose_node_dies_is_replaced(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus", 120, seconds=4.0)
    job = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out", shard_rows=1)
    logs = [tmp_path / f"{index}.log" for index in range(3)]
    members = [start_pod(index, job, log) for index, log in enumerate(logs)]
    try:
        deadline = time.monotonic() + 240
        while not all(map(committed, logs)):
            assert time.monotonic() < deadline, [log.read_text() for log in logs]
            time.sleep(0.1)
        members[0].send_signal(signal.SIGKILL)
        members[0].wait()
        # The Job's controller starts another pod with the same number.
        members[0] = start_pod(0, job, logs[0])
        codes = [member.wait(300) for member in members]
        assert codes == [0, 0, 0], [log.read_text() for log in logs]
    finally:
        for member in members:
            member.kill()
            member.wait()
    report = earmill.verify(f"{tmp_path}/out")
    assert report.ok and report.rows_ok == report.plan_rows == 120
    assert (tmp_path / "out" / "current.json").exists()
    assert all(map(committed, logs))
