"""`earmill watch --page`: what is served, to whom, and how it goes on and ends."""

from __future__ import annotations

import http.client
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from earmill.jobs.cli import run
from earmill.jobs.report.live import LivePage
from earmill.jobs.report.server import PageServer, parse_place, refusal
from earmill.pipeline.dataset.description import open_dataset
from earmill.pipeline.dataset.watch import JobWatch
from earmill.pipeline.storage.layout import Layout
from tests.jobs.html_page import Element, parsed
from tests.jobs.test_report import HOSTILE, SHOWN, figures
from tests.pipeline import outputs
from tests.waiting import wait_until

STORED = Path(__file__).parents[1] / "data" / "layout2" / "dataset"
PAGE = "<!doctype html><p>hello</p>"


@pytest.fixture
def server() -> Iterator[PageServer]:
    with PageServer(("127.0.0.1", 0), PAGE) as found:
        yield found


def asked(
    url: str, path: str = "/", method: str = "GET", **headers: str
) -> tuple[int, str, http.client.HTTPMessage]:
    """Status, body and headers of an answer; `Host` as a header replaces the usual one."""
    host = url.removeprefix("http://").rstrip("/")
    connection = http.client.HTTPConnection(host, timeout=30)
    try:
        connection.putrequest(method, path, skip_host=True)
        for name, value in ({"Host": host} | headers).items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.read().decode(), answer.headers
    finally:
        connection.close()


def test_the_page_is_served_and_can_be_replaced(server: PageServer) -> None:
    status, body, headers = asked(server.url)
    assert (status, body) == (200, PAGE)
    assert headers["Cache-Control"] == "no-store" and headers["X-Frame-Options"] == "DENY"
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    server.show("<p>another</p>")
    assert asked(server.url)[1] == "<p>another</p>"
    assert asked(server.url, "/?x=1")[0] == 200
    assert asked(server.url, "/../etc/passwd")[0] == asked(server.url, "/data")[0] == 404
    assert asked(server.url, method="HEAD")[:2] == (200, "")
    assert asked(server.url, method="POST")[0] == 501


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "evil.example"},
        {"Host": "evil.example:80"},
        {"Host": "localhost.evil.example"},
        {"Host": "192.168.1.7"},
        {"Host": ""},
        {"Host": "[::"},
        {"Origin": "http://evil.example"},
        {"Origin": "null"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "iframe"},
        {"Sec_Fetch_Site": "same-site", "Sec_Fetch_Dest": "empty"},
    ],
)
def test_other_names_and_other_pages_get_nothing(
    server: PageServer, headers: dict[str, str]
) -> None:
    status, body, _ = asked(server.url, **headers)
    assert status == 403 and "hello" not in body


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "localhost:8640"},  # through a tunnel
        {"Host": "[::1]:9"},
        {"host": "127.0.0.1"},
        {"Sec_Fetch_Site": "same-origin", "Sec_Fetch_Dest": "empty"},
        {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Dest": "document"},  # a link to it
    ],
)
def test_a_person_gets_it(server: PageServer, headers: dict[str, str]) -> None:
    if "host" in headers:
        headers = {"Host": headers["host"]}
    assert asked(server.url, **headers)[0] == 200


def test_an_address_for_others_is_known_by_addresses_and_its_name() -> None:
    assert refusal({"Host": "10.0.0.5:8640"}, "0.0.0.0") == ""
    assert refusal({"Host": "evil.example"}, "0.0.0.0")
    assert refusal({"Host": "me.lan:1"}, "me.lan") == ""


@pytest.mark.parametrize("text", ["", "http", "a:b", "1:2:3", ":99999", "127.0.0.1:", "-1", "²"])
def test_what_is_no_address_is_said(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="expected PORT or HOST:PORT"):
        parse_place(text)


def test_usage_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["watch", str(tmp_path), "--page", "x"]) == 2
    assert run(["watch", str(tmp_path), "--page", "0", "--once"]) == 2
    assert run(["watch", str(tmp_path), "--page", "0"]) == 2
    assert "no job has begun here" in capsys.readouterr().err


