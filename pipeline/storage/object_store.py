"""S3, Google Cloud Storage and Azure Blob Storage through obstore.

The store itself checks the conditions of `create` (If-None-Match, ifGenerationMatch) and `replace`
(the tag of the compared content). A store that answers 501 to a conditional replace is written to
after the comparison; a writer that is frozen between the two requests goes unnoticed there.

Options are either options of s3fs, gcsfs and adlfs in `words`, or obstore's own. With fsspec's
words, endpoint, region and credentials come from botocore, google-auth or azure-identity. A bucket
whose options are neither is left to `fsspec_store`. Large files are uploaded in parts; parts that a
killed process leaves are no object.
"""

from __future__ import annotations

import os
import re
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import certifi

from earmill.pipeline.common.errors import OutputError
from earmill.pipeline.common.redact import redact
from earmill.pipeline.common.text import one_line
from earmill.pipeline.storage.backend import Backend, Entry, ObjectStoreError
from earmill.pipeline.storage.fsspec_store import (
    PART_BYTES,
    PARTS_AT_ONCE,
    FsspecBackend,
    missing_package,
)

T = TypeVar("T")
Options = Mapping[str, Any]

# Requests with more bytes are sent by the client for uploads, see `ObjectBackend._client`.
SMALL_BYTES = 1 << 20
# A request without a byte for STALL_S is given up. An upload counts from its beginning to the
# answer; in UPLOAD_S four parts of 16 MiB are through at 110 kB/s.
CONNECT_S, STALL_S, UPLOAD_S = 30.0, 60.0, 600.0
# obstore asks for new credentials five minutes before their end: botocore, which keeps them fresh,
# is asked every five minutes.
LASTS = timedelta(minutes=10)
# A client costs 0.15 s of a processor, and its connections a handshake each: layouts with the same
# options and variables share one backend.
MOST_SHARED = 32
VARIABLES = ("AWS_", "AZURE_", "GOOGLE_", "STORAGE_EMULATOR_")
# Answers of S3 to a request that was sent to another region than the bucket's.
ELSEWHERE = frozenset({"AuthorizationHeaderMalformed", "PermanentRedirect"})
NO_BUCKET = frozenset({"NoSuchBucket", "ContainerNotFound"})
# Options of every fsspec client that change no request.
CACHING = frozenset({"use_listings_cache", "skip_instance_cache"})
# Parts of Azure's connection strings.
CONNECTION = {
    "account_name": "AccountName",
    "account_key": "AccountKey",
    "sas_token": "SharedAccessSignature",
}
URI = re.compile(
    r"(?P<scheme>[A-Za-z0-9]+)://(?P<bucket>[A-Za-z0-9._-]+)"
    r"(?:@(?P<account>[a-z0-9]+)\.(?:dfs|blob)\.core\.windows\.net)?(?P<key>/[^?#]*)?"
)
_shared: dict[tuple[object, ...], ObjectBackend] = {}
# The threads of obstore's runtime do not live on in a forked child: a request would hang for ever.
_forks: list[bool] = []
os.register_at_fork(after_in_child=lambda: _forks.append("obstore" in sys.modules))


class CertificateError(ConnectionError):
    """The certificate of a store that obstore does not trust."""


class CredentialsError(ConnectionError):
    """The configured source of credentials has no credentials."""


