"""Options of buckets as docs/howto/cloud.md gives them, seen in the requests of a job's stores."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
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


@dataclass
class Requests:
    """Headers of the requests to a store, by method."""

    seen: list[tuple[str, dict[str, str]]] = field(default_factory=list)

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


@dataclass(frozen=True)
class Bucket:
    """A bucket `mine` on loopback.

    Args:
        requests: Requests to its store.
        options: Storage options that lead to the store.
        fs: File system of a client with these options alone.
    """

    requests: Requests
    options: dict[str, Any]
    fs: Any


@pytest.fixture(scope="module")
def store() -> Iterator[Bucket]:
    """One store and one client for all tests: each new client loads half a megabyte of JSON."""
    requests = Requests()
    with s3_stand_in(requests.around) as address:
        options = {"key": "user-key", "secret": "hush", "endpoint_url": address}
        yield Bucket(
            requests, options, fsspec.filesystem("s3", skip_instance_cache=True, **options)
        )


@pytest.fixture
def bucket(store: Bucket) -> Iterator[Bucket]:
    """The store with an empty bucket, and no request so far."""
    store.fs.mkdir("mine")
    store.requests.seen.clear()
    yield store
    store.fs.invalidate_cache()  # others have written
    store.fs.rm("mine", recursive=True)


def write_and_read(layout: Layout) -> None:
    """Make every kind of request that a job makes of its output."""
    assert layout.put_if_absent("commit", b"1")
    layout.write_bytes("large", bytes(5 << 20))
    assert layout.read_bytes("commit") == b"1" and layout.size("large") == 5 << 20
    assert set(layout.everything()) == {"commit", "large"}
    layout.delete("commit")


class TestOutputs:
    def test_variables_ask_for_encryption_with_a_key(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_SERVER_SIDE_ENCRYPTION", "aws:kms")
        monkeypatch.setenv("AWS_SSE_KMS_KEY_ID", "alias/mine")
        layout = Layout.open("s3://mine/out", bucket.options)
        assert isinstance(layout.backend, S3Backend)
        write_and_read(layout)
        assert bucket.requests.of("PUT", ENCRYPTION) == {"aws:kms"}
        assert bucket.requests.of("PUT", KMS_KEY) == {"alias/mine"}
        assert bucket.requests.of("GET", ENCRYPTION) == {None}

    def test_a_variable_says_who_pays(
        self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("AWS_REQUEST_PAYER", "requester")
        write_and_read(Layout.open("s3://mine/out", bucket.options))
        assert [bucket.requests.of(method, PAYER) for method in METHODS] == [{"requester"}] * 4

    def test_without_them_nobody_pays_and_nothing_is_encrypted(self, bucket: Bucket) -> None:
        write_and_read(Layout.open("s3://mine/out", bucket.options))
        assert [bucket.requests.of(method, PAYER) for method in METHODS] == [{None}] * 4
        assert bucket.requests.of("PUT", ENCRYPTION) == {None}

    def test_options_of_obstore_say_the_same(self, bucket: Bucket) -> None:
        own = {
            "aws_access_key_id": bucket.options["key"],
            "aws_secret_access_key": bucket.options["secret"],
            "aws_endpoint": bucket.options["endpoint_url"],
            "aws_server_side_encryption": "aws:kms",
            "aws_sse_kms_key_id": "alias/mine",
            "aws_request_payer": True,
        }
        layout = Layout.open("s3://mine/out", own)
        assert isinstance(layout.backend, S3Backend)
        write_and_read(layout)
        assert bucket.requests.of("PUT", KMS_KEY) == {"alias/mine"}
        assert [bucket.requests.of(method, PAYER) for method in METHODS] == [{"requester"}] * 4

    def test_options_of_s3fs_say_the_same(self, bucket: Bucket) -> None:
        extra = {"ServerSideEncryption": "aws:kms", "SSEKMSKeyId": "alias/mine"}
        own = {**bucket.options, "requester_pays": True, "s3_additional_kwargs": extra}
        layout = Layout.open("s3://mine/out", own)
        assert not isinstance(layout.backend, S3Backend)
        write_and_read(layout)
        assert bucket.requests.of("PUT", KMS_KEY) == {"alias/mine"}
        assert [bucket.requests.of(method, PAYER) for method in METHODS] == [{"requester"}] * 4


class TestSources:
    def test_who_reads_pays(self, bucket: Bucket) -> None:
        assert read_clip(bucket, {**bucket.options, "requester_pays": True}) == clip()
        assert bucket.requests.of("GET", PAYER) == {"requester"}
        assert read_clip(bucket, bucket.options) == clip()
        assert bucket.requests.of("GET", PAYER) == {None}

    def test_a_profile_in_the_environment_with_a_session_token(
        self, bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN"):
            monkeypatch.delenv(name, raising=False)
        (tmp_path / "credentials").write_text(
            "[work]\naws_access_key_id = of-work\naws_secret_access_key = hush\n"
            "aws_session_token = for-an-hour\n"
        )
        monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
        monkeypatch.setenv("AWS_PROFILE", "work")
        address = {"endpoint_url": bucket.options["endpoint_url"]}
        assert read_clip(bucket, address) == clip()
        assert bucket.requests.of("GET", "x-amz-security-token") == {"for-an-hour"}
        bucket.requests.seen.clear()
        write_and_read(Layout.open("s3://mine/out", address))
        assert bucket.requests.of("PUT", "x-amz-security-token") == {"for-an-hour"}


def read_clip(bucket: Bucket, storage_options: dict[str, Any]) -> bytes:
    """Put a clip into the bucket, and return its bytes as a source reads them."""
    bucket.fs.pipe_file("mine/in/clip.wav", clip())
    bucket.requests.seen.clear()
    source = files("s3://mine/in", storage_options=storage_options)
    (found,) = contents(source, list(source.items()))
    assert isinstance(found, bytes)
    return found
