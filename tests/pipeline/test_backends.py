"""The contract of storage backends: the same calls give the same answers on every kind of store."""

from __future__ import annotations

import os
import pickle
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

import earmill
from earmill.pipeline.common.errors import OutputError, StorageError
from earmill.pipeline.dataset.finalise import finalise
from earmill.pipeline.dataset.verify import verify
from earmill.pipeline.storage.backend import Backend
from earmill.pipeline.storage.fsspec_store import FsspecBackend
from earmill.pipeline.storage.layout import STORES, Layout
from earmill.pipeline.storage.local_store import LocalBackend
from earmill.pipeline.storage.object_store import ObjectBackend
from tests.pipeline.object_stores import KINDS, Place, store_of
from tests.pipeline.outputs import small_dataset
from tests.pipeline.strangers import install

# A store of one module that only adds versions of a name, each by one exclusive step.
VERSIONED = '''
import os, secrets
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote

from earmill.pipeline.storage.backend import Backend, Entry


@dataclass(frozen=True)
class VersionedBackend(Backend):
    folder: str

    @classmethod
    def open(cls, uri, options):
        return cls(options["folder"]), uri.partition("://")[2].rstrip("/")

    def url(self, path):
        return f"versioned://{path}"

    def _newest(self, path):
        """Number and content of the newest version; None as content where there is none."""
        found = Path(self.folder).glob(f"{quote(path, safe='')}~*")
        number = max((int(file.name.rpartition("~")[2]) for file in found), default=0)
        if not number:
            return 0, None
        content = (Path(self.folder) / f"{quote(path, safe='')}~{number}").read_bytes()
        return number, None if content == b"gone" else content[1:]

    def _add(self, path, number, data):
        temporary = Path(self.folder) / f".{secrets.token_hex(8)}"
        temporary.write_bytes(b"gone" if data is None else b"+" + data)
        try:
            os.link(temporary, Path(self.folder) / f"{quote(path, safe='')}~{number}")
        except FileExistsError:
            return False
        finally:
            temporary.unlink()
        return True

    def read(self, path):
        content = self._newest(path)[1]
        if content is None:
            raise FileNotFoundError(path)
        return content

    def size(self, path):
        return len(self.read(path))

    def read_range(self, path, start, length):
        return self.read(path)[start : start + length]

    def write(self, path, data):
        while not self._add(path, self._newest(path)[0] + 1, data):
            pass

    def create(self, path, data):
        number, content = self._newest(path)
        return content is None and self._add(path, number + 1, data)

    def replace(self, path, seen, data):
        number, content = self._newest(path)
        return content == seen and self._add(path, number + 1, data)

    def list(self, path):
        files = [file for file in Path(self.folder).iterdir() if file.name[0] != "."]
        names = {unquote(file.name.rpartition("~")[0]): file.stat().st_mtime for file in files}
        found = {n: at for n, at in names.items() if n == path or n.startswith(path + "/")}
        contents = {name: self._newest(name)[1] for name in found}
        return {n: Entry(len(c), found[n]) for n, c in contents.items() if c is not None}

    def delete(self, path):
        for name in self.list(path):
            self.write(name, None)

    def upload(self, local, path):
        self.write(path, Path(local).read_bytes())
'''
MODULE, VERSIONED_CLASS = "versioned_store", "versioned_store:VersionedBackend"
BACKENDS = {
    "versioned": Backend,
    "local": LocalBackend,
    "memory": FsspecBackend,
    **dict.fromkeys(("s3", "gs", "abfs"), ObjectBackend),
    **dict.fromkeys(("s3fs", "gcsfs", "adlfs"), FsspecBackend),
}
pytestmark = pytest.mark.filterwarnings("ignore:Sending a large body:ResourceWarning")


