"""Buckets through obstore: what may go wrong on the way, and whose credentials are used."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import fsspec
import pytest
from botocore.session import Session
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from earmill.pipeline.common.errors import (
    ErrorKind,
    OutputError,
    StorageError,
    classify,
    http_status,
)
from earmill.pipeline.common.retries import RetryPolicy
from earmill.pipeline.storage import retrying
from earmill.pipeline.storage.fsspec_store import S3fsBackend
from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.object_store import ObjectBackend
from tests.pipeline.azure_stand_in import ACCOUNT, refused
from tests.pipeline.gcs_stand_in import xml
from tests.pipeline.object_stores import serving
from tests.s3_stand_in import App, s3_stand_in

CONTENT = os.urandom(3_000_000)
KEYS = {"key": "user-key", "secret": "user-secret"}


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retrying, "BRIEF", RetryPolicy(0.0))


@contextmanager
def bucket(
    around: Callable[[App], App] = lambda app: app, **options: Any
) -> Iterator[tuple[Layout, dict[str, Any]]]:
    """A bucket behind another application, with one file `x`."""
    with s3_stand_in(around) as address:
        keys = {"aws_access_key_id": "k", "aws_secret_access_key": "s"}
        maker = Session().create_client("s3", "us-east-1", endpoint_url=address, **keys)
        maker.create_bucket(Bucket="mine")
        maker.put_object(Bucket="mine", Key="x", Body=CONTENT)
        options = {"endpoint_url": address, **(options or KEYS)}
        try:
            yield Layout.open("s3://mine", options), options
        finally:
            for each in maker.list_objects_v2(Bucket="mine").get("Contents", []):
                maker.delete_object(Bucket="mine", Key=each["Key"])
            maker.delete_bucket(Bucket="mine")


def listening(seen: list[str]) -> Callable[[App], App]:
    """Keep what clients sign with."""

    def around(app: App) -> App:
        def call(environ: dict[str, Any], start_response: Any) -> Any:
            seen.append(environ.get("HTTP_AUTHORIZATION", ""))
            return app(environ, start_response)

        return call

    return around


@pytest.mark.filterwarnings("ignore:.*use of fork.*:DeprecationWarning")
def test_a_forked_child_reads_through_the_layout_of_its_parent() -> None:
    """obstore's threads are gone there: a request of its would hang for ever."""
    with bucket() as (layout, options):
        assert layout.read_bytes("x") == CONTENT
        context = multiprocessing.get_context("fork")
        here, there = context.Pipe()

        def child() -> None:
            fresh = Layout.open("s3://mine", options)
            kinds = {type(each.backend.here()) for each in (layout, fresh)}
            found = [each.read_bytes("x") == CONTENT for each in (layout, fresh)]
            found += [pickle.loads(pickle.dumps(layout)).read_bytes("x") == CONTENT]
            found += [layout.put_if_absent("from-child", b"1"), layout.exists("from-child")]
            there.send((kinds, found))

        process = context.Process(target=child)
        process.start()
        try:
            assert here.poll(60), "the child hangs"
            assert here.recv() == ({S3fsBackend}, [True] * 5)
        finally:
            process.kill()
            process.join()
        assert layout.read_bytes("from-child") == b"1"
        assert layout.backend.here() is layout.backend


def test_a_process_of_its_own_uses_obstore() -> None:
    with bucket() as (layout, _):
        assert layout.read_bytes("x") == CONTENT
        context = multiprocessing.get_context("spawn")
        with context.Pool(1) as pool:
            assert pool.apply_async(_kind_and_content, (layout,)).get(100) == (True, CONTENT)


def _kind_and_content(layout: Layout) -> tuple[bool, bytes]:
    return isinstance(layout.backend.here(), ObjectBackend), layout.read_bytes("x")