class ObjectBackend(Backend):
    """One bucket or container, with storage options in fsspec's words or in obstore's."""

    schemes: ClassVar[tuple[str, ...]]  # All schemes of its URIs, the first in its addresses.
    # obstore's client, the package of fsspec's client, and its options that `translated` knows.
    client: ClassVar[str]
    package: ClassVar[str]
    words: ClassVar[frozenset[str]]

    def __init__(self, bucket: str, options: Options) -> None:
        self.bucket, self.options = bucket, dict(options)
        self._lock = Lock()
        self._clients: dict[bool, Any] = {}
        # By process: a filesystem of fsspec does not outlive a fork.
        self._fsspec: dict[int, Backend] = {}
        self._is_refused = False

    @classmethod
    def open(cls, uri: str, options: Options) -> tuple[Backend, str] | None:
        found = URI.fullmatch(uri)
        if found is None or found["scheme"].lower() not in cls.schemes:
            return None
        if find_spec(cls.package) is None or find_spec("obstore") is None:
            raise missing_package(uri)
        from obstore.exceptions import BaseError

        bucket, key = found["bucket"], (found["key"] or "").strip("/")
        if key and not can_name(key):
            return None
        if found["account"] is not None:
            options = {"account_name": found["account"], **options}
        variables = sorted(each for each in os.environ.items() if each[0].startswith(VARIABLES))
        shared = (cls, bucket, repr(sorted(options.items())), *variables)
        backend = _shared.get(shared)
        if backend is None:
            backend = cls(bucket, options)
            try:
                backend._client(uploads=False)
            except (BaseError, TypeError, ValueError):
                return None
            if len(_shared) >= MOST_SHARED:
                _shared.clear()
            if not options.get("skip_instance_cache"):
                _shared[shared] = backend
        return backend, f"{bucket}/{key}".rstrip("/")

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.bucket, self.options)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ObjectBackend) and self.__reduce__() == other.__reduce__()

    def __hash__(self) -> int:
        return hash((self.schemes, self.bucket))

    def here(self) -> Backend:
        """Return this backend, or fsspec's if obstore was imported before a fork of this process,
        or refuses a certificate."""
        return self._through_fsspec() if any(_forks) or self._is_refused else self

    def url(self, path: str) -> str:
        return redact(f"{self.schemes[0]}://{path}")

    def size(self, path: str) -> int:
        return int(self._ask(path, lambda client, key: client.head(key)["size"]))

    def read(self, path: str) -> bytes:
        return self._ask(path, lambda client, key: client.get(key).bytes().to_bytes())

    def read_range(self, path: str, start: int, length: int) -> Any:
        if not length:
            return b""
        try:
            return self._ask(
                path, lambda client, key: client.get_range(key, start=start, length=length)
            )
        except ObjectStoreError as error:
            if error.status != 416:
                raise
            return b""  # the file ends before

    def write(self, path: str, data: bytes) -> None:
        self._ask(
            path,
            lambda client, key: client.put(key, data, use_multipart=False),
            uploads=len(data) > SMALL_BYTES,
        )

    def create(self, path: str, data: bytes) -> bool:
        try:
            self._ask(path, lambda client, key: client.put(key, data, mode="create"))
        except ObjectStoreError as error:
            # Azure's 409 has many codes; S3's 409 means two writers at once, and is asked again.
            if error.status != 412 and error.error_code != "BlobAlreadyExists":
                raise
            return False
        return True

    def replace(self, path: str, seen: bytes, data: bytes) -> bool:
        try:
            found = self._ask(path, lambda client, key: client.get(key))
            if found.bytes().to_bytes() != seen:
                return False
            version = {name: found.meta[name] for name in ("e_tag", "version") if found.meta[name]}
            self._ask(path, lambda client, key: client.put(key, data, mode=version))
        except FileNotFoundError:
            return False
        except ObjectStoreError as error:
            if error.status == 412:
                return False
            if error.status != 501:
                raise
            self.write(path, data)
        return True

    def list(self, path: str) -> dict[str, Entry]:
        try:
            pages = self._ask(path, lambda client, key: [*client.list(key or None)])
        except ValueError:  # obstore cannot name a key with an empty part, which others wrote
            return self._through_fsspec().list(path)
        metas = [meta for page in pages for meta in page]

        def entry(meta: Any) -> Entry:
            return Entry(meta["size"], meta["last_modified"].timestamp())

        found = {f"{self.bucket}/{meta['path']}": entry(meta) for meta in metas}
        # An empty object `data/`, which consoles make for a folder, is listed as `data`.
        folders = {path, *(name.rpartition("/")[0] for name in found)}
        found = {name: each for name, each in found.items() if each.nbytes or name not in folders}
        if not found and path != self.bucket:
            with suppress(FileNotFoundError):
                return {path: entry(self._ask(path, lambda client, key: client.head(key)))}
        return found

    def delete(self, path: str) -> None:
        keys = [name[len(self.bucket) + 1 :] for name in self.list(path)]
        if not all(map(can_name, keys)):
            self._through_fsspec().delete(path)
            return
        try:
            if keys:
                self._ask(path, lambda client, _: client.delete(keys))
        except FileNotFoundError:  # of one that is gone; obstore does not say which are left
            for key in keys:
                with suppress(FileNotFoundError):
                    self._ask(f"{self.bucket}/{key}", lambda client, key: client.delete([key]))

    def upload(self, local: str, path: str) -> None:
        parts = {"chunk_size": PART_BYTES, "max_concurrency": PARTS_AT_ONCE}
        self._ask(path, lambda client, key: client.put(key, Path(local), **parts), uploads=True)

    @abstractmethod
    def translated(self) -> dict[str, Any]:
        """Return obstore's options for options in fsspec's words; ValueError if it has none."""

    def follow(self, error: ObjectStoreError) -> bool:
        """Return True if the bucket was found elsewhere, so that the same request may succeed."""
        return False

    def _client(self, *, uploads: bool) -> Any:
        """Return a client of obstore. For uploads, it has a longer time-out and three tries for
        each part, as one part that fails would cost the whole upload."""
        import obstore.store

        with self._lock:
            if uploads in self._clients:
                return self._clients[uploads]
            in_words = self.options.keys() <= self.words
            settings = self.translated() if in_words else dict(self.options)
            http = {
                "connect_timeout": timedelta(seconds=CONNECT_S),
                "read_timeout": timedelta(seconds=UPLOAD_S if uploads else STALL_S),
                # obstore would end any answer after 30 s, however fast it comes.
                "timeout": timedelta(days=7),
                # If no option asks for it, a store with TLS cannot redirect to plain HTTP.
                "allow_http": any(str(each).startswith("http://") for each in settings.values()),
                # Added to the system's roots, which a container may lack.
                "root_certificate": Path(certifi.where()).read_bytes(),
                **settings.pop("client_options", {}),
            }
            tries = {"max_retries": 2 if uploads else 0}
            settings = {"retry_config": tries, "client_options": http, **settings}
            self._clients[uploads] = getattr(obstore.store, self.client)(self.bucket, **settings)
            return self._clients[uploads]

    def _ask(self, path: str, work: Callable[[Any, str], T], *, uploads: bool = False) -> T:
        """Return the result of `work`, which is called with a client and the key of `path`."""
        from obstore.exceptions import BaseError

        client, key = self._client(uploads=uploads), path[len(self.bucket) + 1 :]
        try:
            return work(client, key)
        except (BaseError, FileNotFoundError) as error:
            failed = from_obstore(path, error)
        # OpenSSL takes some certificates that obstore does not: one that is its own authority.
        # fsspec's client, which uses OpenSSL, is asked at the next try.
        self._is_refused |= isinstance(failed, CertificateError)
        if isinstance(failed, ObjectStoreError) and self.follow(failed):
            return self._ask(path, work, uploads=uploads)
        raise failed

    def _through_fsspec(self) -> Backend:
        own = sorted(self.options.keys() - self.words)
        if own:
            raise OutputError(
                f"{self.url(self.bucket)}: expected storage_options that {self.package} knows "
                f"({', '.join(sorted(self.words - CACHING))}) in a forked process, where obstore "
                f"does not work, got {', '.join(own)}; use those, or start processes by spawn"
            )
        process = os.getpid()
        if process not in self._fsspec:
            options = {**self.options, "skip_instance_cache": True}
            self._fsspec[process] = FsspecBackend.open(f"{self.schemes[0]}://", options)[0]
        return self._fsspec[process]


