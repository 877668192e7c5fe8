"""infra/bucket.tf: its words, and its policies on a stand-in of AWS that refuses what they do not
allow. The tools come with `make infra`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from ray.autoscaler.node_launch_exception import NodeLaunchException

import earmill
from earmill.jobs import cli
from earmill.pipeline.common.errors import EarmillError
from earmill.pipeline.storage.layout import Layout
from tests.chaos.jobs import write_corpus, write_job
from tests.infra.test_bucket_options import write_and_read
from tests.infra.test_by_tools import TOOLS, pytestmark, with_tools
from tests.infra.test_cluster_files import INFRA, read
from tests.infra.test_ray_on_aws import REGION, aws, bootstrapped, started
from tests.s3_stand_in import s3_stand_in

__all__ = ["aws", "pytestmark"]

FILE = INFRA / "bucket.tf"
ACCOUNT, BUCKET = "123456789012", "mine"
ROLE = f"arn:aws:iam::{ACCOUNT}:role/earmill-job"
VALUES = {
    "aws_s3_bucket.earmill.arn": f"arn:aws:s3:::{BUCKET}",
    "aws_iam_role.job.arn": ROLE,
}
LISTS = {"var.sources": ["corpus"], "var.kms_keys": [f"arn:aws:kms:eu-central-1:{ACCOUNT}:key/1"]}
Statement = dict[str, Any]


@cache
def parsed() -> dict[str, Any]:
    """Return the blocks of bucket.tf."""
    code = "import hcl2, json, sys; print(json.dumps(hcl2.load(open(sys.argv[1]))))"
    status, said = with_tools(code, FILE)
    assert status == 0, said
    blocks: dict[str, Any] = json.loads(said)
    return blocks


def plain(value: Any, each: str = "") -> Any:
    """Return a value without the marks of HCL, its references replaced."""
    if isinstance(value, list):
        return [plain(item, each) for item in value]
    if not isinstance(value, str):
        return value
    values = {**VALUES, "statement.value": each}
    filled = re.sub(r"\$\{([^}]*)\}", lambda match: values.get(match[1], match[0]), value)
    return filled.strip('"')


def blocks(kind: str) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield type, name and body of the blocks of a kind: resource or data."""
    for block in parsed()[kind]:
        for type_, named in block.items():
            for name, body in named.items():
                yield plain(type_), plain(name), body


def policy(name: str) -> dict[str, Any]:
    """Return a policy document as AWS gets it."""
    (body,) = [body for type_, each, body in blocks("data") if each == name]
    given = [(statement, "") for statement in body["statement"]]
    for block in body.get("dynamic", []):
        (dynamic,) = block.values()
        of_each = LISTS[dynamic["for_each"][2:-1]]
        given += [(content, each) for each in of_each for content in dynamic["content"]]
    return {"Version": "2012-10-17", "Statement": [in_json(*each) for each in given]}


def in_json(statement: dict[str, Any], each: str) -> Statement:
    """Return a statement in the words of AWS."""
    found: Statement = {"Effect": "Allow", "Action": plain(statement["actions"])}
    if "resources" in statement:
        found["Resource"] = plain(statement["resources"], each)
    for condition in statement.get("condition", []):
        key, values = plain(condition["variable"]), plain(condition["values"])
        found["Condition"] = {plain(condition["test"]): {key: values}}
    for principal in statement.get("principals", []):
        found["Principal"] = {plain(principal["type"]): plain(principal["identifiers"])}
    return found


def complaints(document: dict[str, Any]) -> set[str]:
    """Return what parliament, which knows all actions and resources of AWS, has to say."""
    code = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "from parliament import analyze_policy_string\n"
        "for found in analyze_policy_string(sys.argv[1]).findings:\n"
        "    print(found.issue, found.detail)\n"
    )
    status, said = with_tools(code, json.dumps(document))
    assert status == 0, said
    return {line for line in said.splitlines() if line}


def test_the_policies_name_actions_and_resources_that_fit() -> None:
    assert complaints(policy("job")) == set()
    # No resource exists before it is started, so there is nothing to name.
    stars = {"RESOURCE_STAR ['ec2:RunInstances']", "RESOURCE_STAR ['ec2:TerminateInstances']"}
    assert complaints(policy("head")) == stars
    wrong = policy("job")
    wrong["Statement"][1]["Action"].append("s3:GetObjekt")
    assert any("GetObjekt" in line for line in complaints(wrong))
    wrong = policy("job")
    wrong["Statement"][1]["Resource"] = f"arn:aws:s3:::{BUCKET}"
    assert any("RESOURCE_MISMATCH" in line for line in complaints(wrong))


