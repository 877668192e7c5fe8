"""Which files are rows: hidden ones not, links once, odd names too; the rest is counted."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from earmill.pipeline.common.errors import SourceError
from earmill.pipeline.driver.events import JobFinished
from earmill.pipeline.driver.shard_ledger import Result
from earmill.pipeline.formats.row_table import quarantine_table, write_table
from earmill.pipeline.operations.run_job import summarise
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.planning.plan import skipped_text
from earmill.pipeline.sources import Item
from earmill.pipeline.spec.job import JobSpec, RunSpec
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.audio_factory import clip
from tests.pipeline.only_plan import only_plan
from tests.pipeline.outputs import make_bad, make_row, publish
from tests.pipeline.source_helpers import contents, files, ids, write_corpus
from tests.pipeline.test_plan import ListSource

WAV = clip("wav", 0.2)


def write(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(WAV)
    return root


def spec(uri: Path | str = "x", **audio: object) -> JobSpec:
    section = {"source": {"kind": "files", "uri": str(uri)}, "extract": [{"model": "m"}]}
    return JobSpec.load(section | {"output": {"uri": "o"}, "audio": audio})


class TestSkipped:
    def test_files_that_are_no_rows_are_counted(self, tmp_path: Path) -> None:
        corpus = write_corpus(tmp_path / "corpus")
        write(corpus, "deep/x.TXT", "README", ".hidden.wav", ".git/a.wav", "._b.wav")
        plan = make_plan(files(corpus), spec(corpus))
        assert plan.rows == 6
        assert plan.skipped == {"hidden": 3, ".txt": 2, ".jpg": 1, "no extension": 1}
        assert plan.notes == ["7 files skipped: hidden 3, .txt 2, .jpg 1, no extension 1"]
        layout = Layout.open(str(tmp_path / "out"))
        plan.write(layout)
        assert only_plan(layout) == plan
        # Not part of what makes the plan this plan.
        (corpus / "notes.txt").unlink()
        assert make_plan(files(corpus), spec(corpus)).plan_id == plan.plan_id

    def test_what_the_glob_leaves_out_was_meant_to_be(self, tmp_path: Path) -> None:
        source = files(write_corpus(tmp_path), glob="deep/*")
        assert ids(source) == ["deep/d.MP3"]
        assert source.skipped() == {".jpg": 1}

    def test_words(self) -> None:
        assert skipped_text({}) == ""
        assert skipped_text({".txt": 1}) == "1 file skipped: .txt 1"
        assert skipped_text({".txt": 10, ".jpg": 2}) == "12 files skipped: .txt 10, .jpg 2"
        # A stored plan gives them by name.
        assert skipped_text({".avi": 1, "hidden": 3}) == "4 files skipped: hidden 3, .avi 1"
        many = skipped_text({f".{n}": 1000 for n in range(9)})
        assert many.startswith("9,000 files skipped: .0 1,000, ")
        assert many.endswith(", 3 more kinds")

    def test_the_summary_says_so(self, tmp_path: Path) -> None:
        job: Any = SimpleNamespace(layout=Layout.open(str(tmp_path)))
        job.plan = SimpleNamespace(shards=(), skipped={".txt": 10, ".jpg": 2})
        job.spec = SimpleNamespace(run=RunSpec())
        end = summarise(job, Result(), [])
        assert isinstance(end, JobFinished)
        assert end.message.endswith("; 12 files skipped: .txt 10, .jpg 2")


class TestHidden:
    def test_they_are_no_rows(self, tmp_path: Path) -> None:
        write(tmp_path, "a.wav", "._a.wav", ".b.wav", ".cache/c.wav", "d/.e/f.wav")
        assert ids(files(tmp_path)) == ["a.wav"]

    def test_unless_they_are_asked_for(self, tmp_path: Path) -> None:
        write(tmp_path, "a.wav", ".b.wav", ".cache/c.wav")
        assert ids(files(tmp_path, glob=".cache/*")) == [".cache/c.wav"]
        assert ids(files(tmp_path / ".b.wav")) == [".b.wav"]
        assert ids(files(write(tmp_path / ".corpus", "a.wav"))) == ["a.wav"]


class TestLinks:
    def test_linked_folders_are_followed_once(self, tmp_path: Path) -> None:
        """The same folder under three names is one folder, called by its own name if it has one."""
        corpus = write(tmp_path / "corpus", "own/a.wav")
        write(tmp_path / "elsewhere", "b.wav", "deep/c.wav")
        os.symlink(corpus / "own", corpus / "again")
        os.symlink(tmp_path / "elsewhere", corpus / "x")
        os.symlink(tmp_path / "elsewhere", corpus / "y")
        os.symlink(tmp_path / "elsewhere" / "deep", corpus / "z")
        source = files(corpus)
        assert ids(source) == ["own/a.wav", "x/b.wav", "x/deep/c.wav"]
        assert contents(source, list(source.items())) == [WAV] * 3

    def test_circles_end(self, tmp_path: Path) -> None:
        corpus = write(tmp_path / "corpus", "a.wav", "deep/b.wav")
        write(tmp_path, "outside.wav")
        os.symlink(corpus, corpus / "deep" / "up")
        os.symlink("..", corpus / "parent")
        os.symlink("/", corpus / "everything")
        os.symlink("itself", corpus / "itself")
        assert ids(files(corpus)) == ["a.wav", "deep/b.wav"]

    def test_a_linked_file_is_its_target(self, tmp_path: Path) -> None:
        corpus = write(tmp_path / "corpus", "a.wav")
        write(tmp_path, "target.wav")
        os.utime(tmp_path / "target.wav", (1.0, 2.0))
        os.symlink(tmp_path / "target.wav", corpus / "b.wav")
        item = list(files(corpus).items())[1]
        assert (item.size, item.mtime) == (len(WAV), 2.0)


class TestNames:
    def test_a_name_that_is_no_text_is_a_row_like_others(self, tmp_path: Path) -> None:
        """File names are bytes; ids and uris are text, from which the bytes can be had back."""
        odd = [b"caf\xe9.wav", b"100%\xff/a b.wav", b"plain 100%.wav"]
        for name in odd:
            path = os.path.join(os.fsencode(tmp_path), name)
            os.makedirs(os.path.dirname(path), exist_ok=True)
            with open(path, "wb") as file:
                file.write(WAV)
        source = files(tmp_path)
        plan = make_plan(source, spec(tmp_path))
        items = list(plan.items())
        assert [i.row_id for i in items] == ["100%25%FF/a b.wav", "caf%E9.wav", "plain 100%.wav"]
        assert items[1].uri == f"file://{tmp_path}/caf%E9.wav"
        assert [item.seconds for item in items] == pytest.approx([0.2] * 3, abs=1e-4)
        layout = Layout.open(str(tmp_path / ".out"))
        plan.write(layout)
        again = list(only_plan(layout).items())
        assert contents(files(tmp_path), again) == [WAV] * 3
        # Every table takes them.
        assert publish(layout, rows=[make_row(item.row_id) for item in again])
        write_table(quarantine_table([make_bad(again[1].uri)]), tmp_path / ".q.parquet")

    def test_a_missing_one_is_one_bad_row(self, tmp_path: Path) -> None:
        path = os.path.join(os.fsencode(tmp_path), b"caf\xe9.wav")
        with open(path, "wb") as file:
            file.write(WAV)
        source = files(tmp_path)
        items = list(source.items())
        os.unlink(path)
        (error,) = contents(source, items)
        assert str(error).encode().isascii()
        assert "caf%E9.wav" in str(error)

    def test_escaped_names_that_meet_are_two_rows(self, tmp_path: Path) -> None:
        for name in (b"caf\xe9.wav", b"caf%E9.wav"):
            with open(os.path.join(os.fsencode(tmp_path), name), "wb") as file:
                file.write(WAV)
        plan = make_plan(files(tmp_path), spec(tmp_path))
        assert {item.row_id for item in plan.items()} == {"./caf%E9.wav", "caf%E9.wav"}


class TestChannels:
    ITEMS = (Item("x", "/x"), Item("x#ch0", "/y"), Item("z#ch1", "/z"))

    def test_a_channel_may_not_be_called_as_another_row(self) -> None:
        """Both made a row `x#ch0`: the shard could never be committed."""
        with pytest.raises(SourceError, match="row 'x' the id 'x#ch0', which another row"):
            make_plan(ListSource(self.ITEMS), spec(channels="each"))

    def test_other_policies_have_no_such_rows(self) -> None:
        assert make_plan(ListSource(self.ITEMS), spec(channels="mean")).rows == 3
        apart = (self.ITEMS[0], self.ITEMS[2])
        assert make_plan(ListSource(apart), spec(channels="each")).rows == 2


def test_a_single_file_is_not_looked_for_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "a.wav", "b.wav")
    monkeypatch.setattr("os.scandir", lambda path: pytest.fail("the folder was listed"))
    source = files(tmp_path / "a.wav")
    assert ids(source) == ["a.wav"]
    assert source.skipped() == {}
