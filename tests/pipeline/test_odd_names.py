"""Names with any characters: each file, key or member is its own row, or counted.

fsspec takes `::` for a chain of filesystems, and clients of stores cut names at other characters. A
name that leads elsewhere gives a row the audio of another file.
"""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import AbsentError, RowError, UnreadableError
from earmill.pipeline.planning.make_plan import make_plan
from earmill.pipeline.sources import Item, open_source
from earmill.pipeline.sources.base import object_of
from earmill.pipeline.sources.fetch import can_seek
from earmill.pipeline.sources.files import UNREACHABLE
from earmill.pipeline.sources.webdataset import WebDatasetSection
from earmill.pipeline.spec.job import JobSpec
from earmill.pipeline.storage.backend import is_chain, is_local
from earmill.pipeline.storage.fsspec_store import filesystem_of
from earmill.pipeline.storage.layout import Layout
from tests.pipeline.audio_factory import clip
from tests.pipeline.object_stores import KINDS, Place, store_of
from tests.pipeline.source_helpers import contents, files, ids, manifest
from tests.pipeline.tars import write_tar
from tests.short import some

pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")

NAMES = (
    *("plain.wav", "x.wav", "a::b.wav", "x::plain.wav", "zip::plain.wav", "simplecache::x.wav"),
    *("h#1.wav", "q?1.wav", "p%20.wav", "p%FF.wav", "s*.wav", "b[1].wav", "{a,b}.wav"),
    *("back\\slash.wav", "~.wav", "~root.wav", " lead.wav", "trail .wav", "tab\t.wav", "tab.wav"),
    *("http:/x/y.wav", "s3:/b.wav", "file:x.wav", "zip:x.wav", "caf\u00e9.wav", "cafe\u0301.wav"),
    *("L" * 240 + ".wav", "d::e/in.wav", "dir /in.wav", "d#/in.wav", "a..b.wav", "&=+;'\".wav"),
    *("v.wav?versionId=1.wav", "v.wav?versionid=1.wav", "v.wav", "g.wav#123", "\u202e.wav"),
)
LINE = "new\nline.wav"
# Names that a bucket can have and a disk cannot.
KEYS = ("p2//lead.wav", "p2/lead.wav", "//lead.wav", "/lead.wav", "lead.wav")
# Keys whose client cannot ask for them: it cuts them, or reads a version out of them.
CUT = {
    "s3": {"v.wav?versionId=1.wav"},
    "gs": {"g.wav#123"},
    "abfs": {"v.wav?versionid=1.wav", "tab\t.wav", LINE},
}
WAV = (".wav",)


