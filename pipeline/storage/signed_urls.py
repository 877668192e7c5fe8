"""Signed URLs for objects in S3, without asking botocore about each.

botocore resolves an endpoint, fires its events and signs, on the event loop of s3fs: 0.2 to 0.5 ms
an object. Of all that only the signature differs between the objects of a bucket, and it takes two
hashes. So botocore signs the first URL, and those that follow are made like it, provided that the
first one made in this way is botocore's to the letter. Where not, botocore signs all of them.

Sources: AWS, "Signature Calculations: Using Query Parameters (AWS Signature Version 4)", and
"Signing and Authenticating REST Requests: Query String Request Authentication Alternative" for
version 2, which is botocore's choice where a client names no region.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import re
import time
import weakref
from collections.abc import Callable
from functools import reduce
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fsspec.asyn import sync

# How long a URL is valid, how long it is used, and how long others are made like it.
VALID_S, USED_S, LIKE_S = 3600, 1800.0, 1800.0
MAX_URLS = 4096
PLAIN_BUCKET = re.compile(r"[A-Za-z0-9.-]+")
SIGNATURE = re.compile(r"(?<=[?&])((?:X-Amz-)?Signature=)([^&]*)")
# Makes the URL of a key.
Signer = Callable[[str], str]


class SignedUrls:
    """URLs for the objects of one filesystem; safe in several threads.

    Args:
        fs: An s3fs.
    """

    def __init__(self, fs: Any) -> None:
        # Whoever keeps these by filesystem does not keep it alive.
        self._fs = weakref.ref(fs)
        # By bucket, and until when; None where botocore signs.
        self._signers: dict[str, tuple[Signer | None, float]] = {}
        # Of botocore, by path, and until when.
        self._urls: dict[str, tuple[str, float]] = {}

    def url(self, path: str) -> str:
        """A URL to get an object with, valid for a while.

        Args:
            path: Of the object, as the filesystem spells it.
        """
        bucket, _, key = path.partition("/")
        now, is_plain = time.monotonic(), PLAIN_BUCKET.fullmatch(bucket) and "?" not in key
        signer, until = self._signers.get(bucket, (None, 0.0))
        if signer is not None and now < until and is_plain:
            return signer(key)
        url, used_until = self._urls.get(path, ("", 0.0))
        if now >= used_until or (is_plain and now >= until):
            url = self._ask(path, now)
            if is_plain and now >= until:
                self._signers[bucket] = self._like(url, bucket, key), now + LIKE_S
        return url

    def forget(self) -> None:
        """Ask botocore for the next URL: credentials may have changed."""
        self._signers.clear()
        self._urls.clear()

    def _ask(self, path: str, now: float) -> str:
        if len(self._urls) >= MAX_URLS:
            self._urls.clear()
        fs = self._fs()
        assert fs is not None  # the caller's
        url = str(fs.url(path, expires=VALID_S))
        self._urls[path] = url, now + USED_S
        return url

    def _like(self, url: str, bucket: str, key: str) -> Signer | None:
        """What makes URLs like this one, if it makes this one."""
        fs = self._fs()
        try:
            # Where clients keep them; those of a session may be others.
            credentials = fs.s3._request_signer._credentials  # type: ignore[union-attr]
            secret = sync(fs.loop, credentials.get_frozen_credentials).secret_key  # type: ignore[union-attr]
            signer = signer_like(url, bucket, key, secret)
        # Whatever is otherwise in another version of either, botocore signs.
        except Exception:
            return None
        return signer if signer(key) == url else None


def signer_like(url: str, bucket: str, key: str, secret: str) -> Signer:
    """What makes URLs like that of `key` for other keys of its bucket; right only if it makes that
    one.

    Raises:
        ValueError: There is no such signature in it.
    """
    parts, found = urlsplit(url), SIGNATURE.search(url)
    quoted = _quoted(key)
    if found is None or not parts.path.endswith(quoted):
        raise ValueError(f"expected a signed URL of {key!r}")
    sign = _version_4 if found[1].startswith("X-Amz") else _version_2
    above = parts.path.removesuffix(quoted)
    signature_of = sign(parts.netloc, parts.query, bucket, above, secret)
    origin = f"{parts.scheme}://{parts.netloc}{above}"
    before, after = url[url.index("?") : found.start(2)], url[found.end(2) :]

    def signed(key: str) -> str:
        quoted = _quoted(key)
        return f"{origin}{quoted}{before}{signature_of(quoted)}{after}"

    return signed


def _version_4(netloc: str, query: str, bucket: str, above: str, secret: str) -> Signer:
    said = {name: values[0] for name, values in parse_qs(query).items()}
    scope = said["X-Amz-Credential"].split("/", 1)[1]
    # Day, region, service and a constant; the same for all objects.
    signing_key = reduce(_hmac_sha256, scope.split("/"), f"AWS4{secret}".encode())
    signed = (part for part in query.split("&") if not part.startswith("X-Amz-Signature="))
    rest = f"{'&'.join(sorted(signed))}\nhost:{netloc}\n\nhost\nUNSIGNED-PAYLOAD"
    head = f"{said['X-Amz-Algorithm']}\n{said['X-Amz-Date']}\n{scope}\n"

    def signature_of(quoted: str) -> str:
        request = hashlib.sha256(f"GET\n{above}{quoted}\n{rest}".encode()).hexdigest()
        return _hmac_sha256(signing_key, head + request).hex()

    return signature_of


def _version_2(netloc: str, query: str, bucket: str, above: str, secret: str) -> Signer:
    said = {name: values[0] for name, values in parse_qs(query).items()}
    token = said.get("x-amz-security-token")
    headers = "" if token is None else f"x-amz-security-token:{token}\n"
    # The bucket is named in any case, in the host name or in the path.
    before = f"GET\n\n\n{said['Expires']}\n{headers}/{bucket}/"

    def signature_of(quoted: str) -> str:
        made = hmac.new(secret.encode(), (before + quoted).encode(), hashlib.sha1).digest()
        return quote(base64.b64encode(made), safe="")

    return signature_of


def _hmac_sha256(key: bytes, text: str) -> bytes:
    return hmac.digest(key, text.encode(), "sha256")


def _quoted(key: str) -> str:
    return quote(key, safe="/~")