def known_words(type_: str, *, is_data: bool) -> Mapping[str, set[str]]:
    """Return the words of Amazon's provider: by block, the names that it may hold."""
    name = type_.removeprefix("aws_").replace("_", "-")
    folder = f"data-aws-{name}" if is_data else name
    text = (TOOLS / "package" / "lib" / folder / "index.d.ts").read_text()
    words: dict[str, set[str]] = {}
    for interface, body in re.findall(r"^export interface (\w+).*?\{(.*?)^\}", text, re.M | re.S):
        words[interface] = set(re.findall(r"#\w+ \w+#(\w+)\}", body))
    return words


def unknown(body: dict[str, Any], prefix: str, words: Mapping[str, set[str]]) -> list[str]:
    """Return the names in a block that the provider does not know."""
    found = []
    for key, value in body.items():
        if key in ("__is_block__", "for_each"):
            continue
        inner = value if isinstance(value, list) else []
        if key == "dynamic":
            inner = [
                content for block in value for each in block.values() for content in each["content"]
            ]
            key = "statement"
        name = words.get(prefix) or words.get(prefix + "Config", set())
        found += [] if key in name else [key]
        camel = prefix + "".join(part.capitalize() for part in key.split("_"))
        for block in inner:
            if isinstance(block, dict):
                found += unknown(block, camel, words)
    return found


def test_amazons_provider_knows_every_word() -> None:
    for kind in ("resource", "data"):
        for type_, _, body in blocks(kind):
            words = known_words(type_, is_data=kind == "data")
            prefix = "".join(part.capitalize() for part in type_.removeprefix("aws_").split("_"))
            prefix = f"DataAws{prefix}" if kind == "data" else prefix
            assert unknown(body, prefix, words) == [], type_
            assert unknown({**body, "bukket": 1}, prefix, words) == ["bukket"], type_


def test_uploads_that_were_given_up_are_removed_and_no_object_expires() -> None:
    ((_, _, body),) = [each for each in blocks("resource") if "lifecycle" in each[0]]
    (rule,) = body["rule"]
    assert plain(rule["status"]) == "Enabled" and rule["filter"] == [{"__is_block__": True}]
    assert rule["abort_incomplete_multipart_upload"][0]["days_after_initiation"] >= 1
    assert rule.keys() <= {
        "id",
        "status",
        "filter",
        "abort_incomplete_multipart_upload",
        "__is_block__",
    }


@pytest.mark.skipif(shutil.which("terraform") is None, reason="terraform is in no package registry")
def test_terraform_finds_its_own_format() -> None:
    environment = {key: value for key, value in os.environ.items() if key[:3] != "TF_"}
    command = ["terraform", "fmt", "-check", "-"]
    for text, status in ((FILE.read_text(), 0), (FILE.read_text() + "a=[\n", 2)):
        done = subprocess.run(command, input=text, text=True, capture_output=True, env=environment)
        assert done.returncode == status, done.stdout + done.stderr


