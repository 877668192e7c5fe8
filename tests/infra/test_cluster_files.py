"""Cluster files by the program that reads them: Ray's launcher, its autoscaler under KubeRay."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
# Fields of KubeRay's API ray.io/v1 as of 1.5: of a job, of its cluster, of a group of workers.
JOB_FIELDS = set(
    "activeDeadlineSeconds backoffLimit rayClusterSpec submitterPodTemplate metadata "
    "clusterSelector submitterConfig managedBy deletionStrategy entrypoint runtimeEnvYAML jobId "
    "submissionMode entrypointResources entrypointNumCpus entrypointNumGpus "
    "ttlSecondsAfterFinished shutdownAfterJobFinishes suspend".split()
)
CLUSTER_FIELDS = set(
    "suspend managedBy autoscalerOptions headServiceAnnotations enableInTreeAutoscaling "
    "gcsFaultToleranceOptions authOptions headGroupSpec rayVersion workerGroupSpecs".split()
)
GROUP_FIELDS = set(
    "suspend groupName replicas minReplicas maxReplicas idleTimeoutSeconds resources labels "
    "rayStartParams template scaleStrategy numOfHosts".split()
)


def read(name: str) -> dict[str, Any]:
    """A file of infra/."""
    found = yaml.safe_load((INFRA / name).read_text())
    assert isinstance(found, dict)
    return found


def launched(config: dict[str, Any]) -> dict[str, Any]:
    """What `ray up` makes of a cluster file, once it has taken it."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    prepared = prepare_config(config)
    validate_config(prepared)
    return dict(prepared)


def test_ray_takes_the_cluster_file() -> None:
    config = launched(read("ray-cluster.yaml"))
    types = config["available_node_types"]
    assert sum(kind.get("max_workers", 0) for kind in types.values()) <= config["max_workers"]
    assert [name for name, kind in types.items() if kind["resources"].get("GPU")] == ["gpu-spot"]
    # Ray's defaults would install a Ray of their own into the image.
    commands = [config[f"{who}setup_commands"] for who in ("", "head_", "worker_")]
    assert not re.search(r"install.*\bray\b", str(commands))


def test_ray_refuses_a_cluster_file_with_a_wrong_key() -> None:
    config = read("ray-cluster.yaml")
    config["available_node_types"]["cpu-spot"]["spot"] = True
    with pytest.raises(ValidationError, match="spot"):
        launched(config)


def test_the_container_of_the_cluster_file_is_started_with_bash() -> None:
    """Ray appends `bash` to the image, which the image's entry point would take for a command."""
    from ray.autoscaler._private.docker import docker_start_cmds

    docker = read("ray-cluster.yaml")["docker"]
    command = docker_start_cmds(
        "ubuntu", docker["image"], {}, "c", docker["run_options"], "earmill", "/root", "docker"
    )
    assert command.endswith(f"{docker['image']} bash")
    assert ("ENTRYPOINT" in (INFRA / "Dockerfile").read_text()) == ("--entrypoint=" in command)


class Recorder:
    """A process runner that notes the commands of Ray's launcher and says that all is well."""

    def __init__(self) -> None:
        self.commands: list[str] = []

    def check_call(self, command: list[str], *args: Any, **options: Any) -> int:
        self.commands.append(" ".join(command))
        return 0

    def check_output(self, command: list[str], *args: Any, **options: Any) -> bytes:
        self.check_call(command)
        return b"true"


class Addresses:
    """A node provider that knows an address for each node."""

    def external_ip(self, node_id: str) -> str:
        return "192.0.2.1"

    internal_ip = external_ip