def test_a_bucket_in_another_region_is_followed() -> None:
    regions: list[str] = []

    def elsewhere(app: App) -> App:
        def call(environ: dict[str, Any], start_response: Any) -> Any:
            signed = environ.get("HTTP_AUTHORIZATION", "").partition("Credential=")[2]
            regions.append(signed.split("/")[2] if signed else "")
            if regions[-1] in ("eu-north-1", ""):
                return app(environ, start_response)
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            headers = [("x-amz-bucket-region", "eu-north-1"), ("Content-Type", "application/xml")]
            start_response("301 Moved Permanently", headers)
            return [b"<Error><Code>PermanentRedirect</Code></Error>"]

        return call

    with s3_stand_in(elsewhere) as address:
        options = {**KEYS, "endpoint_url": address}
        there = {"client_kwargs": {"region_name": "eu-north-1"}}
        fsspec.filesystem("s3", **options, **there).mkdir(
            "mine", CreateBucketConfiguration={"LocationConstraint": "eu-north-1"}
        )
        layout = Layout.open("s3://mine", options)
        layout.write_bytes("x", CONTENT)
        asked = len(regions)
        assert layout.read_bytes("x") == CONTENT
        assert regions[asked:] == ["eu-north-1"]
        copy = pickle.loads(pickle.dumps(layout))
        assert copy.read_bytes("x") == CONTENT and regions[asked:] == ["eu-north-1"] * 2
        fsspec.filesystem("s3", **options, **there).rm("mine", recursive=True)