class S3Backend(ObjectBackend):
    """A bucket of S3, or of a store that speaks as S3 does."""

    schemes, package, client = ("s3", "s3a"), "s3fs", "S3Store"
    words = CACHING | set(
        "key secret token anon profile endpoint_url client_kwargs config_kwargs".split()
    )

    def _given(self, name: str) -> dict[str, Any]:
        return {**(self.options.get(name) or {})}

    def translated(self) -> dict[str, Any]:
        session, client, verify = self._botocore()
        endpoint, region = client.meta.endpoint_url, client.meta.region_name
        special = client.meta.config.s3 or {}
        if special.get("use_accelerate_endpoint"):
            raise ValueError("obstore has one kind of endpoint for a bucket")
        by_host = special.get("addressing_style") == "virtual"
        if by_host:
            address = urlsplit(endpoint)
            endpoint = f"{address.scheme}://{self.bucket}.{address.netloc}"
        http: dict[str, Any] = {"allow_invalid_certificates": verify is False}
        if isinstance(verify, str):
            http["root_certificate"] = Path(verify).read_bytes()
        for name in {"connect_timeout", "read_timeout"} & {*self._given("config_kwargs")}:
            http[name] = timedelta(seconds=getattr(client.meta.config, name))

        def credentials() -> dict[str, Any]:
            found = session.get_credentials()
            if found is None:
                raise ValueError("none in the environment, the profiles and the instance's role")
            frozen = found.get_frozen_credentials()
            return {
                "access_key_id": frozen.access_key,
                "secret_access_key": frozen.secret_key,
                "token": frozen.token,
                "expires_at": datetime.now(UTC) + LASTS,
            }

        anon = bool(self.options.get("anon"))
        return {
            # Beats AWS_ENDPOINT_URL_S3, which obstore would read of its own.
            "aws_endpoint_url_s3": endpoint,
            "region": region if region not in (None, "aws-global") else "us-east-1",
            "virtual_hosted_style_request": by_host,
            "skip_signature": anon,
            "credential_provider": None if anon else credentials,
            "client_options": http,
        }

    def _botocore(self) -> tuple[Any, Any, Any]:
        """Return a session of botocore, its client for S3, which is asked for endpoint, region and
        style of addresses and makes no request, and the certificates to trust."""
        from botocore import UNSIGNED
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
        from botocore.session import Session

        options, config = self._given("client_kwargs"), self._given("config_kwargs")
        if options.keys() - {"endpoint_url", "region_name", "verify"}:
            raise ValueError("s3fs knows more about client_kwargs")
        if config.get("signature_version") not in (None, "s3v4"):
            raise ValueError("obstore signs in no other way")
        if self.options.get("endpoint_url") is not None:
            options["endpoint_url"] = self.options["endpoint_url"]
        if self.options.get("anon"):
            config["signature_version"] = UNSIGNED
        session = Session(profile=self.options.get("profile"))
        keys = [self.options.get(name) for name in ("key", "secret", "token")]
        if keys[0] is not None:
            session.set_credentials(*keys)
        try:
            client = session.create_client("s3", config=Config(**config), **options)
            bundle = session.get_config_variable("ca_bundle")
        except BotoCoreError as error:
            raise ValueError(str(error)) from error
        return session, client, options.get("verify", bundle)

    def follow(self, error: ObjectStoreError) -> bool:
        """Ask for the bucket's region: botocore follows a bucket there, obstore does not."""
        # The answer to HEAD has no code.
        unclear = error.status == 400 and error.error_code is None
        elsewhere = unclear or error.status == 301 or error.error_code in ELSEWHERE
        if not elsewhere or not self.options.keys() <= self.words:
            return False
        from botocore.exceptions import ClientError

        client = self._botocore()[1]
        try:
            answer = client.head_bucket(Bucket=self.bucket)
        except ClientError as refusal:  # which names the region as well
            answer = refusal.response
        region = answer["ResponseMetadata"].get("HTTPHeaders", {}).get("x-amz-bucket-region")
        if region in (None, client.meta.region_name):
            return False
        there = {**self._given("client_kwargs"), "region_name": region}
        with self._lock:
            self.options, self._clients = {**self.options, "client_kwargs": there}, {}
        return True


