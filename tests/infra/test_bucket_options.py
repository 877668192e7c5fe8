"""Options of buckets as docs/howto/cloud.md gives them, seen in the requests of a job's stores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import pytest

from earmill.pipeline.storage.layout import Layout
from earmill.pipeline.storage.object_store import S3Backend
from tests.pipeline.audio_factory import clip
from tests.pipeline.source_helpers import contents, files
from tests.s3_stand_in import App, s3_stand_in

PAYER, ENCRYPTION, KMS_KEY = (
    "x-amz-request-payer",
    "x-amz-server-side-encryption",
    "x-amz-server-side-encryption-aws-kms-key-id",
)
METHODS = ("PUT", "GET", "HEAD", "POST")


class Requests:
    """Headers of the requests to a store, by method."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, dict[str, str]]] = []

    def around(self, app: App) -> App:
        def call(environ: dict[str, Any], start_response: Any) -> Any:
            headers = {
                name[5:].replace("_", "-").lower(): str(value)
                for name, value in environ.items()
                if name.startswith("HTTP_X_AMZ")
            }
            self.seen.append((environ["REQUEST_METHOD"], headers))
            return app(environ, start_response)

        return call

    def of(self, method: str, header: str) -> set[str | None]:
        """Return the values that requests of a method have for a header."""
        return {headers.get(header) for each, headers in self.seen if each == method}


@contextmanager
def bucket() -> Iterator[tuple[Requests, dict[str, Any]]]:
    """Yield the requests to a bucket `mine` on loopback, and the options that lead there."""
    requests = Requests()
    with s3_stand_in(requests.around) as address:
        options = {"key": "user-key", "secret": "hush", "endpoint_url": address}
        fs = fsspec.filesystem("s3", skip_instance_cache=True, **options)
        fs.mkdir("mine")
        requests.seen.clear()
        try:
            yield requests, options
        finally:
            fs.rm("mine", recursive=True)


def write_and_read(layout: Layout) -> None:
    """Make every kind of request that a job makes of its output."""
    assert layout.put_if_absent("commit", b"1")
    layout.write_bytes("large", bytes(5 << 20))
    assert layout.read_bytes("commit") == b"1" and layout.size("large") == 5 << 20
    assert set(layout.everything()) == {"commit", "large"}
    layout.delete("commit")


class TestOutputs:
    def test_variables_ask_for_encryption_with_a_key(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
        monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "alias/mine")
        with bucket() as (requests, options):
            layout = Layout.open("s3://mine/out", options)
            assert isinstance(layout.backend, S3Backend)
            write_and_read(layout)
            assert requests.of("PUT", ENCRYPTION) == {"aws:kms"}
            assert requests.of("PUT", KMS_KEY) == {"alias/mine"}
            assert requests.of("GET", ENCRYPTION) == {None}

    def test_a_variable_says_who_pays(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
        with bucket() as (requests, options):
            write_and_read(Layout.open("s3://mine/out", options))
            assert [requests.of(method, PAYER) for method in METHODS] == [{"requester"}] * 4

    def test_without_them_nobody_pays_and_nothing_is_encrypted(self) -> None:
        with bucket() as (requests, options):
            write_and_read(Layout.open("s3://mine/out", options))
            assert [requests.of(method, PAYER) for method in METHODS] == [{None}] * 4
            assert requests.of("PUT", ENCRYPTION) == {None}

    def test_options_of_obstore_say_the_same(self) -> None:
        with bucket() as (requests, options):
            own = {
                "aws_access_key_id": options["key"],
                "aws_secret_access_key": options["secret"],
                "aws_endpoint": options["endpoint_url"],
                "aws_server_side_encryption": "aws:kms",
                "aws_sse_kms_key_id": "alias/mine",
                "aws_request_payer": True,
            }
            layout = Layout.open("s3://mine/out", own)
            assert isinstance(layout.backend, S3Backend)
            write_and_read(layout)
            assert requests.of("PUT", KMS_KEY) == {"alias/mine"}
            assert [requests.of(method, PAYER) for method in METHODS] == [{"requester"}] * 4

    def test_options_of_s3fs_say_the_same(self) -> None:
        with bucket() as (requests, options):
            extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/mine"}
            own = {**options, "requester_pays": True, "s3_additional_kwargs": extra}
            layout = Layout.open("s3://mine/out", own)
            assert not isinstance(layout.backend, S3Backend)
            write_and_read(layout)
            assert requests.of("PUT", KMS_KEY) == {"alias/mine"}
            assert [requests.of(method, PAYER) for method in METHODS] == [{"requester"}] * 4


class TestSources:
    def test_who_reads_pays(self) -> None:
        with bucket() as (requests, options):
            assert read_clip(requests, {**options, "requester_pays": True}) == clip()
            assert requests.of("GET", PAYER) == {"requester"}
            assert read_clip(requests, options) == clip()
            assert requests.of("GET", PAYER) == {None}

    def test_a_profile_in_the_environment_with_a_session_token(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "credentials").write_text(
            "[work]\naws_access_key_id = of-work\naws_secret_access_key = hush\n"
            "aws_session_token = for-an-hour\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_PROFILE", "work")
        with bucket() as (requests, options):
            address = {"endpoint_url": options["endpoint_url"]}
            assert read_clip(requests, address) == clip()
            assert requests.of("GET", "x-amz-security-token") == {"for-an-hour"}
            requests.seen.clear()
            write_and_read(Layout.open("s3://mine/out", address))
            assert requests.of("PUT", "x-amz-security-token") == {"for-an-hour"}


def read_clip(requests: Requests, storage_options: dict[str, Any]) -> bytes:
    """Put a clip into the bucket, and return its bytes as a source reads them."""
    fs = fsspec.filesystem("s3", skip_instance_cache=True, **storage_options)
    fs.pipe_file("mine/in/clip.wav", clip())
    requests.seen.clear()
    source = files("s3://mine/in", storage_options=storage_options)
    (found,) = contents(source, list(source.items()))
    assert isinstance(found, bytes)
    return found