class TestCredentials:
    def test_those_of_a_profile(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "credentials").write_text(
            "[work]\naws_access_key_id = of-work\naws_secret_access_key = hush\n"
        )
        (tmp_path / "config").write_text("[profile work]\nregion = eu-west-3\n")
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        seen: list[str] = []
        with bucket(listening(seen), profile="work") as (layout, _):
            assert layout.read_bytes("x") == CONTENT
            assert "Credential=of-work/" in seen[-1] and "/eu-west-3/s3/" in seen[-1]
        monkeypatch.setenv("AWS_PROFILE", "work")
        with bucket(listening(seen), use_listings_cache=False) as (layout, _):
            assert layout.read_bytes("x") == CONTENT and "Credential=of-work/" in seen[-1]

    def test_those_of_the_environment_and_then_of_the_options(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "of-env")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
        monkeypatch.setenv("AWS_SESSION_TOKEN", "of-env")
        # obstore reads variables that botocore does not know.
        monkeypatch.setenv("AWS_SKIP_SIGNATURE", "true")
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:9")
        seen: list[str] = []
        with bucket(listening(seen), use_listings_cache=False) as (layout, _):
            assert layout.read_bytes("x") == CONTENT and "Credential=of-env/" in seen[-1]
            assert "x-amz-security-token" in seen[-1]
        with bucket(listening(seen), **KEYS) as (layout, _):
            assert layout.read_bytes("x") == CONTENT and "Credential=user-key/" in seen[-1]
            assert "x-amz-security-token" not in seen[-1]

    def test_none_for_a_public_bucket(self) -> None:
        seen: list[str] = []
        with bucket(listening(seen), anon=True) as (layout, _):
            with pytest.raises(StorageError):  # this one is not public
                layout.read_bytes("x")
            assert seen[-1] == ""

    def test_none_where_some_are_needed_is_one_line(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
            monkeypatch.delenv(name, raising=False)
        for name in ("AWS_SHARED_CREDENTIALS_FILE", "AWS_CONFIG_FILE"):
            monkeypatch.setenv(name, str(tmp_path / "none"))
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        with bucket(use_listings_cache=False) as (layout, _):
            assert isinstance(layout.backend, ObjectBackend)
            with pytest.raises(StorageError, match=r"no credentials .*AWS_") as caught:
                layout.read_bytes("x")
            assert "\n" not in str(caught.value)

    def test_obstore_s_own_options_are_taken_as_they_are(self) -> None:
        seen: list[str] = []
        with bucket(listening(seen)) as (_, options):
            own = {
                "endpoint": options["endpoint_url"],
                "access_key_id": "of-obstore",
                "secret_access_key": "hush",
                "region": "eu-west-2",
                "client_options": {"read_timeout": "9s"},
            }
            layout = Layout.open("s3://mine", own)
            assert isinstance(layout.backend, ObjectBackend)
            assert layout.read_bytes("x") == CONTENT
            assert "Credential=of-obstore/" in seen[-1] and "/eu-west-2/s3/" in seen[-1]
            with pytest.raises(OutputError, match=r"s3fs knows .* in a forked process.* endpoint"):
                layout.backend._through_fsspec()

    @pytest.mark.parametrize(
        "options",
        [
            {"s3_additional_kwargs": {"ServerSideEncryption": "aws:kms"}},
            {"client_kwargs": {"api_version": "2006-03-01"}},
            {"config_kwargs": {"signature_version": "s3"}},
            {"config_kwargs": {"s3": {"use_accelerate_endpoint": True}}},
        ],
    )
    def test_options_that_only_s3fs_knows_are_given_to_it(self, options: dict[str, Any]) -> None:
        layout = Layout.open("s3://mine/x", {**KEYS, **options})
        assert isinstance(layout.backend, S3fsBackend)
        assert layout == Layout.open("s3://mine/x", {**KEYS, **options})

    def test_a_profile_with_another_kind_of_endpoint_is_left_to_s3fs(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "config").write_text("[default]\ns3 =\n  use_accelerate_endpoint = true\n")
        monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
        assert isinstance(Layout.open("s3://mine/x", KEYS).backend, S3fsBackend)


class Server(ThreadingHTTPServer):
    """Answers a request for one object as `behaviour` has it."""

    behaviour = ""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients leave as they like."""


class Handler(BaseHTTPRequestHandler):
    server: Server
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        self.send_header("Content-Length", str(len(CONTENT)))
        self.end_headers()

    def do_GET(self) -> None:
        behaviour = self.server.behaviour
        first, last = 0, len(CONTENT) - 1
        wanted = self.headers.get("Range")
        if wanted and behaviour != "all of it":
            first, last = map(int, wanted.removeprefix("bytes=").split("-"))
        if behaviour == "another range":
            first, last = first + 1, last + 1
        body = CONTENT[first : last + 1]
        self.send_response(206 if wanted and behaviour != "all of it" else 200)
        self.send_header("ETag", '"1"')
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        if wanted and behaviour != "all of it":
            self.send_header("Content-Range", f"bytes {first}-{last}/{len(CONTENT)}")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if behaviour in ("breaks off", "stalls"):
            self.wfile.write(body[: len(body) // 2])
            self.wfile.flush()
            if behaviour == "stalls":
                self.rfile.read(1)  # until the client leaves
            self.close_connection = True
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def server_of(context: ssl.SSLContext | None = None) -> Iterator[Server]:
    server = Server(("127.0.0.1", 0), Handler)
    if context is not None:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def layout_at(server: Server, scheme: str = "http", **options: Any) -> Layout:
    address = f"{scheme}://127.0.0.1:{server.server_port}"
    return Layout.open("s3://mine", {**KEYS, "endpoint_url": address, **options})


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    ("behaviour", "fault"),
    [
        ("breaks off", ErrorKind.OUTAGE),
        ("stalls", ErrorKind.OUTAGE),
        ("another range", ErrorKind.UNKNOWN),
        ("all of it", ErrorKind.UNKNOWN),
    ],
)
def test_what_is_not_as_asked_is_an_error(behaviour: str, fault: ErrorKind, whole: bool) -> None:
    with server_of() as server:
        layout = layout_at(server, config_kwargs={"read_timeout": 1})
        assert bytes(layout.read_range("x", 5, 2_000_000)) == CONTENT[5:2_000_005]
        server.behaviour = behaviour
        if whole and fault is ErrorKind.UNKNOWN:
            return  # an answer to a request for a range alone
        with pytest.raises(StorageError) as caught:
            layout.read_bytes("x") if whole else layout.read_range("x", 5, 2_000_000)
        assert caught.value.transient == (fault is ErrorKind.OUTAGE)
        assert "\n" not in str(caught.value)
        server.behaviour = ""
        assert layout.read_bytes("x") == CONTENT


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "authority"])
def certificate(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate of 127.0.0.1 that is signed by itself, with its key in one file. OpenSSL alone
    trusts one that is its own authority."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=request.param, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(secret + made.public_bytes(pem))
    return path


def test_a_certificate_is_trusted_where_the_options_or_the_environment_say_so(
    certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retrying, "BRIEF", RetryPolicy(1.0, sleep=lambda seconds: None))
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "1")  # botocore waits 6 s between five tries
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with server_of(context) as server:
        for verify in (str(certificate), False):
            layout = layout_at(server, "https", client_kwargs={"verify": verify})
            assert layout.read_bytes("x") == CONTENT
        with pytest.raises(StorageError, match="certificate") as caught:
            layout_at(server, "https").read_bytes("x")
        assert "\n" not in str(caught.value)
        monkeypatch.setenv("AWS_CA_BUNDLE", str(certificate))
        assert layout_at(server, "https").read_bytes("x") == CONTENT


class TestWords:
    @pytest.mark.parametrize(
        ("status", "code", "text", "transient"),
        [
            (403, "AccessDenied", "access is refused", False),
            (401, "Unauthorized", "no credentials", False),
            (503, "SlowDown", "the store answers 503", True),
            (500, "InternalError", "the store answers 500", True),
            (400, "ExpiredToken", "ExpiredToken", True),
            (400, "InvalidArgument", "InvalidArgument", False),
            (409, "OperationAborted", "409 Conflict", False),
        ],
    )
    def test_an_answer_is_one_line_with_its_status_and_code(
        self, status: int, code: str, text: str, transient: bool
    ) -> None:
        body = f"<Error><Code>{code}</Code><Message>As\nthe store says.</Message></Error>".encode()

        def app(environ: dict[str, Any], start_response: Any) -> Any:
            start_response(f"{status} X", [("Content-Length", str(len(body)))])
            return [body]

        with serving(app) as address:
            layout = Layout.open("s3://mine/out", {**KEYS, "endpoint_url": address})
            with pytest.raises(StorageError, match="s3://mine/out/x cannot be read: ") as caught:
                layout.read_bytes("x")
        said = str(caught.value)
        assert text in said and code in said and "As the store says." in said and "\n" not in said
        assert caught.value.transient is transient
        assert http_status(caught.value) == status and not [s for s in KEYS.values() if s in said]

    def test_where_nobody_answers(self) -> None:
        layout = Layout.open("s3://mine/out", {**KEYS, "endpoint_url": "http://127.0.0.1:9"})
        with pytest.raises(StorageError, match=r"cannot be reached .*Connection refused") as caught:
            layout.read_bytes("x")
        assert classify(caught.value) is ErrorKind.OUTAGE

    def test_a_signature_in_the_address_is_never_said(self) -> None:
        def app(environ: dict[str, Any], start_response: Any) -> Any:
            assert "sig=hush" in environ["QUERY_STRING"]
            return refused(403, "AuthorizationFailure")(environ, start_response)

        with serving(app) as address:
            text = (
                f"BlobEndpoint={address}/{ACCOUNT};AccountName={ACCOUNT};"
                "SharedAccessSignature=sv=2026-01-01&sig=hush"
            )
            layout = Layout.open("abfs://out/x", {"connection_string": text})
            for call in (layout.everything, lambda: layout.read_bytes("x")):
                with pytest.raises(StorageError, match="AuthorizationFailure") as caught:
                    call()
                chain = [caught.value, caught.value.__cause__]
                assert "hush" not in f"{chain} {caught.value.__cause__.__cause__}"


def test_a_key_that_obstore_has_no_words_for_hides_no_other(tmp_path: Path) -> None:
    with bucket() as (layout, options):
        fs = fsspec.filesystem("s3", **options)
        for key in ("data//odd", "data/", "data/x"):
            fs.call_s3("put_object", Bucket="mine", Key=key, Body=b"")
        assert "data/x" in layout.sizes("data")
        layout.delete("data")
        assert layout.list("data") == []


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_does_not_grow_with_an_upload(tmp_path: Path) -> None:
    """A few parts of 16 MiB are in memory, not the file of 400 MB."""
    with (tmp_path / "large").open("wb") as file:
        file.truncate(400_000_000)
    most = [0]

    def swallow(environ: dict[str, Any], start_response: Any) -> Any:
        left = int(environ.get("CONTENT_LENGTH") or 0)
        while left:
            left -= len(environ["wsgi.input"].read(min(left, 1 << 20)))
        status = Path("/proc/self/status").read_text()
        most[0] = max(most[0], int(status.partition("VmRSS:")[2].split()[0]) * 1024)
        start_response("200 OK", [("ETag", '"1"'), ("Content-Type", "application/xml")])
        if environ["QUERY_STRING"].startswith("uploads"):
            return [xml("InitiateMultipartUploadResult", UploadId=1).encode()]
        return [xml("CompleteMultipartUploadResult", ETag=1).encode()]

    with serving(swallow) as address:
        layout = Layout.open("s3://mine", {**KEYS, "endpoint_url": address})
        layout.write_bytes("x", b"")
        before = most[0]
        layout.upload_file(tmp_path / "large", "large")
    assert 0 < most[0] - before < 200_000_000
