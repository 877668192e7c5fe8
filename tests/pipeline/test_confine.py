"""Where tables may lead: to no other folder, host or bucket, and never with our credentials."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from earmill.pipeline.common.errors import OutsideError, SourceError, UnreadableError
from earmill.pipeline.sources.base import Item
from earmill.pipeline.sources.confinement import CheckedClient, Confinement, Place, is_public
from earmill.pipeline.sources.hf_location import dataset_place
from earmill.pipeline.spec.source import HfSpec
from tests.pipeline.audio_factory import clip
from tests.pipeline.source_helpers import contents, files, manifest

S3 = {"key": "k", "secret": "hush"}


class Server(ThreadingHTTPServer):
    """Answers every GET with a clip, or a redirect; keeps what it was asked."""

    def __init__(self, redirect: str | None = None) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.redirect = redirect
        self.asked: list[tuple[str, str | None]] = []

    def url(self, host: str = "127.0.0.1") -> str:
        return f"http://{host}:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers.get("Authorization")))
        if self.server.redirect is not None:
            self.send_response(302)
            self.send_header("Location", self.server.redirect)
            self.end_headers()
            return
        if self.path.startswith("/endless") and self.command == "GET":
            self.send_response(200)
            self.end_headers()
            with suppress(OSError):  # until the client has had enough
                while True:
                    self.wfile.write(bytes(1 << 16))
            return
        body = self.server_body()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def server_body(self) -> bytes:
        if self.path.startswith("/table.csv"):
            return "\n".join(self.server.rows).encode()  # type: ignore[attr-defined]
        return clip("wav", 0.2)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture
def servers() -> Iterator[list[Server]]:
    """Two hosts of the same machine: a bare address and a name."""
    found = [Server(), Server()]
    threads = [threading.Thread(target=server.serve_forever, args=(0.01,)) for server in found]
    for thread in threads:
        thread.start()
    yield found
    for server, thread in zip(found, threads, strict=True):
        server.shutdown()
        server.server_close()
        thread.join()


def table(folder: Path, *uris: str) -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / "m.csv"
    path.write_text("uri\n" + "\n".join(f'"{uri}"' for uri in uris) + "\n")
    return path


OUTSIDE = [
    "/etc/hostname",
    "file:///etc/hostname",
    "local:///etc/hostname",
    "FILE:///etc/hostname",
    "../secret.wav",
    "sub/../../secret.wav",
    "s3://bucket/x.wav",
    "http://127.0.0.1/x.wav",
    "https://example.com/x.wav",
    "simplecache::file:///etc/hostname",
    "zip://x.wav::/etc/hostname",
    "reference::http://127.0.0.1/x.json",
    "github://org:repo@main/x.wav",
    "ftp://127.0.0.1/x.wav",
    "memory://x.wav",
]


@pytest.mark.parametrize("uri", OUTSIDE)
def test_a_manifest_cannot_lead_out_of_its_folder(uri: str, tmp_path: Path) -> None:
    (tmp_path / "secret.wav").write_bytes(clip("wav", 0.2))
    source = manifest(table(tmp_path / "corpus", "a.wav", uri), storage_options=S3)
    with pytest.raises(SourceError, match=r"m\.csv: row 2: ") as caught:
        list(source.items())
    assert "\n" not in str(caught.value)
    assert "source.allow" in str(caught.value) or "expected a plain uri" in str(caught.value)


@pytest.mark.parametrize("uri", OUTSIDE)
def test_a_worker_refuses_it_too(uri: str, tmp_path: Path) -> None:
    """A plan that was altered, or a cell that the plan did not see."""
    source = manifest(table(tmp_path / "corpus", "a.wav"))
    found = contents(source, [Item("x", uri if "/.." not in uri and ".." not in uri else "/../x")])
    assert isinstance(found[0], OutsideError)


@pytest.mark.parametrize(
    ("allow", "uri"),
    [
        ("/data/corpus", "/data/corpus2/x.wav"),
        ("/data/corpus", "/data/corpus/../x.wav"),
        ("s3://bucket", "s3://bucket2/x"),
        ("s3://bucket/a", "s3://bucket/ab/x"),
        ("s3://bucket/a", "s3://bucket/a/../b/x"),
        ("https://host.example/a", "https://host.example/a/%2e%2e/b"),
        ("https://host.example/a", "https://host.example/b"),
        ("https://host.example", "https://host.example:8443/x"),
        ("https://host.example", "http://host.example/x"),
        ("https://host.example", "https://host.example.evil.example/x"),
        ("https://host.example", "https://host.example@evil.example/x"),
        ("https://host.example", "https://evil.example\\@host.example/x"),
        ("https://", "https://127.0.0.1/x"),
        ("https://", "https://localhost/x"),
        ("https://", "https://10.1.2.3/x"),
        ("https://", "https://169.254.169.254/latest/meta-data"),
        ("https://", "https://2130706433/x"),
        ("https://", "https://0x7f.1/x"),
        ("hf://datasets/a/b", "hf://datasets/a/bc/x.wav"),
    ],
)
def test_what_only_looks_allowed(allow: str, uri: str) -> None:
    with pytest.raises(OutsideError):
        Confinement(["/table"], [allow]).options(uri)


@pytest.mark.parametrize(
    ("allow", "uri"),
    [
        ("/data/corpus", "/data/corpus/x.wav"),
        ("/data/corpus/", "file:///data/corpus/deep/x.wav"),
        ("s3://bucket", "s3a://bucket/x"),
        ("s3://bucket/a/", "s3://bucket/a/b/x"),
        ("s3://bucket", "zip://x.wav::s3://bucket/a.zip"),
        ("https://host.example", "https://HOST.example:443/x?id=3"),
        ("http://127.0.0.1:8000", "http://127.0.0.1:8000/x"),
        ("hf://datasets/a/b", "hf://datasets/a/b@main/x.wav"),
        ("abfs://box@account.example", "abfs://box@account.example/x"),
    ],
)
def test_what_is_allowed(allow: str, uri: str) -> None:
    Confinement(["/table"], [allow]).check(uri)


def test_only_public_addresses_are_public() -> None:
    private = [
        "127.0.0.1",
        "localhost",
        "[::1]",
        "10.0.0.1",
        "192.168.1.1",
        "172.16.0.1",
        "0.0.0.0",
    ]
    private += [
        "169.254.169.254",
        "100.64.0.1",
        "fd00::1",
        "fe80::1",
        "::ffff:127.0.0.1",
        "224.0.0.1",
    ]
    assert not [host for host in private if is_public(host)]
    assert is_public("1.1.1.1")
    assert is_public("2606:4700:4700::1111")


def test_an_http_table_may_name_its_own_host_and_no_other(servers: list[Server]) -> None:
    own, other = servers
    own.rows = ["uri", "a.wav", f"{own.url()}/b.wav"]  # type: ignore[attr-defined]
    headers = {"headers": {"Authorization": "Bearer hush"}}
    source = manifest(f"{own.url()}/table.csv", storage_options=headers)
    items = list(source.items())
    assert contents(source, items) == [clip("wav", 0.2)] * 2
    assert {authorization for _, authorization in own.asked} == {"Bearer hush"}
    own.rows = ["uri", f"{other.url()}/b.wav"]  # type: ignore[attr-defined]
    with pytest.raises(SourceError, match=r"set source\.allow: \[http://127"):
        list(manifest(f"{own.url()}/table.csv", storage_options=headers).items())
    assert other.asked == []


def test_headers_go_to_one_host_only(servers: list[Server], tmp_path: Path) -> None:
    """The second host is allowed as well, but the credentials were not meant for it."""
    own, other = servers
    source = manifest(
        table(tmp_path, f"{own.url()}/a.wav", f"{other.url()}/a.wav"),
        allow=[own.url(), other.url()],
        storage_options={"headers": {"Authorization": "Bearer hush"}},
    )
    assert contents(source, list(source.items())) == [clip("wav", 0.2)] * 2
    assert {authorization for _, authorization in own.asked} == {"Bearer hush"}
    assert {authorization for _, authorization in other.asked} == {None}


def test_an_answer_without_end_is_one_bad_row(servers: list[Server], tmp_path: Path) -> None:
    """The server promised a few thousand bytes; more are not waited for, wherever they would go."""
    url = servers[0].url()
    source = manifest(table(tmp_path, f"{url}/endless.wav", f"{url}/a.wav"), allow=[url])
    items = list(source.items())
    assert items[0].size == len(clip("wav", 0.2))
    endless, good = contents(source, items)
    assert isinstance(endless, UnreadableError)
    assert "bytes, got more" in str(endless)
    assert good == clip("wav", 0.2)


def test_buckets_that_the_job_names_share_its_options() -> None:
    inside = Confinement(["/table"], ["s3://one", "s3://two", "s3://"], S3)
    assert inside.options("s3://one/x") == inside.options("s3://two/x") == S3
    assert inside.options("zip://a.wav::s3://one/x.zip") == {"s3": S3}
    # Allowed by scheme alone: somebody else's bucket gets none of it.
    assert inside.options("s3://three/x") == {}


@pytest.mark.parametrize("uri", ["s3://mine", "s3://mine/", "s3://mine/*.parquet", "s3://mine/a"])
def test_a_dataset_in_a_bucket_names_no_other_bucket(uri: str) -> None:
    _, _, inside = dataset_place(HfSpec(kind="hf", uri=uri))
    inside.check("s3://mine/a/x.wav")
    for other in ("s3://other/a/x.wav", "s3://mine2/x.wav", "https://example.org/x.wav"):
        with pytest.raises(OutsideError, match="outside of what the source may read"):
            inside.check(other)


def test_only_a_job_allows_every_host_of_a_scheme() -> None:
    """A filesystem may leave out the host in the folder of a table: no row may name another."""
    folder = Confinement(["sftp:///data"])
    folder.check("sftp:///data/x.wav")
    with pytest.raises(OutsideError, match="outside of what the source may read"):
        folder.check("sftp://example.org/data/x.wav")
    Confinement(["/table"], ["s3://"]).check("s3://other/x.wav")


def test_a_redirect_does_not_lead_inside(servers: list[Server]) -> None:
    """The address is judged where the connection is made, whoever sent us there."""
    import asyncio

    async def ask() -> None:
        async with await CheckedClient(())() as session, session.get(servers[0].url()):
            pass

    with pytest.raises(OutsideError, match=r"127\.0\.0\.1 is no public address"):
        asyncio.run(ask())
    assert servers[0].asked == []


@pytest.mark.parametrize(
    ("kind", "to"),
    [
        *(("cell", to) for to in ("/private/x.wav", "other host", "localhost")),
        # The job names the whole host of these.
        *((kind, to) for kind in ("table", "file") for to in ("other host", "localhost")),
    ],
)
def test_a_private_host_redirects_to_nothing_but_what_is_allowed(
    kind: str, to: str, servers: list[Server], tmp_path: Path
) -> None:
    """Each hop is checked: a host that the job names may not send us to other private places."""
    own, other = servers
    own.redirect = {
        "/private/x.wav": f"{own.url()}/private/x.wav",
        "other host": f"{other.url()}/x.wav",
        "localhost": f"{own.url('localhost')}/public/x.wav",
    }[to]
    if kind == "cell":
        source = manifest(
            table(tmp_path, f"{own.url()}/public/a.wav"), allow=[f"{own.url()}/public"]
        )
        (found,) = contents(source, list(source.items()))
        assert isinstance(found, OutsideError)
        assert "not named in source.allow" in str(found)
    else:
        uri = f"{own.url()}/table.csv" if kind == "table" else f"{own.url()}/corpus/a.wav"
        opened = manifest if kind == "table" else files
        with pytest.raises((SourceError, OutsideError)):
            list(opened(uri).items())
    # The first request of each kind, and nothing where it was sent.
    assert other.asked == []
    assert not [path for path, _ in own.asked if "private" in path or "x.wav" in path]


def test_a_redirect_may_lead_to_what_the_job_names(servers: list[Server], tmp_path: Path) -> None:
    own, other = servers
    own.redirect = f"{other.url()}/moved/a.wav"
    uris = table(tmp_path, f"{own.url()}/a.wav")
    source = manifest(uris, allow=[own.url(), f"{other.url()}/moved"])
    assert contents(source, list(source.items())) == [clip("wav", 0.2)]
    assert {path for path, _ in other.asked} == {"/moved/a.wav"}


def test_a_redirect_to_tls_on_the_same_host_is_allowed() -> None:
    root = Place.of("http://10.0.0.5/corpus")

    def allowed(uri: str) -> bool:
        return any(root.is_prefix_of(place) for place in Place.of(uri).before_tls())

    assert allowed("https://10.0.0.5/corpus/a.wav") and allowed("http://10.0.0.5/corpus/a.wav")
    assert not allowed("https://10.0.0.5/private/a.wav")
    assert not allowed("https://10.0.0.5:8443/corpus/a.wav")