def test_a_port_that_is_taken_is_said(server: PageServer, tmp_path: Path) -> None:
    port = server.url.rstrip("/").rpartition(":")[2]
    assert run(["watch", str(tmp_path), "--page", port]) == 2


def live(uri: str) -> Element:
    job = JobWatch(Layout.open(uri))
    found = job.look()
    assert found is not None
    return parsed(LivePage(Layout.open(uri), job, 5.0).of(found))


def test_the_page_says_what_the_commits_say() -> None:
    found = JobWatch(Layout.open(str(STORED))).look()
    assert found is not None
    page = live(str(STORED))
    shown = figures(page)
    assert shown["rows"] == f"{found.rows_done}" and shown["shards"] == f"{found.shards_done}"
    assert shown["quarantined"] == f"{found.rows_bad}" and found.rows_bad > 0
    assert page.all("progress")[0].attributes["value"] == "1.0"
    assert page.by_id("live-told").text == "finished, 100 % done"
    assert all(reason in page.by_id("reasons").text for reason in found.bad_by_class)
    scripts = [one for one in page.walk() if one.tag == "script" or "src" in one.attributes]
    assert len(scripts) == 1


def test_hostile_texts_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.open(tmp_path / "out")
    bad = outputs.make_bad(HOSTILE, HOSTILE)
    outputs.write_plan(layout, {"00000": [bad.row_id]})
    open_dataset(layout, outputs.dataset_file(name=HOSTILE))
    assert outputs.publish(layout, bad=[bad], plan_rows=[bad.row_id])
    # The plan of this set has no durations, which a job's own has.
    job = JobWatch(layout)
    monkeypatch.setattr("earmill.pipeline.dataset.watch.Plan.read", lambda *_: _NoPlan)
    found = job.look()
    assert found is not None
    page = parsed(LivePage(layout, job, 5.0).of(found, trouble=HOSTILE))
    assert len(page.all("script")) == 1 and SHOWN in page.all("h1")[0].text
    assert SHOWN in page.by_id("live-quarantine").text and SHOWN in page.all("p")[2].text


class _NoPlan:
    shards = (type("Shard", (), {"shard_id": "00000", "rows": 1, "seconds": 1.0}),)


def until(look: Callable[[], str], text: str) -> str:
    """What is served, once a text is in it."""
    found = [""]

    def has_come() -> bool:
        found[0] = look()
        return text in found[0]

    wait_until(has_come, lambda: f"{text!r} did not come: {found[0][:2000]}")
    return found[0]


def test_a_page_waits_for_its_job_follows_it_and_ends_with_ctrl_c(tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = [sys.executable, "-m", "earmill.jobs.start", "watch", str(out), "--page", "0"]
    watch = subprocess.Popen(
        [*command, "--wait", "--every", "0.1"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    try:
        assert watch.stderr is not None and watch.stdout is not None
        (url,) = re.findall(r"http://127\.0\.0\.1:\d+/", watch.stderr.readline())
        assert "No job has begun here yet" in asked(url)[1]
        shutil.copytree(STORED, tmp_path / "new")
        (tmp_path / "new" / "current.json").rename(tmp_path / "current.json")
        (tmp_path / "new").rename(out)
        until(lambda: asked(url)[1], ">closing</span>")
        (tmp_path / "current.json").rename(out / "current.json")
        until(lambda: asked(url)[1], ">finished</span>")
        # Its output is away: the page stays, and says so.
        out.rename(tmp_path / "away")
        out.write_text("")
        until(lambda: asked(url)[1], "This look failed")
        watch.send_signal(signal.SIGINT)
        said, errors = watch.communicate(timeout=60)
        assert watch.returncode == 0, errors
        assert "finished: all shards are committed" in said and "the page is closed" in errors
        assert "Traceback" not in errors
    finally:
        watch.kill()
        watch.wait()