def data(name: str) -> bytes:
    """A clip of no other name."""
    return clip("wav", 0.02, seed=int.from_bytes(name.encode(), "little") % 2**31)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A file of each name; no test changes it."""
    root = tmp_path_factory.mktemp("odd") / "in"
    for name in (*NAMES, LINE):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(data(name))
    return root


def audio(names: tuple[str, ...]) -> list[str]:
    return sorted(name for name in names if name.endswith(WAV))


def test_each_file_of_a_folder_is_its_own_row(folder: Path) -> None:
    source = files(folder)
    items = list(source.items())
    assert [item.row_id for item in items] == audio((*NAMES, LINE))
    assert source.skipped() == {".wav#123": 1}
    assert contents(source, items) == [data(item.row_id) for item in items]
    assert len({item.uri for item in items}) == len(items)


@pytest.mark.parametrize("name", [*audio(NAMES), LINE])
def test_a_file_alone_and_a_folder_of_that_name(name: str, folder: Path, tmp_path: Path) -> None:
    alone = files(folder / name)
    assert contents(alone, list(alone.items())) == [data(name)]
    root = tmp_path / "roots" / name
    root.mkdir(parents=True)
    (root / "in.wav").write_bytes(data(name))
    for uri in (root, f"{root}/", f"file://{root}"):
        below = files(uri)
        items = list(below.items())
        assert [item.row_id for item in items] == ["in.wav"]
        assert contents(below, items) == [data(name)]


def test_a_relative_root_is_literal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a::b", "file:x", "local:x", "~x", "h#1", "s3:x", "zip::x"):
        os.makedirs(name)
        Path(name, "in.wav").write_bytes(data(name))
        source = files(name)
        assert contents(source, list(source.items())) == [data(name)]


def test_each_row_of_a_table_is_its_own_file(folder: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(folder, tmp_path / "in"))
    names = audio(NAMES)
    rows = "".join('"{}"\n'.format(name.replace('"', '""')) for name in names)
    (folder / "m.csv").write_text(f"uri\n{rows}", encoding="utf-8")
    source = manifest(folder / "m.csv")
    items = list(source.items())
    assert [item.row_id for item in items] == names
    assert contents(source, items) == [data(name) for name in names]
    assert (source.missing, source.first_missing) == (0, "")
    # The job may give the folder in front.
    (folder.parent / "list.csv").write_text(f"uri\n{rows}", encoding="utf-8")
    below = manifest(folder.parent / "list.csv", prefix="in")
    assert contents(below, list(below.items())) == [data(name) for name in names]


@pytest.mark.parametrize("name", audio(NAMES))
def test_a_prefix_of_that_name(name: str, tmp_path: Path) -> None:
    root = tmp_path / name
    root.mkdir(parents=True)
    (root / "in.wav").write_bytes(data(name))
    (tmp_path / "m.csv").write_text("uri\nin.wav\n")
    source = manifest(tmp_path / "m.csv", prefix=name)
    assert contents(source, list(source.items())) == [data(name)]


def test_a_table_may_name_what_is_no_text(tmp_path: Path) -> None:
    """JSON has an escape for bytes that are not UTF-8, and for the null byte, which no name has."""
    (tmp_path / "n\udcff.wav").write_bytes(data("odd"))
    rows = [
        '{"uri": "n\\udcff.wav"}',
        '{"uri": "n\\u0000.wav"}',
        '{"uri": "' + "n" * 300 + '.wav"}',
    ]
    (tmp_path / "m.jsonl").write_text("\n".join(rows))
    source = manifest(tmp_path / "m.jsonl")
    items = list(source.items())
    assert items[0].row_id == "n%FF.wav"
    good, *bad = contents(source, items)
    assert good == data("odd")
    assert [type(error) for error in bad] == [AbsentError, AbsentError]


def test_a_name_with_a_question_mark_can_be_sought_in() -> None:
    assert can_seek("/data/q?1.wav") and can_seek("https://host/a.wav?id=3")
    assert not can_seek("https://host/a?name=b.wav")


def test_each_sample_of_a_tar_is_its_own_row(tmp_path: Path) -> None:
    names = [name for name in audio((*NAMES, LINE)) if ".wav?" not in name and "a..b" not in name]
    for tar in ("odd::name#1.tar", "a[1]{x}.tar", "t?.tar"):
        write_tar(tmp_path / tar, [(name, data(name)) for name in names])
        for uri in (tmp_path / tar, tmp_path):
            source = open_source(WebDatasetSection(kind="webdataset", uri=str(uri)))
            items = list(source.items())
            assert [i.row_id for i in items] == [f"{tar}/{n.removesuffix('.wav')}" for n in names]
            assert contents(source, items) == [data(name) for name in names]
        (tmp_path / tar).unlink()


def test_files_beside_tars_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "a.tar", [("a.wav", data("a"))])
    for name in ("sizes.json", ".hidden.tar", "b.tar.gz"):
        (tmp_path / name).write_bytes(b"x")
    source = open_source(WebDatasetSection(kind="webdataset", uri=str(tmp_path)))
    assert ids(source) == ["a.tar/a"]
    assert source.skipped() == {".gz": 1, ".json": 1, "hidden": 1}


@pytest.mark.parametrize("name", [*NAMES[:-1], "d::e"])
def test_an_output_of_that_name(name: str, tmp_path: Path) -> None:
    """Files are written there, and nothing is written elsewhere."""
    place = tmp_path / name
    layout = Layout.open(str(place))
    layout.check_writable()
    layout.write_bytes("data/x", b"content")
    assert (place / "data/x").read_bytes() == b"content"
    assert layout.list("data") == ["data/x"]
    assert layout.url("data/x") == f"{place}/data/x"
    assert sorted(os.listdir(tmp_path)) == [name.split("/")[0]]


@pytest.fixture(scope="module", params=KINDS)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """A bucket with a key of each name below `odd/`."""
    with ExitStack() as stack:
        found = stack.enter_context(store_of(request.param))
        if found.server is None and not found.uri.startswith("s3"):
            pytest.skip("odd keys are put into our stand-ins only")
        for name in keys_of(found):
            put(found, f"odd/{name}", data(name))
            stack.callback(remove, found, f"odd/{name}")
        yield found


def keys_of(place: Place) -> list[str]:
    # The stand-in of S3 refuses a line break.
    more = (*KEYS, *(() if place.uri.startswith("s3") else (LINE,)))
    return audio((*NAMES, *more))


def put(place: Place, key: str, content: bytes) -> None:
    if place.uri.startswith("s3"):
        fs, _ = filesystem_of(place.uri, **place.options)
        fs.call_s3("put_object", Bucket="corpus", Key=key, Body=content)
    else:
        place.server.objects[key] = (content, 1)


def remove(place: Place, key: str) -> None:
    if place.uri.startswith("s3"):
        fs, _ = filesystem_of(place.uri, **place.options)
        fs.call_s3("delete_object", Bucket="corpus", Key=key)


def test_each_key_of_a_bucket_is_its_own_row_or_counted(place: Place) -> None:
    source = files(f"{place.uri}/odd", storage_options=place.options)
    items = list(source.items())
    keys, cut = keys_of(place), CUT[place.uri.partition(":")[0]]
    assert [item.row_id for item in items] == [key for key in keys if key not in cut]
    lost = [key for key in keys if key in cut]
    assert source.skipped() == ({UNREACHABLE: len(lost)} if lost else {})
    assert contents(source, items) == [data(item.row_id) for item in items]


@pytest.mark.parametrize(
    "name", some(3, ["a::b", "h#1", "p%20", "sp ace", "s*", "b[1]", "~", "zip::x"])
)
def test_an_output_of_that_name_in_a_bucket(name: str, place: Place) -> None:
    others = [place.layout(f"odd-out/{other}") for other in ("sx", "b1")]
    for other in others:
        other.write_bytes("data/x", b"other")
    layout = place.layout(f"odd-out/{name}")
    layout.check_writable()
    layout.write_bytes("data/x", b"content")
    assert layout.list("data") == ["data/x"]
    assert layout.read_bytes("data/x") == b"content"
    found = files(f"{place.uri}/odd-out", storage_options=place.options, extensions=["x"], glob="*")
    assert found.describe()["root"] == f"{place.uri}/odd-out"
    layout.delete("data")
    assert layout.list("data") == []
    # A name is no pattern: outputs of other names lose nothing.
    assert [other.read_bytes("data/x") for other in others] == [b"other", b"other"]


@pytest.mark.parametrize("key", ["a::b.wav", "h#1.wav", "p%20.wav", "q?1.wav", "p2//lead.wav"])
def test_a_key_alone(key: str, place: Place) -> None:
    source = files(f"{place.uri}/odd/{key}", storage_options=place.options)
    assert contents(source, list(source.items())) == [data(key)]


@pytest.mark.parametrize("place", some(2, KINDS), indirect=True)
def test_each_row_of_a_table_in_a_bucket_is_its_own_key(place: Place) -> None:
    cut = CUT[place.uri.partition(":")[0]]
    names = [key for key in keys_of(place) if key not in cut and "\n" not in key and key[0] != "/"]
    rows = "".join('"{}"\n'.format(name.replace('"', '""')) for name in names)
    addresses: list[str] = []
    for table, cells, options in (
        ("odd/m.csv", rows, {}),
        ("lists/m.csv", rows, {"prefix": "../odd/"}),
        ("lists/n.csv", rows.replace('"', f'"{place.uri}/odd/', 1), {"prefix": "../odd"}),
    ):
        put(place, table, f"uri\n{cells}".encode())
        try:
            source = manifest(f"{place.uri}/{table}", storage_options=place.options, **options)
            items = list(source.items())
            # An address is read as it was, whatever table has it: some of them are enough.
            step = 10 if addresses else 1
            assert contents(source, items[::step]) == [data(name) for name in names[::step]]
            addresses = addresses or [item.uri for item in items]
            assert [item.uri for item in items] == addresses
        finally:
            remove(place, table)


def test_what_a_client_cannot_ask_for_is_one_bad_row(place: Place) -> None:
    """A table that names it: no other object is read in its place."""
    keys = {"s3": ("slash.wav/",), "abfs": ("tab\t.wav", LINE)}
    if place.uri.startswith("gs"):
        pytest.skip("its client cuts no name")
    for key in keys[place.uri.partition(":")[0]]:
        with pytest.raises(UnreadableError, match="cannot ask for an object of that name"):
            object_of(f"{place.uri}/odd/{key}", place.options)


def test_an_address_of_the_web_is_never_cut() -> None:
    with pytest.raises(UnreadableError, match="write # as %23"):
        object_of("https://host.example/h#1.wav")
    _, path = object_of("https://host.example/a::b.wav?x=1")
    assert path == "https://host.example/a::b.wav?x=1"


def test_names_beside_each_other_that_are_no_text(tmp_path: Path) -> None:
    """`n\\xff.wav` is written as `n%FF.wav`, which is another file here."""
    names = [b"n\xff.wav", b"n%FF.wav", b"m\xff.wav", b"n\xff%.wav"]
    for name in names:
        Path(os.fsdecode(os.path.join(os.fsencode(tmp_path), name))).write_bytes(data(name.hex()))
    wanted = {"./n%FF.wav": names[0], "n%FF.wav": names[1], "m%FF.wav": names[2]}
    wanted["n%FF%25.wav"] = names[3]
    spec = job(tmp_path)
    source = open_source(spec.source)
    plan = make_plan(source, spec)
    assert {item.row_id for item in plan.items()} == set(wanted)
    for item in plan.items():
        assert contents(source, [item]) == [data(wanted[item.row_id].hex())]


def test_samples_beside_each_other_that_are_no_text(tmp_path: Path) -> None:
    names = ["n\udcff.wav", "n%FF.wav", "m.wav"]
    with tarfile.open(tmp_path / "a.tar", "w", format=tarfile.GNU_FORMAT) as tar:
        for name in names:
            (tmp_path / "x").write_bytes(data(ascii(name)))
            tar.add(tmp_path / "x", name)
    source = open_source(WebDatasetSection(kind="webdataset", uri=str(tmp_path / "a.tar")))
    items = list(source.items())
    assert [item.row_id for item in items] == ["a.tar/./n%FF", "a.tar/n%FF", "a.tar/m"]
    assert contents(source, items) == [data(ascii(name)) for name in names]


def job(uri: Path) -> JobSpec:
    section = {"source": {"kind": "files", "uri": str(uri)}, "extract": [{"model": "m"}]}
    return JobSpec.load(section | {"output": {"uri": "o"}})


@pytest.mark.parametrize(
    ("uri", "local", "chain"),
    [
        ("/data/a::b.wav", True, False),
        ("a::b", True, False),
        ("zip::b", True, False),
        ("http:/x", True, False),
        ("s3://bucket/a::b", False, False),
        ("s3://bucket/zip://a::b", False, False),
        ("zip://a.wav::/data/a.zip", False, True),
        ("simplecache::s3://bucket/a", False, True),
        ("file:///data/a::b", False, False),
    ],
)
def test_only_a_wrapper_in_front_makes_a_chain(uri: str, local: bool, chain: bool) -> None:
    assert (is_local(uri), is_chain(uri)) == (local, chain)


def test_chains_still_read_members_of_archives(tmp_path: Path) -> None:
    import zipfile

    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("in/a.wav", data("a"))
    (tmp_path / "m.csv").write_text(f"uri\nzip://in/a.wav::{tmp_path}/a.zip\n")
    source = manifest(tmp_path / "m.csv")
    assert contents(source, list(source.items())) == [data("a")]


def test_a_damaged_archive_is_one_bad_row(tmp_path: Path) -> None:
    """It was taken for an outage, for which a job waits."""
    (tmp_path / "a.zip").write_bytes(b"PK\3\4 no archive")
    (tmp_path / "good.wav").write_bytes(data("a"))
    (tmp_path / "m.csv").write_text(f"uri\nzip://a.wav::{tmp_path}/a.zip\ngood.wav\n")
    source = manifest(tmp_path / "m.csv")
    bad, good = contents(source, list(source.items()))
    assert isinstance(bad, UnreadableError) and "BadZipFile" in str(bad)
    assert good == data("a")


@pytest.mark.parametrize("error", [TypeError, AttributeError, KeyError, IndexError, AssertionError])
def test_a_program_that_fails_over_a_row_costs_that_row(
    error: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was taken for an outage: the job could never finish."""
    from earmill.pipeline.sources import base

    for name in ("a.wav", "b.wav"):
        (tmp_path / name).write_bytes(data(name))
    real = base.object_of

    def failing(uri: str, options: Any) -> Any:
        if uri.endswith("a.wav"):
            raise error("what was not thought of")
        return real(uri, options)

    monkeypatch.setattr(base, "object_of", failing)
    source = files(tmp_path)
    items: list[Item] = list(source.items())
    bad, good = contents(source, items)
    assert isinstance(bad, RowError) and type(bad) is UnreadableError
    assert f"{tmp_path}/a.wav: cannot be read: {error.__name__}" in str(bad)
    assert good == data("b.wav")