class GoogleBackend(ObjectBackend):
    """A bucket of Google Cloud Storage."""

    schemes, package, client = ("gs", "gcs"), "gcsfs", "GCSStore"
    words = CACHING | {"token", "project", "endpoint_url"}

    def translated(self) -> dict[str, Any]:
        from gcsfs.credentials import GoogleCredentials

        token, endpoint = self.options.get("token"), self.options.get("endpoint_url")
        if "STORAGE_EMULATOR_HOST" in os.environ or (token == "anon" and endpoint):
            raise ValueError("emulators speak Google's JSON interface, obstore its XML interface")
        google = GoogleCredentials(self.options.get("project"), "read_write", token)

        def current() -> dict[str, Any]:
            google.maybe_refresh()
            expiry = google.credentials.expiry
            until = None if expiry is None else expiry.replace(tzinfo=UTC)
            return {"token": google.credentials.token, "expires_at": until}

        return {
            "base_url": endpoint or "https://storage.googleapis.com",
            "skip_signature": google.credentials is None,
            "credential_provider": None if google.credentials is None else current,
        }


class AzureBackend(ObjectBackend):
    """A container of Azure Blob Storage."""

    schemes, package, client = ("abfs", "abfss", "az"), "adlfs", "AzureStore"
    words = CACHING | set(
        "account_name account_key sas_token connection_string anon tenant_id client_id "
        "client_secret".split()
    )

    def translated(self) -> dict[str, Any]:
        # adlfs takes each option from a variable as well.
        found = {
            name: self.options.get(name) or os.environ.get(f"AZURE_STORAGE_{name.upper()}")
            for name in sorted(self.words - CACHING - {"anon"})
        }
        anon = str(self.options.get("anon", os.environ.get("AZURE_STORAGE_ANON"))).lower()
        text = found.pop("connection_string") or ""
        if "UseDevelopmentStorage" in text:
            raise ValueError("a local emulator")
        parts = dict(part.split("=", 1) for part in text.split(";") if "=" in part)
        found |= {name: parts.get(part) or found[name] for name, part in CONNECTION.items()}
        scheme = parts.get("DefaultEndpointsProtocol", "https")
        suffix = parts.get("EndpointSuffix", "core.windows.net")
        endpoint = f"{scheme}://{found['account_name']}.blob.{suffix}"
        has_keys = any(found[name] for name in ("account_key", "sas_token", "client_secret"))
        is_anon = anon not in ("none", "false", "0", "f", "") and not has_keys
        tokens = None
        if not (is_anon or has_keys):
            from obstore.auth.azure import AzureCredentialProvider

            tokens = AzureCredentialProvider()
        return {
            **{name: value for name, value in found.items() if value},
            "endpoint": parts.get("BlobEndpoint", endpoint).rstrip("/"),
            "skip_signature": is_anon,
            "credential_provider": tokens,
        }