@pytest.fixture(scope="module", params=BACKENDS)
def place(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Place]:
    with ExitStack() as stack:
        if request.param in KINDS:
            found = stack.enter_context(store_of(request.param))
        elif request.param == "versioned":
            folder, scheme = tmp_path_factory.mktemp("versioned"), {"versioned": VERSIONED_CLASS}
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.syspath_prepend(str(tmp_path_factory.mktemp("installed")))
            install(Path(sys.path[0]), "versioned", {STORES.group: scheme}, {MODULE: VERSIONED})
            found = Place("versioned://place", {"folder": str(folder)})
        else:
            roots = {"local": str(tmp_path_factory.mktemp("out")), "memory": "memory://backends"}
            found = Place(roots[request.param], {})
        assert isinstance(found.layout("x").backend, BACKENDS[request.param])
        yield found


@pytest.fixture
def layout(place: Place) -> Layout:
    return place.layout(uuid.uuid4().hex)


def test_listings_have_every_file_with_size_and_time(layout: Layout) -> None:
    assert (layout.list("data"), layout.sizes("data"), layout.everything()) == ([], {}, {})
    before = time.time()
    for name, nbytes in {"data/b": 3, "data/a/x": 0, "database": 2, "data/.part/y": 1}.items():
        layout.write_bytes(name, bytes(nbytes))
    assert layout.list("data") == ["data/a/x", "data/b"]
    assert layout.sizes("data") == {"data/a/x": 0, "data/b": 3}
    # A file by its name, and a folder by its name alone.
    assert layout.sizes("data/b") == {"data/b": 3} and layout.sizes("dat") == {}
    assert {name: entry.nbytes for name, entry in layout.everything().items()} == {
        "data/a/x": 0,
        "data/b": 3,
        "database": 2,
        "data/.part/y": 1,
    }
    times = {name: entry.modified for name, entry in layout.entries("data").items()}
    assert times.keys() == {"data/a/x", "data/b"}
    # Our stand-ins of Google and Azure have one date for all.
    assert all(
        at is not None and (at == 1767323045 or abs(at - before) < 60) for at in times.values()
    )


def test_a_range_is_what_is_there_of_it(layout: Layout) -> None:
    layout.write_bytes("x", b"0123456789")
    layout.write_bytes("empty", b"")
    wanted = {(0, 10): b"0123456789", (2, 3): b"234", (8, 9): b"89", (9, 1): b"9", (4, 0): b""}
    for (start, length), expected in wanted.items():
        assert bytes(layout.read_range("x", start, length)) == expected
    assert layout.read_bytes("empty") == b"" and layout.size("empty") == 0
    for call in (
        lambda: layout.read_range("none", 0, 4),
        lambda: layout.read_bytes("none"),
        lambda: layout.size("none"),
    ):
        with pytest.raises(FileNotFoundError):
            call()
    assert layout.exists("x") and not layout.exists("none")


def test_behind_the_end_of_a_file_is_nothing(place: Place, layout: Layout) -> None:
    layout.write_bytes("x", b"0123456789")
    if not isinstance(layout.backend, FsspecBackend):  # each client has its own answer
        assert bytes(layout.read_range("x", 10, 5)) == bytes(layout.read_range("x", 20, 5)) == b""


def test_a_file_is_read_at_any_place(layout: Layout) -> None:
    content = os.urandom(9_000_000)
    layout.write_bytes("x", content)
    with layout.open_file("x") as file:
        assert file.seek(-5, os.SEEK_END) == len(content) - 5
        assert file.read(9) == content[-5:]
        file.seek(3)
        assert file.read(4_500_000) == content[3:4_500_003] and file.tell() == 4_500_003
        assert file.read() == content[4_500_003:] and file.read(1) == b""
    with pytest.raises(FileNotFoundError):
        layout.open_file("none")


def test_the_first_of_two_creates_and_replaces(layout: Layout) -> None:
    assert layout.put_if_absent("x", b"1") and not layout.put_if_absent("x", b"2")
    assert layout.replace_own("x", b"3", b"1") and not layout.replace_own("x", b"4", b"1")
    assert layout.read_bytes("x") == b"3"
    assert not layout.replace_own("none", b"5", b"3") and not layout.exists("none")
    layout.check_writable()
    assert {*layout.everything()} == {"x"}


def test_only_what_was_seen_is_removed(layout: Layout) -> None:
    layout.write_bytes("x", b"1")
    assert not layout.remove_own("x", b"2") and layout.read_bytes("x") == b"1"
    assert layout.remove_own("x", b"1") and not layout.exists("x")
    assert not layout.remove_own("x", b"1")


