"""URLs that are signed here are botocore's to the letter, or botocore's own."""

from __future__ import annotations

import time
from typing import Any

import fsspec
import pytest

from earmill.pipeline.storage import signed_urls
from earmill.pipeline.storage.signed_urls import LIKE_S, USED_S, VALID_S, SignedUrls, signer_like

KEYS = ("a", "key/1/x=1 2+%~\u00e9", "x/y,z;(1)'!*@:&$.json", "commits/00000.json")
REGION: dict[str, Any] = {"region_name": "eu-central-1"}
HERE = {"endpoint_url": "http://127.0.0.1:1"}
CLIENTS: dict[str, dict[str, Any]] = {
    "version 2": {},
    "version 2 elsewhere": HERE,
    "version 4": {"client_kwargs": REGION},
    "version 4 elsewhere": {"client_kwargs": REGION, **HERE},
    "bucket in the host": {
        "client_kwargs": REGION,
        "config_kwargs": {"signature_version": "s3v4", "s3": {"addressing_style": "virtual"}},
    },
    "version 2, bucket in the host": {"config_kwargs": {"s3": {"addressing_style": "virtual"}}},
}


def _store(**options: Any) -> Any:
    key = {"key": "user", "secret": "sec/ret+", "skip_instance_cache": True}
    return fsspec.filesystem("s3", **key, **options)


def _counted(fs: Any, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that botocore signs from here on."""
    asked: list[str] = []
    real = fs.url

    def url(path: str, **how: Any) -> str:
        asked.append(path)
        return str(real(path, **how))

    monkeypatch.setattr(fs, "url", url)
    return asked


@pytest.mark.parametrize("token", [{}, {"token": "to/k+en=="}], ids=["", "session"])
@pytest.mark.parametrize("options", CLIENTS.values(), ids=CLIENTS.keys())
def test_urls_are_botocores_to_the_letter(
    options: dict[str, Any], token: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fs = _store(**options, **token)
    asked = _counted(fs, monkeypatch)
    for _ in range(3):  # both within one second
        urls, begin = SignedUrls(fs), int(time.time())
        asked.clear()
        made = [urls.url(f"corpus/{key}") for key in KEYS]
        assert asked == [f"corpus/{KEYS[0]}"]
        wanted = [fs.url(f"corpus/{key}", expires=VALID_S) for key in KEYS]
        if int(time.time()) == begin:
            break
    assert made == wanted


def test_another_secret_makes_another_url() -> None:
    for options in CLIENTS.values():
        url = str(_store(**options).url("corpus/a", expires=VALID_S))
        assert signer_like(url, "corpus", "a", "sec/ret+")("a") == url
        assert signer_like(url, "corpus", "a", "another")("a") != url
    with pytest.raises(ValueError, match="expected a signed URL"):
        signer_like("http://127.0.0.1/corpus/a?x=1", "corpus", "a", "secret")


def test_botocore_signs_all_where_its_url_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    fs = _store()
    asked = _counted(fs, monkeypatch)
    monkeypatch.setattr(signed_urls, "signer_like", lambda *_: lambda key: "another")
    urls = SignedUrls(fs)
    made = [urls.url(f"corpus/{key}") for key in ("a", "b", "a", "b")]
    assert asked == ["corpus/a", "corpus/b"]
    assert made[:2] == made[2:]
    assert "/b?" in made[1]


def test_a_signature_is_not_used_for_longer_than_it_is_valid(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert max(LIKE_S, USED_S) < VALID_S
    fs = _store()
    asked, urls, now = _counted(fs, monkeypatch), SignedUrls(fs), time.monotonic()
    clock = [now]
    monkeypatch.setattr(signed_urls.time, "monotonic", lambda: clock[0])
    assert urls.url("corpus/a") == urls.url("corpus/a")
    assert asked == ["corpus/a"]
    clock[0] = now + LIKE_S
    urls.url("corpus/b")
    urls.url("corpus/a")
    assert asked == ["corpus/a", "corpus/b"]
    urls.forget()
    urls.url("corpus/a")
    assert asked == ["corpus/a", "corpus/b", "corpus/a"]
    # Versions of objects are not part of a path that is signed.
    urls.url("corpus/a?versionId=1")
    assert len(asked) == 4
