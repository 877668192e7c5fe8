"""infra/aws-batch.json by the service model of AWS's own client, and in a stand-in of AWS Batch."""

from __future__ import annotations

import json
from typing import Any

import boto3
import pytest
from botocore.exceptions import ParamValidationError

from earmill.pipeline.driver.sharing import sharing_of
from earmill.pipeline.spec.job import RunSpec
from tests.docs.test_code_of_pages import complaint
from tests.infra.test_cluster_files import INFRA

DEFINITION: dict[str, Any] = json.loads((INFRA / "aws-batch.json").read_text())
COMMAND: list[str] = DEFINITION["containerProperties"]["command"]


def test_aws_takes_the_definition() -> None:
    from moto import mock_aws

    with mock_aws():
        batch = boto3.client("batch", region_name="eu-central-1")
        batch.register_job_definition(**DEFINITION)
        (found,) = batch.describe_job_definitions(jobDefinitionName="earmill")["jobDefinitions"]
        assert found["containerProperties"]["command"] == COMMAND
        assert found["containerProperties"]["jobRoleArn"].endswith(":role/earmill-job")
        with pytest.raises(ParamValidationError, match="jobRole"):
            wrong = {**DEFINITION["containerProperties"], "jobRole": "earmill-job"}
            batch.register_job_definition(**{**DEFINITION, "containerProperties": wrong})


def test_the_command_is_one_of_earmill() -> None:
    filled = [DEFINITION["parameters"]["job"] if word == "Ref::job" else word for word in COMMAND]
    assert complaint(["earmill", *filled]) is None
    assert complaint(["earmill", *filled, "--reesume"]) is not None


def test_a_task_of_the_array_knows_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = dict(word.split("=") for word in COMMAND if word.startswith("run."))
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_INDEX", "25")
    monkeypatch.setenv("AWS_BATCH_JOB_ARRAY_SIZE", "100")
    run = RunSpec(executor=setting["run.executor"])
    sharing = sharing_of(run, join=False, finish=False)
    assert (sharing.joins, sharing.stays, sharing.start) == (True, False, 0.25)
