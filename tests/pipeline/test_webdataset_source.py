"""WebDataset tars as a source: what the package's own writer wrote, and tars that nobody should."""

from __future__ import annotations

import io
import json
import tarfile
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from earmill.pipeline.common import untrusted
from earmill.pipeline.common.errors import AbsentError, RowError, SourceError, UnreadableError
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import fetch, open_source
from earmill.pipeline.spec.job import JobSpec
from tests.pipeline.audio_factory import clip
from tests.pipeline.outputs import s3_server
from tests.pipeline.source_helpers import contents, ids
from tests.pipeline.tars import WAV, Members, source, write_shards, write_tar
from tests.pipeline.web_server import web_server


class TestWhatThePackageWrote:
    def test_rows_columns_and_bytes(self, tmp_path: Path) -> None:
        opened = source(write_shards(tmp_path / "c") / "train-{000..002}.tar")
        items = list(opened.items())
        assert [item.row_id for item in items] == [
            f"train-{n // 4:03d}.tar/speaker/utt{n:03d}" for n in range(12)
        ]
        assert [item.position for item in items] == list(range(12))
        assert items[5].extra == {
            "speaker": "0005",
            "snr": 2.5,
            "tags": '["a", "b"]',
            "cls": 2,
            "txt": "utterance 5",
        }
        assert [item.seconds for item in items] == pytest.approx([0.2] * 12, abs=0.001)
        wanted = [clip("flac", 0.2, seed=number) for number in range(12)]
        assert contents(opened, items) == wanted
        assert [item.size for item in items] == [len(data) for data in wanted]
        # Any worker, any order, other neighbours.
        assert contents(source(opened._section.uri), items[::-3]) == wanted[::-3]
        assert opened.skipped() == {}

    @pytest.mark.parametrize("pattern", ["", "*.tar", "train-{000..002}.tar", "train-00[012].tar"])
    def test_a_folder_a_glob_and_braces_name_the_same_rows(
        self, pattern: str, tmp_path: Path
    ) -> None:
        folder = write_shards(tmp_path / "c")
        wanted = ids(source(folder))
        assert len(wanted) == 12
        assert ids(source(folder / pattern)) == wanted
        assert ids(source(f"file://{folder}/{pattern}")) == wanted

    def test_braces_keep_their_order_and_a_moved_corpus_its_ids(self, tmp_path: Path) -> None:
        folder = write_shards(tmp_path / "c", 2)
        found = ids(source(folder / "train-{001,000}.tar"))
        assert found[0] == "train-001.tar/speaker/utt004"
        folder.rename(tmp_path / "moved")
        assert ids(source(tmp_path / "moved" / "train-{001,000}.tar")) == found
        assert ids(source(tmp_path / "{moved,moved}" / "train-000.tar"))[0].startswith(
            "moved/train-000"
        )

    def test_listing_twice_is_equal_and_so_is_the_plan(self, tmp_path: Path) -> None:
        opened = source(write_shards(tmp_path / "c"))
        listed = [(item.row_id, item.uri, item.size, item.mtime) for item in opened.listing()]
        items = list(opened.items())
        assert listed == [(item.row_id, item.uri, item.size, item.mtime) for item in items]
        job = {
            "source": {"kind": "webdataset", "uri": str(tmp_path / "c")},
            "extract": [{"model": "dau1997"}],
            "output": {"uri": "out", "shard_rows": 5},
        }
        spec = JobSpec.load(job)
        plans = [make_plan(open_source(spec.source), spec) for _ in range(2)]
        assert plans[0] == plans[1]
        assert [len(shard.items) for shard in plans[0].shards] == [5, 5, 2]
        assert plans[0].extra_types["cls"] == "int64"


