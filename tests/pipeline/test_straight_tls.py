"""Ranges past s3fs over TLS: the same bytes where the certificate is trusted, none where not."""

from __future__ import annotations

import ssl
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from earmill.pipeline.storage.straight_ranges import _Way
from tests.pipeline.test_straight_ranges import CONTENT, Server, Urls, parts_read, serving


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of 127.0.0.1, signed by itself; with its key in one file."""
    key, now = ec.generate_private_key(ec.SECP256R1()), datetime.now(UTC)
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "127.0.0.1")])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(
            x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False
        )
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    pem, plain = serialization.Encoding.PEM, serialization.NoEncryption()
    path = tmp_path_factory.mktemp("tls") / "certificate.pem"
    secret = key.private_bytes(pem, serialization.PrivateFormat.PKCS8, plain)
    path.write_bytes(secret + made.public_bytes(pem))
    return path


@pytest.fixture
def server(certificate: Path) -> Iterator[Server]:
    """Answers over TLS."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with serving() as started:
        started.socket = context.wrap_socket(started.socket, server_side=True)
        started.scheme = "https"
        yield started


def test_parts_come_over_one_connection(server: Server, certificate: Path) -> None:
    way = _Way(Urls(server), certificates=str(certificate))
    for sizes in ([1, 3000, 900_000], [2_000_000], [100, 100]):
        assert parts_read(way, sizes) == len(sizes)
    assert way.whole("bucket/key", len(CONTENT)) == CONTENT.tobytes()
    assert (server.connections, server.requests) == (1, 4)


@pytest.mark.parametrize("behaviour", ["stalls", "breaks off", "busy"])
def test_what_goes_wrong_is_left_to_the_filesystem(
    server: Server, certificate: Path, behaviour: str
) -> None:
    way = _Way(Urls(server), stall_s=0.3, certificates=str(certificate))
    server.behaviour = behaviour
    # Of what breaks off half comes.
    assert parts_read(way, [1000, 2_000_000]) == (0 if behaviour == "busy" else 1)
    assert way._rests_until > 0


def test_a_connection_that_the_store_closed_is_made_anew(server: Server, certificate: Path) -> None:
    way = _Way(Urls(server), certificates=str(certificate))
    server.behaviour = "hangs up"
    assert parts_read(way, [1000]) == parts_read(way, [1000]) == 1
    assert server.connections == 2


def test_a_certificate_that_nobody_vouches_for_is_refused(server: Server) -> None:
    way = _Way(Urls(server))
    assert parts_read(way, [1000]) == 0
    assert server.requests == 0
