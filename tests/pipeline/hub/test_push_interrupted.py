"""A push that is killed, refused, cut off or overtaken goes on and sends nothing twice."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from werkzeug.wrappers import Request, Response

import earmill
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.hub import push as pushing
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.hub.pushing import ID, is_commit, is_put, pushed, puts
from tests.pipeline.hub.stand_in import HubStandIn, said
from tests.pipeline.outputs import s3_server
from tests.pipeline.reader_data import Writer
from tests.pipeline.reader_data import make_row as reader_row

# How huggingface_hub sends large files.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


def test_a_client_that_was_killed_goes_on_and_sends_no_file_twice(
    stand_in: HubStandIn, layout: Layout, tmp_path: Path
) -> None:
    victim: list[subprocess.Popen[str]] = []

    def kill(request: Request) -> Response | None:
        if is_put(request) and len(stand_in.blobs) >= 5:
            os.kill(victim[0].pid, signal.SIGKILL)
        return None

    stand_in.before = kill
    environment = {**os.environ, "HF_HUB_OFFLINE": "0", "HF_HUB_DISABLE_XET": "1"}
    command = [sys.executable, "-m", "earmill.jobs.start", "push", layout.url(), ID]
    victim.append(subprocess.Popen(command, env=environment, text=True))
    assert victim[0].wait(120) == -signal.SIGKILL
    assert set(stand_in.tree(ID)) == {".gitattributes"}  # nothing is half there
    held, reads = set(stand_in.blobs), []
    assert len(held) >= 5
    stand_in.before = lambda request: reads.append(request.path) if is_put(request) else None
    assert pushed(layout) == 0
    assert not {path.rpartition("/")[2] for path in reads} & held
    assert set(puts(stand_in)) == {1}
    assert verify(Layout.open(stand_in.write(ID, tmp_path / "copy"))).problems == []


def test_what_a_server_refuses_for_now_is_sent_again(stand_in: HubStandIn, layout: Layout) -> None:
    failed: list[str] = []

    def sick(request: Request) -> Response | None:
        often = 2 if is_put(request) else 1
        is_meant = is_put(request) or is_commit(request) or "preupload" in request.path
        if is_meant and failed.count(request.path) < often:
            failed.append(request.path)
            request.get_data()
            return said(503, "Service Unavailable")
        return None

    stand_in.before = sick
    assert pushed(layout) == 0
    assert len(failed) > 10 and set(puts(stand_in)) == {1} and len(stand_in.repos[ID].trees) == 2


def test_a_server_that_stays_away_is_one_line_and_the_next_push_goes_on(
    stand_in: HubStandIn, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in.before = lambda request: (
        said(500, "no disk") if is_put(request) and len(stand_in.blobs) > 3 else None
    )
    assert pushed(layout, "--json") == 1
    told = capsys.readouterr()
    (line,) = told.err.splitlines()
    assert "the hub does not answer (500)" in line and "run the same command again" in line
    assert json.loads(told.out.splitlines()[-1])["event"] == "error"
    held = dict(stand_in.puts)
    stand_in.before = lambda request: None
    assert pushed(layout) == 0
    assert set(puts(stand_in)) == {1} and held.keys() < stand_in.puts.keys()


def test_a_commit_whose_answer_got_lost_is_not_made_twice(
    stand_in: HubStandIn, layout: Layout
) -> None:
    lost: list[str] = []

    def lose(request: Request) -> Response | None:
        if is_commit(request) and not lost:
            lost.append(request.path)
            repo = stand_in.repos[ID]
            assert stand_in._commit(request, repo, "main").status_code == 200
            return said(504, "Gateway Timeout")
        return None

    stand_in.before = lose
    assert pushed(layout) == 0
    assert lost and len(stand_in.repos[ID].trees) == 2


def test_who_commits_meanwhile_is_not_overwritten(
    stand_in: HubStandIn, layout: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    def meddle(request: Request) -> Response | None:
        if is_commit(request) and len(repo().trees) == 1:
            repo().commit("main", {"README.md": ("regular", b"mine")}, "by hand")
        return None

    def repo() -> Any:
        return stand_in.repos[ID]

    stand_in.before = meddle
    assert pushed(layout) == 1
    assert "somebody else committed to main meanwhile" in capsys.readouterr().err
    assert stand_in.tree(ID) == {"README.md": b"mine"}
    assert pushed(layout) == 0 and set(puts(stand_in)) == {1}


@pytest.mark.long
def test_a_bucket_is_streamed_through_one_group_and_sent_once(
    stand_in: HubStandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(pushing, "GROUP_FILES", 2)
    uploaded: list[int] = []
    upload = pushing._upload

    def watched(layout: Layout, repo: Any, group: Any) -> Any:
        uploaded.append(len(group))
        if len(uploaded) == 6:
            raise KeyboardInterrupt
        return upload(layout, repo, group)

    with s3_server() as options:
        writer = Writer("s3://out/features", formats=["parquet"], storage_options=options)
        for shard in range(3):
            writer.shard(shard, [reader_row(shard, 0.5)])
        writer.finalise()
        told = ["--storage-options", json.dumps(options)]
        monkeypatch.setattr(pushing, "_upload", watched)
        assert pushed(writer.layout, *told) == 130
        monkeypatch.setattr(pushing, "_upload", upload)
        assert stand_in.blobs and pushed(writer.layout, *told) == 0
        assert max(uploaded) == 2
        assert set(puts(stand_in)) == {1}
    copy = stand_in.write(ID, tmp_path / "copy")
    assert verify(Layout.open(copy)).problems == [] and len(earmill.open_features(copy)) == 3
    assert b"user-secret" not in b"".join(stand_in.tree(ID).values())