class TestOnStores:
    def test_a_bucket(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        folder = write_shards(tmp_path / "c")
        with s3_server("corpus") as options:
            fs = fsspec.filesystem("s3", **options)
            fs.put(str(folder), "corpus/wds", recursive=True)
            opened = source("s3://corpus/wds/train-{000..002}.tar", storage_options=options)
            items = list(opened.items())
            assert [item.row_id for item in items] == ids(source(folder))
            assert items[0].uri.startswith("s3://corpus/wds/train-000.tar#sample=speaker/utt000&")
            assert items[0].etag is not None
            wanted = [clip("flac", 0.2, seed=number) for number in range(12)]
            assert contents(opened, items) == wanted
            assert ids(source("s3://corpus/wds/*.tar", storage_options=options)) == ids(opened)
            assert ids(source("s3://corpus/wds", storage_options=options)) == ids(opened)
            monkeypatch.setattr(fetch, "MEMORY_BYTES", 1000)  # through a file
            assert contents(opened, items[:3]) == wanted[:3]
            assert "user-secret" not in json.dumps(opened.describe())

    def test_a_web_server(self, tmp_path: Path) -> None:
        folder = write_shards(tmp_path / "c")
        with web_server(folder) as url:
            opened = source(f"{url}/train-{{000..002}}.tar")
            items = list(opened.items())
            assert [item.row_id for item in items] == ids(source(folder))
            assert contents(opened, items) == [clip("flac", 0.2, seed=n) for n in range(12)]


class TestBadRows:
    """One bad sample is one bad row, and says why."""

    @pytest.mark.parametrize(
        ("members", "options", "said"),
        [
            ([("a.txt", b"x")], {}, "expected one audio member, got txt"),
            ([("a.wav", WAV), ("a.flac", b"f")], {}, "got flac, wav; choose one by source.audio"),
            ([("a.wav", WAV)], {"audio": "flac"}, "expected an audio member .flac, got wav"),
            ([("a.wav", WAV), ("a.json", b"{")], {}, "its .json cannot be read"),
            ([("a.wav", WAV), ("a.json", b"[" * 100_000)], {}, "nested too deeply"),
            ([("a.wav", WAV), ("a.txt", b"\xff")], {}, "its .txt cannot be read"),
            ([("a.wav", WAV), ("a.txt", bytes(2**20 + 1))], {}, "at most 1 MB, got 1,048,577"),
            ([("a.wav", WAV), ("a.json", b'{"txt": 1}'), ("a.txt", b"x")], {}, "a column 'txt'"),
        ],
        ids=["none", "two", "other", "json", "deep", "text", "large", "column"],
    )
    def test_its_neighbours_are_not_touched(
        self, members: Members, options: dict[str, Any], said: str, tmp_path: Path
    ) -> None:
        good = [("z.wav", WAV), ("z.flac", WAV)][: 1 + ("audio" in options)]
        opened = source(write_tar(tmp_path / "x.tar", [*members, *good]), **options)
        items = list(opened.items())
        assert [item.row_id for item in items] == ["x.tar/a", "x.tar/z"]
        bad, fine = contents(opened, items)
        assert isinstance(bad, UnreadableError) and said in str(bad)
        assert "\n" not in str(bad) and fine == WAV

    def test_one_of_several_audio_members(self, tmp_path: Path) -> None:
        members = [("a.mic1.wav", WAV), ("a.MIC2.wav", clip("wav", 0.3))]
        opened = source(write_tar(tmp_path / "x.tar", members), audio=".mic2.WAV")
        assert contents(opened, list(opened.items())) == [clip("wav", 0.3)]

    def test_members_of_one_size_that_changed_places(self, tmp_path: Path) -> None:
        members = [("a.mic1.wav", WAV), ("a.mic2.wav", clip("wav", 0.2, seed=1))]
        opened = source(write_tar(tmp_path / "x.tar", members), audio="mic1.wav")
        items = list(opened.items())
        write_tar(tmp_path / "x.tar", members[::-1])
        (found,) = contents(opened, items)
        assert isinstance(found, UnreadableError) and "changed since" in str(found)

    def test_a_tar_that_changed_since_the_plan(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", [("a.wav", WAV), ("b.wav", WAV)])
        opened = source(path)
        items = list(opened.items())
        write_tar(path, [("0.wav", WAV), ("a.wav", WAV), ("b.wav", WAV)])
        for found in contents(opened, items):
            assert isinstance(found, UnreadableError) and "changed since" in str(found)
        path.write_bytes(path.read_bytes()[:100])
        assert all(isinstance(found, RowError) for found in contents(opened, items))
        path.unlink()
        assert all(isinstance(found, AbsentError) for found in contents(opened, items))

    def test_large_members_go_through_a_temporary_file(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(fetch, "MEMORY_BYTES", 1000)
        (tmp_path / "own").mkdir()
        monkeypatch.setattr(fetch, "own_folder", lambda: str(tmp_path / "own"))
        opened = source(write_tar(tmp_path / "x.tar", [("a.wav", WAV), ("b.wav", WAV)]))
        assert contents(opened, list(opened.items())) == [WAV, WAV]
        assert list((tmp_path / "own").iterdir()) == []


class TestNames:
    def test_names_that_would_lead_elsewhere_are_names(self, tmp_path: Path) -> None:
        names = [
            "../../up.wav",
            "/etc/abs.wav",
            "./here.wav",
            "deep/" * 40 + "x.wav",
            "a&c=d.wav",
        ]
        path = write_tar(tmp_path / "x.tar", [(name, WAV) for name in names])
        before = sorted(tmp_path.iterdir())
        opened = source(path)
        items = list(opened.items())
        assert [item.row_id for item in items] == [
            "x.tar/../../up",
            "x.tar//etc/abs",
            "x.tar/here",
            f"x.tar/{'deep/' * 40}x",
            "x.tar/a&c=d",
        ]
        assert contents(opened, items) == [WAV] * len(names)
        assert sorted(tmp_path.iterdir()) == before

    @pytest.mark.parametrize(
        "kind", [tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE, tarfile.CHRTYPE]
    )
    def test_links_and_devices_are_no_samples(self, kind: bytes, tmp_path: Path) -> None:
        with pytest.raises(SourceError, match="no samples in 1 tars"):
            ids(source(write_tar(tmp_path / "x.tar", [("a.wav", b"")], kind)))

    def test_what_is_no_sample_is_counted(self, tmp_path: Path) -> None:
        extra = [
            ("__meta__/x.json", b"{}"),
            ("README", b"x"),
            ("a.png", b"x"),
            ("a.left.npy", b"x"),
        ]
        opened = source(write_tar(tmp_path / "x.tar", [*extra, ("a.wav", WAV)]))
        assert ids(opened) == ["x.tar/a"]
        assert opened.skipped() == {".npy": 1, ".png": 1, "no sample": 2}

    def test_names_that_are_no_text(self, tmp_path: Path) -> None:
        name = b"a%\xff.wav".decode("utf-8", "surrogateescape")
        path = tmp_path / "x.tar"
        with tarfile.open(path, "w", format=tarfile.GNU_FORMAT, errors="surrogateescape") as tar:
            info = tarfile.TarInfo(name)
            info.size = len(WAV)
            tar.addfile(info, io.BytesIO(WAV))
        opened = source(path)
        assert ids(opened) == ["x.tar/a%25%FF"]
        assert contents(opened, list(opened.items())) == [WAV]


class TestDamage:
    """A tar that cannot be listed to its end ends the job before any work."""

    @pytest.mark.parametrize("keep", [0, 100, 700, 5000, -10240])
    def test_a_tar_that_is_cut_off(self, keep: int, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", [("a.wav", WAV), ("b.wav", WAV)])
        path.write_bytes(path.read_bytes()[:keep])
        with pytest.raises(SourceError, match=r"x\.tar: ") as caught:
            ids(source(path))
        assert "\n" not in str(caught.value)

    def test_a_header_in_the_middle_does_not_end_the_tar_in_silence(self, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", [("a.wav", WAV), ("b.wav", WAV), ("c.wav", WAV)])
        with tarfile.open(path) as tar:
            offset = tar.getmember("b.wav").offset
        content = bytearray(path.read_bytes())
        content[offset] ^= 1
        path.write_bytes(content)
        with pytest.raises(SourceError, match=f"damaged header at byte {offset:,}"):
            ids(source(path))

    @pytest.mark.parametrize("content", [b"", b"no tar at all" * 100, None])
    def test_what_is_no_tar(self, content: bytes | None, tmp_path: Path) -> None:
        path = tmp_path / "x.tar"
        if content is None:
            with tarfile.open(path, "w:gz") as tar:
                tar.addfile(tarfile.TarInfo("a.wav"))
        else:
            path.write_bytes(content)
        with pytest.raises(SourceError, match="expected a whole, uncompressed tar"):
            ids(source(path))

    def test_a_header_of_any_claimed_size_is_not_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(untrusted, "MAX_HELD_BYTES", 4096)
        path = write_tar(tmp_path / "x.tar", [("a" * 9000 + ".wav", WAV)])
        with pytest.raises(SourceError, match="a header claims to have"):
            ids(source(path))

    @pytest.mark.parametrize("kind", [tarfile.REGTYPE, tarfile.GNUTYPE_LONGNAME])
    def test_a_size_below_zero_leads_nowhere(self, kind: bytes, tmp_path: Path) -> None:
        """It would lead back to a header before it, for ever."""
        first, second = tarfile.TarInfo("a.wav"), tarfile.TarInfo("b.wav")
        second.size, second.type = -1024, kind
        blocks = [info.tobuf(tarfile.GNU_FORMAT) for info in (first, second)]
        (tmp_path / "x.tar").write_bytes(b"".join(blocks) + bytes(10240))
        with pytest.raises(SourceError, match=r"claims to have -1,024 bytes"):
            ids(source(tmp_path / "x.tar"))

    @pytest.mark.parametrize(
        ("names", "said"),
        [
            (["a.wav", "b.wav", "a.txt"], "the members of 'a' do not follow each other"),
            (["a.wav", "a.wav"], "'a' has two members .wav"),
            (["a.wav", "a.WAV"], "'a' has two members .wav"),
        ],
    )
    def test_keys_that_come_twice(self, names: list[str], said: str, tmp_path: Path) -> None:
        path = write_tar(tmp_path / "x.tar", [(name, WAV) for name in names])
        with pytest.raises(SourceError, match=said):
            ids(source(path))

    def test_places_that_hold_nothing(self, tmp_path: Path) -> None:
        for uri in ("none.tar", "none-{0..3}.tar", "*.tar", ""):
            with pytest.raises(SourceError, match=r"not found|no tar files"):
                ids(source(f"{tmp_path}/{uri}"))
        write_shards(tmp_path, 1)
        with pytest.raises(SourceError, match=r"train-001\.tar: not found"):
            ids(source(tmp_path / "train-{000..001}.tar"))


def test_what_is_held_does_not_grow_with_the_audio(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No read of the listing is larger than a header or a column."""
    noise = np.random.default_rng(0).bytes(3 * 2**20)
    path = write_tar(tmp_path / "x.tar", [(f"{n}.pcm", noise) for n in range(4)] + [("9.wav", WAV)])
    sizes: list[int] = []
    read = untrusted.BoundedReads.read
    monkeypatch.setattr(
        untrusted.BoundedReads, "read", lambda self, n: (sizes.append(n), read(self, n))[1]
    )
    assert ids(source(path)) == [f"x.tar/{n}" for n in (0, 1, 2, 3, 9)]
    assert max(sizes) <= len(WAV) + tarfile.BLOCKSIZE