@contextmanager
def account(document: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[str]:
    """Yield the address of an AWS whose every request must be allowed by a policy, with the
    credentials of a role that has it in the environment."""
    with s3_stand_in() as address:
        keys = {"aws_access_key_id": "root", "aws_secret_access_key": "root"}
        make = {"endpoint_url": address, "region_name": "us-east-1", **keys}
        iam, s3 = boto3.client("iam", **make), boto3.client("s3", **make)
        trust = json.dumps(policy("job_trust"))
        iam.create_role(RoleName="earmill-job", AssumeRolePolicyDocument=trust)
        text = json.dumps(in_the_stand_in(document))
        iam.put_role_policy(RoleName="earmill-job", PolicyName="bucket", PolicyDocument=text)
        s3.create_bucket(Bucket=BUCKET)
        taken = boto3.client("sts", **make).assume_role(RoleArn=ROLE, RoleSessionName="job")
        set_credentials(taken["Credentials"], patch)
        patch.setenv("AWS_ENDPOINT_URL_S3", address)
        patch.setenv("AWS_REGION", "us-east-1")
        try:
            check_rights(address, "0")
            yield address
        finally:
            check_rights(address, "inf")
            for found in s3.list_objects_v2(Bucket=BUCKET).get("Contents", []):
                s3.delete_object(Bucket=BUCKET, Key=found["Key"])
            s3.delete_bucket(Bucket=BUCKET)
            iam.delete_role_policy(RoleName="earmill-job", PolicyName="bucket")
            iam.delete_role(RoleName="earmill-job")


def set_credentials(taken: Mapping[str, Any], patch: pytest.MonkeyPatch) -> None:
    """Put the credentials of a role into the environment."""
    patch.setenv("AWS_ACCESS_KEY_ID", taken["AccessKeyId"])
    patch.setenv("AWS_SECRET_ACCESS_KEY", taken["SecretAccessKey"])
    patch.setenv("AWS_SESSION_TOKEN", taken["SessionToken"])


def in_the_stand_in(document: dict[str, Any]) -> dict[str, Any]:
    """Allow removals in the bucket itself as well. If one request removes several objects, moto
    asks for the right on the bucket; AWS asks for it on each object."""
    statements = [{**each} for each in document["Statement"]]
    for each in statements:
        if "s3:DeleteObject" in each["Action"]:
            each["Resource"] = [*each["Resource"], f"arn:aws:s3:::{BUCKET}"]
    return {**document, "Statement": statements}


def check_rights(address: str, behind: str) -> None:
    """Let the stand-in check the rights of all requests but the first `behind`."""
    url, text = f"{address}/moto-api/reset-auth", {"Content-Type": "text/plain"}
    request = urllib.request.Request(url, behind.encode(), text, method="POST")
    urllib.request.urlopen(request, timeout=10).close()


def test_a_job_needs_no_other_right(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "corpus", 2)
    with account(policy("job"), monkeypatch):
        inside = Layout.open(f"s3://{BUCKET}/in")
        for path in corpus.iterdir():
            inside.write_bytes(path.name, path.read_bytes())
        text = write_job(tmp_path / "job.yaml", corpus, tmp_path / "out").read_text()
        text = text.replace(str(corpus), f"s3://{BUCKET}/in")
        text = text.replace(str(tmp_path / "out"), f"s3://{BUCKET}/out")
        Layout.open(f"s3://{BUCKET}").write_bytes("job.yaml", text.encode())
        extract = ["extract", f"s3://{BUCKET}/job.yaml", "--set", "run.workers=1"]
        assert cli.run(extract) == 0
        assert earmill.verify(f"s3://{BUCKET}/out").rows_ok == 2
        assert cli.run([*extract, "--join"]) == 0


@pytest.mark.parametrize("action", ["", "List", "Get", "Put", "Delete"])
def test_a_job_needs_each_right(action: str, monkeypatch: pytest.MonkeyPatch) -> None:
    document = policy("job")
    for statement in document["Statement"]:
        kept = [each for each in statement["Action"] if not action or f":{action}" not in each]
        statement["Action"] = kept or ["s3:GetBucketLocation"]
    with account(document, monkeypatch):
        layout = Layout.open(f"s3://{BUCKET}/out")
        if action:
            with pytest.raises(EarmillError, match=r"AccessDenied|Access Denied|403"):
                write_and_read(layout)
        else:
            write_and_read(layout)


@contextmanager
def head(document: dict[str, Any], patch: pytest.MonkeyPatch) -> Iterator[None]:
    """Work with the rights of the cluster's head alone."""
    from moto.core.authorization import enable_iam_authentication
    from ray.autoscaler._private.aws import utils

    iam = boto3.client("iam", region_name=REGION)
    trust, text = json.dumps(policy("head_trust")), json.dumps(document)
    role = iam.create_role(RoleName="earmill-head", AssumeRolePolicyDocument=trust)["Role"]
    iam.put_role_policy(RoleName="earmill-head", PolicyName="workers", PolicyDocument=text)
    sts = boto3.client("sts", region_name=REGION)
    taken = sts.assume_role(RoleArn=role["Arn"], RoleSessionName="head")["Credentials"]
    set_credentials(taken, patch)
    patch.setattr(boto3, "DEFAULT_SESSION", None)
    for cached in (utils.resource_cache, utils.client_cache):
        cached.cache_clear()
    try:
        with enable_iam_authentication():
            yield
    finally:
        iam.delete_role_policy(RoleName="earmill-head", PolicyName="workers")
        iam.delete_role(RoleName="earmill-head")


@pytest.mark.parametrize("action", ["", "Run", "Describe", "Terminate"])
def test_the_head_needs_each_right(action: str, aws: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = bootstrapped(read("ray-cluster.yaml"), aws)
    document = policy("head")
    for statement in document["Statement"]:
        kept = [each for each in statement["Action"] if not action or f":{action}" not in each]
        statement["Action"] = kept or ["s3:GetBucketLocation"]
        statement.pop("Condition", None)  # the stand-in knows no tags in conditions
    with head(document, monkeypatch):
        if action:
            with pytest.raises((ClientError, NodeLaunchException), match="not authorized"):
                started(config, "cpu-spot", ends=True)
        else:
            started(config, "cpu-spot", ends=True)
