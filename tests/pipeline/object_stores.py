"""Places on loopback that speak as S3, Google and Azure do, each with its options.

`make test-stores` puts fake-gcs-server and Azurite in the place of our stand-ins, by the variables
below.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import fsspec
from google.oauth2.credentials import Credentials
from werkzeug.serving import make_server

from earmill.pipeline.storage.layout import Layout
from tests.pipeline.azure_stand_in import ACCOUNT, KEY, AzureStandIn
from tests.pipeline.gcs_stand_in import GcsStandIn
from tests.pipeline.outages import FaultyStore, s3_store

REAL_GCS = os.environ.get("EARMILL_TEST_GCS", "")
REAL_AZURE = os.environ.get("EARMILL_TEST_AZURE", "")
# Stores through obstore, and through the fsspec clients that stand in for it.
KINDS = ("s3", "gs", "abfs", "s3fs", "gcsfs", "adlfs")


@dataclass(frozen=True)
class Place:
    """A store.

    Args:
        uri: Of its bucket. options: What leads there. secrets: What may be written down nowhere.
        faults: In front of it; None where it is not ours. server: Our stand-in.
    """

    uri: str
    options: dict[str, Any]
    secrets: tuple[str, ...] = ()
    faults: FaultyStore | None = None
    server: Any = None

    def layout(self, folder: str) -> Layout:
        return Layout.open(f"{self.uri}/{folder}", self.options)


@contextmanager
def serving(app: Callable[..., Any]) -> Iterator[str]:
    """A WSGI application on loopback; yields its address."""
    server = make_server("127.0.0.1", 0, app, threaded=True)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def store_of(kind: str) -> Iterator[Place]:
    """The store for one of `KINDS`."""
    with ExitStack() as stack:
        if kind in ("s3", "s3fs"):
            faults, options = stack.enter_context(s3_store())
            place = Place("s3://corpus", options, ("hush",), faults)
            only_fsspec = {"s3_additional_kwargs": {}}
        elif kind in ("gs", "gcsfs"):
            place = _google(stack)
            only_fsspec = {"token": "anon"}  # with an endpoint: taken for an emulator
        else:
            place = _azure(stack)
            only_fsspec = {"max_concurrency": 4}
        is_fsspec = kind in ("s3fs", "gcsfs", "adlfs")
        yield replace(place, options=place.options | only_fsspec) if is_fsspec else place


def _google(stack: ExitStack) -> Place:
    if REAL_GCS:
        return Place("gs://out", _made("gs", {"endpoint_url": REAL_GCS, "token": "anon"}))
    server = GcsStandIn()
    faults = FaultyStore(server)
    options = {"endpoint_url": stack.enter_context(serving(faults)), "project": "p-hush"}
    options["token"] = Credentials(token="t-hush")
    return Place("gs://out", options, ("p-hush", "t-hush"), faults, server)


def _azure(stack: ExitStack) -> Place:
    if REAL_AZURE:
        return Place("abfs://out", _made("abfs", {"connection_string": REAL_AZURE}), (KEY,))
    server = AzureStandIn()
    faults = FaultyStore(server)
    address = stack.enter_context(serving(faults))
    text = (
        f"DefaultEndpointsProtocol=http;AccountName={ACCOUNT};AccountKey={KEY};"
        f"BlobEndpoint={address}/{ACCOUNT};"
    )
    return Place("abfs://out", {"connection_string": text}, (KEY,), faults, server)


def _made(protocol: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options, once there is a bucket."""
    fs = fsspec.filesystem(protocol, use_listings_cache=False, **options)
    if not fs.exists("out"):
        fs.mkdir("out")
    return options