def can_name(key: str) -> bool:
    """Return True if obstore takes a key: no part of it is empty, `.` or `..`."""
    return {"", ".", ".."}.isdisjoint(key.split("/"))


def from_obstore(path: str, error: Exception) -> Exception:
    """Return an error of obstore as one that `classify` and `http_status` understand. Only status,
    code and message are taken over, because its text holds the URL with an Azure signature."""
    text = str(error)
    line, _, details = text.partition("\n\nDebug source:")
    code = _found(r"<Code>\s*([\w.-]+)", line)
    status = _found(r"status code: (\d{3})", line)
    if status is None and "redirect without LOCATION" in line:
        status = "301"
    if status == "404" or isinstance(error, FileNotFoundError):
        reason = "no such bucket" if code in NO_BUCKET else "no such object"
        return FileNotFoundError(f"{path}: {reason}")
    if status is not None:
        message = one_line(_found(r"<Message>([^<]*)", line) or "")
        words = " ".join(dict.fromkeys(filter(None, (code, message))))
        return ObjectStoreError(f"{path}: status {status} {words}".rstrip(), int(status), code)
    if type(error).__name__ == "InvalidPathError":
        return ValueError(f"{path}: {one_line(line)}")
    if "credential provider: " in line:
        return CredentialsError(f"{path}: {one_line(line.partition('provider: ')[2])}")
    if "HTTP error" not in text and "HttpError" not in text:
        return ObjectStoreError(f"{path}: {one_line(line)}", None, None)
    if "TimedOut" in details or "Timeout" in details:
        return TimeoutError(f"{path}: no answer in time")
    refused = _found(r"InvalidCertificate\([^\w]*((?:Other\W+OtherError\W+)?\w+)", details)
    if refused is not None:
        return CertificateError(f"{path}: the certificate is refused: {refused.split()[-1]}")
    reasons = re.findall(r'(?:message|error): "([^"]+)"', details) or [line.rpartition(" - ")[2]]
    return ConnectionError(f"{path}: no answer: {one_line(reasons[-1])}")


def _found(pattern: str, text: str) -> str | None:
    match = re.search(pattern, text)
    return match and match[1]