def test_exactly_what_is_named_is_removed(layout: Layout) -> None:
    names = ["a", "ab", "data/a/x", "data/a/y/z", "data/ab", "data/a.b"]
    for name in names:
        layout.write_bytes(name, b"1")
    layout.delete("data/a")
    layout.delete("data/a")
    layout.delete("data/none")
    layout.delete("a")
    assert {*layout.everything()} == {"ab", "data/ab", "data/a.b"}


def test_a_folder_is_published_as_it_is(layout: Layout, tmp_path: Path) -> None:
    made = {"zarr.json": b"{}", "v/c/0/0": b"12", "v/c/0/1": b"", "v/.x": b"3"}
    for name, content in made.items():
        (tmp_path / "store" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "store" / name).write_bytes(content)
    (tmp_path / "y").write_bytes(b"file")
    layout.upload_dir(tmp_path / "store", "data/s.zarr")
    layout.upload_file(tmp_path / "y", "data/y")
    layout.settle(["data/s.zarr", "data/y"])
    found = {name: layout.read_bytes(name) for name in layout.everything()}
    assert found == {f"data/s.zarr/{name}": content for name, content in made.items()} | {
        "data/y": b"file"
    }


def test_below_a_folder_and_in_another_process_are_the_same_files(
    place: Place, layout: Layout
) -> None:
    layout.write_bytes("sub/x", b"here")
    assert layout.below("sub").read_bytes("x") == b"here"
    assert layout.below("sub").url("x") == layout.url("sub/x")
    copy = pickle.loads(pickle.dumps(layout))
    assert copy.read_bytes("sub/x") == b"here" and copy.url("x") == layout.url("x")
    assert place.layout("same") == place.layout("same") != place.layout("other")
    assert not [secret for secret in place.secrets if secret in f"{layout!r} {layout.url('x')}"]


def test_a_bucket_that_is_missing_is_said(place: Place) -> None:
    if not place.uri.startswith(("s3", "gs", "abfs")):
        pytest.skip("a folder is made when it is written to")
    layout = Layout.open(f"{place.uri}-none/x", place.options)
    assert not layout.exists("x")
    with pytest.raises(FileNotFoundError):
        layout.read_bytes("x")
    with pytest.raises((FileNotFoundError, StorageError)):
        layout.write_bytes("x", b"")
    with pytest.raises(OutputError, match=r"cannot write to .*check that the place exists"):
        layout.check_writable()


def test_one_file_makes_a_kind_of_store_that_jobs_and_readers_use(place: Place) -> None:
    if not place.uri.startswith("versioned"):
        pytest.skip("other kinds have tests of their own")
    layout = small_dataset(f"{place.uri}/dataset", place.options)
    finalise(layout)
    assert verify(layout).ok
    found = earmill.open_features(f"{place.uri}/dataset", storage_options=place.options)
    assert len(found) == 3 and sys.modules[type(layout.backend).__module__].__name__ == MODULE


@pytest.mark.parametrize(
    ("uri", "kind", "root"),
    [
        ("s3://b/x/y/", ObjectBackend, "b/x/y"),
        ("s3a://b", ObjectBackend, "b"),
        ("gcs://b/x", ObjectBackend, "b/x"),
        ("az://b/x", ObjectBackend, "b/x"),
        ("abfs://b@name.dfs.core.windows.net/x", ObjectBackend, "b/x"),
        ("s3://b/x//y", FsspecBackend, "b/x//y"),
        ("s3://b/../y", FsspecBackend, "b/../y"),
        ("memory://b/x", FsspecBackend, "/b/x"),
        ("file:///b/x/", LocalBackend, "/b/x"),
        ("/", LocalBackend, ""),
    ],
)
def test_a_uri_picks_its_backend(uri: str, kind: type, root: str) -> None:
    azure, google = {"account_name": "name", "anon": True}, {"token": "anon"}  # look for no keys
    layout = Layout.open(uri, azure if uri.startswith("a") else google if uri[0] == "g" else {})
    assert isinstance(layout.backend, kind) and layout.root == root
