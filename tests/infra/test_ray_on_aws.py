"""infra/ray-cluster.yaml through Ray's own AWS launcher, on a stand-in of EC2 and IAM (moto)."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from ray.autoscaler._private.aws.config import DEFAULT_AMI

from tests.infra.test_cluster_files import launched, read

pytestmark = pytest.mark.long  # Ray's launcher starts and looks for nodes for half a minute.

REGION = "eu-central-1"
WORKERS = {"cpu-spot", "gpu-spot"}
TAG = {"ray-node-type": "worker", "ray-node-name": "of-a-test"}


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """EC2 and IAM with the instance profiles of infra/bucket.tf; yields an image's id."""
    from moto import mock_aws
    from ray.autoscaler._private.aws import utils

    caches = (utils.resource_cache, utils.client_cache)
    with pytest.MonkeyPatch.context() as patch, mock_aws():
        home = tmp_path_factory.mktemp("home")
        (home / ".ssh").mkdir()
        patch.setenv("HOME", str(home))  # Ray writes its key there.
        for cached in caches:
            cached.cache_clear()
        iam = boto3.client("iam", region_name=REGION)
        for name in ("earmill-head", "earmill-job"):
            iam.create_instance_profile(InstanceProfileName=name)
        images = boto3.client("ec2", region_name=REGION).describe_images()["Images"]
        yield str(images[0]["ImageId"])
        for cached in caches:
            cached.cache_clear()


def bootstrapped(cluster: dict[str, Any], image: str) -> dict[str, Any]:
    """Return what Ray's AWS launcher makes of a cluster file whose AMI is filled in."""
    from ray.autoscaler._private.aws.config import bootstrap_aws

    cluster = copy.deepcopy(cluster)
    for kind in cluster["available_node_types"].values():
        if kind["node_config"].get("ImageId") == "AMI":
            kind["node_config"]["ImageId"] = image
    return dict(bootstrap_aws(launched(cluster)))


def started(config: dict[str, Any], name: str, *, ends: bool = False) -> dict[str, Any]:
    """Start a node of a type, return what EC2 says about it, and end it if asked to."""
    from ray.autoscaler._private.aws.node_provider import AWSNodeProvider

    provider = AWSNodeProvider(config["provider"], config["cluster_name"])
    node_config = {**config["available_node_types"][name]["node_config"]}
    if name == config["head_node_type"]:
        node_config |= config.get("head_node", {})
    created = provider.create_node(node_config, {**TAG, "ray-user-node-type": name}, 1)
    ec2 = boto3.client("ec2", region_name=REGION)
    found = ec2.describe_instances(InstanceIds=[*created])["Reservations"][0]["Instances"][0]
    if ends:
        provider.terminate_nodes([*created])
    return dict(found)


def profile_of(instance: dict[str, Any]) -> str | None:
    arn = instance.get("IamInstanceProfile", {}).get("Arn")
    return None if arn is None else arn.rpartition("/")[2]


def test_every_node_has_its_instance_profile(aws: str) -> None:
    config = bootstrapped(read("ray-cluster.yaml"), aws)
    for name in WORKERS:
        instance = started(config, name)
        assert profile_of(instance) == "earmill-job", name
        assert instance["InstanceLifecycle"] == "spot", name
    assert profile_of(started(config, "head")) == "earmill-head"


def test_ray_gives_a_worker_no_profile_by_itself(aws: str) -> None:
    cluster = read("ray-cluster.yaml")
    for name in WORKERS:
        del cluster["available_node_types"][name]["node_config"]["IamInstanceProfile"]
    config = bootstrapped(cluster, aws)
    assert [profile_of(started(config, name)) for name in sorted(WORKERS)] == [None, None]


def test_every_node_names_its_machine_image_and_a_disk_for_the_container_image(aws: str) -> None:
    """Ray's default image is of Ubuntu 18.04, and says so in no error message."""
    cluster = read("ray-cluster.yaml")
    for kind in cluster["available_node_types"].values():
        assert kind["node_config"]["ImageId"] == "AMI"
        (disk,) = kind["node_config"]["BlockDeviceMappings"]
        assert disk["Ebs"]["VolumeSize"] >= 100
    del cluster["available_node_types"]["gpu-spot"]["node_config"]["ImageId"]
    node = bootstrapped(cluster, aws)["available_node_types"]["gpu-spot"]["node_config"]
    assert node["ImageId"] == DEFAULT_AMI[REGION]


def test_the_resources_are_those_of_the_machine(aws: str) -> None:
    kinds = read("ray-cluster.yaml")["available_node_types"]
    names = {kind["node_config"]["InstanceType"]: kind["resources"] for kind in kinds.values()}
    ec2 = boto3.client("ec2", region_name=REGION)
    for found in ec2.describe_instance_types(InstanceTypes=[*names])["InstanceTypes"]:
        resources = names.pop(found["InstanceType"])
        if resources["CPU"]:  # the head computes nothing
            assert resources["CPU"] == found["VCpuInfo"]["DefaultVCpus"]
        gpus = sum(gpu["Count"] for gpu in found.get("GpuInfo", {}).get("Gpus", []))
        assert resources.get("GPU", 0) == gpus
    assert names == {}