def launcher_commands(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what Ray's launcher runs to copy a file into a container. On the head, it runs in the
    container, to start the workers."""
    from ray.autoscaler._private import command_runner

    recorder = Recorder()
    monkeypatch.setattr(
        command_runner, "run_cmd_redirected", lambda command, **rest: recorder.check_call(command)
    )
    docker = command_runner.DockerCommandRunner(
        read("ray-cluster.yaml")["docker"],
        log_prefix="",
        node_id="n",
        auth_config=read("ray-cluster.yaml")["auth"],
        cluster_name="earmill",
        process_runner=recorder,
        use_internal_ip=True,
        provider=Addresses(),
    )
    (folder / "file").write_text("")
    docker.run_rsync_up(str(folder / "file"), "~/file")
    return recorder.commands


def test_the_image_has_the_programs_of_rays_launcher(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = launcher_commands(tmp_path, monkeypatch)
    # From the head's container, and, through the other program's connection, into a container.
    assert {command.split()[0] for command in commands} == {"ssh", "rsync"}
    assert any("rsync -e" in command and "docker exec -i" in command for command in commands)
    installed = re.findall(r"apt-get install (.*?)\\\n", (INFRA / "Dockerfile").read_text())
    assert {"openssh-client", "rsync"} <= set(" ".join(installed).split())


def test_the_image_lets_nvidias_runtime_in() -> None:
    """With `--runtime=nvidia`, which Ray adds, the variables of the image decide."""
    from ray.autoscaler._private.command_runner import DockerCommandRunner

    class Node:
        def run(self, command: str, with_output: bool = False) -> bytes:
            return b"map[nvidia:{nvidia-container-runtime []}]"

    docker = DockerCommandRunner.__new__(DockerCommandRunner)
    docker.docker_config, docker.docker_cmd = read("ray-cluster.yaml")["docker"], "docker"
    docker.ssh_command_runner = Node()
    options = docker._configure_runtime([])
    assert options == ["--runtime=nvidia"] and "--gpus" not in str(options)
    variables = re.findall(r"\b(NVIDIA_\w+)=(\S+)", (INFRA / "Dockerfile").read_text())
    assert dict(variables) == {
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
    }


def test_new_nodes_pull_the_image_after_they_have_logged_in() -> None:
    config = launched(read("ray-cluster.yaml"))
    registry = config["docker"]["image"].split("/")[0]
    assert config["docker"]["pull_before_run"] is True
    assert any(
        "docker login" in line and registry in line for line in config["initialization_commands"]
    )


def test_kuberay_knows_every_field_and_its_autoscaler_the_groups() -> None:
    from ray.autoscaler._private.kuberay import autoscaling_config

    job = read("kuberay-rayjob.yaml")
    cluster = job["spec"]["rayClusterSpec"]
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert job["spec"].keys() <= JOB_FIELDS
    assert cluster.keys() <= CLUSTER_FIELDS
    assert all(group.keys() <= GROUP_FIELDS for group in cluster["workerGroupSpecs"])
    resource = {"metadata": {"name": "earmill", "namespace": "here"}, "spec": cluster}
    derived = autoscaling_config._derive_autoscaling_config_from_ray_cr(resource)
    kinds = derived["available_node_types"]
    assert kinds["headgroup"]["resources"]["CPU"] == 0
    assert kinds["gpu-spot"]["resources"]["GPU"] == 1
    assert kinds["cpu-spot"]["min_workers"] >= 1, "a job takes the workers that are there"


def test_the_files_name_the_ray_that_the_image_has() -> None:
    pinned = re.search(r"^ray==(.+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert read("kuberay-rayjob.yaml")["spec"]["rayClusterSpec"]["rayVersion"] == pinned.group(1)


def test_the_image_gets_every_folder_of_the_packages_and_nothing_else_is_sent() -> None:
    copied = re.findall(r"^COPY (.+) \S+$", (INFRA / "Dockerfile").read_text(), re.M)
    sent = re.findall(r"^!(.+)$", (INFRA / "Dockerfile.dockerignore").read_text(), re.M)
    assert sorted(" ".join(copied).split()) == sorted(sent)
    assert all((ROOT / path).exists() for path in sent)


def test_the_workflow_runs_targets_that_exist() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.M))
    assert {"test", "infra", *workflow["nightly"]["strategy"]["matrix"]["target"]} <= targets
    project = (ROOT / "pyproject.toml").read_text()
    oldest = workflow["test"]["strategy"]["matrix"]["python"][0]
    assert f'requires-python = ">={oldest}"' in project
