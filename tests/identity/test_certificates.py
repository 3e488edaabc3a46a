"""Certificates, over real TLS connections on loopback."""

import socket
import ssl
import stat
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.identity.certificates import (
    Authority,
    ServerCertificate,
    check_server_certificate,
    make_authority,
    make_server_certificate,
    read_certificate,
)

NOW = datetime.now(UTC)


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return make_authority(tmp_path_factory.mktemp("ca") / "own")


@pytest.fixture(scope="module")
def server(authority: Authority) -> ServerCertificate:
    return make_server_certificate(authority, ["fl.example.org", "10.1.2.3", "::1"], authority.key.parent)


def shake_hands(server: ServerCertificate, trusted: Path, host: str) -> str:
    """What a client that trusts an authority reads from a server that it knows as ``host``."""
    here = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    here.load_cert_chain(server.certificate, server.key)
    there = ssl.create_default_context(cafile=str(trusted))
    there.verify_flags |= ssl.VERIFY_X509_STRICT
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(10)
                try:
                    with here.wrap_socket(connection, server_side=True) as secure:
                        secure.sendall(b"hello")
                except OSError:
                    pass  # The client refused; it says why.

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            with (
                socket.create_connection(listener.getsockname(), timeout=10) as plain,
                there.wrap_socket(plain, server_hostname=host) as secure,
            ):
                return secure.recv(10).decode()
        finally:
            thread.join()


@pytest.mark.parametrize("host", ["fl.example.org", "FL.example.org", "10.1.2.3", "::1", "localhost", "127.0.0.1"])
def test_a_silo_that_trusts_the_authority_reaches_every_host(
    authority: Authority, server: ServerCertificate, host: str
) -> None:
    assert shake_hands(server, authority.certificate, host) == "hello"


@pytest.mark.parametrize("host", ["example.org", "evil.fl.example.org", "10.1.2.4", "fl.example.org.evil"])
def test_another_host_is_refused(authority: Authority, server: ServerCertificate, host: str) -> None:
    with pytest.raises(ssl.SSLCertVerificationError, match=r"[Hh]ostname mismatch|IP address mismatch"):
        shake_hands(server, authority.certificate, host)


def test_another_authority_is_refused_though_it_has_the_same_name(server: ServerCertificate, tmp_path: Path) -> None:
    other = make_authority(tmp_path / "other")
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(server, other.certificate, "localhost")
    with pytest.raises(ConfigError, match="was not signed by"):
        check_server_certificate(other.certificate, server)


def test_an_expired_certificate_and_one_from_the_future_are_refused(authority: Authority, tmp_path: Path) -> None:
    expired = make_server_certificate(authority, [], tmp_path / "a", days=30, now=NOW - timedelta(days=31))
    with pytest.raises(ssl.SSLCertVerificationError, match="expired"):
        shake_hands(expired, authority.certificate, "localhost")
    early = make_server_certificate(authority, [], tmp_path / "b", days=30, now=NOW + timedelta(days=1))
    with pytest.raises(ssl.SSLCertVerificationError, match="not yet valid"):
        shake_hands(early, authority.certificate, "localhost")


def test_a_server_certificate_signs_no_other(authority: Authority, server: ServerCertificate, tmp_path: Path) -> None:
    usurper = make_server_certificate(Authority(server.certificate, server.key), ["localhost"], tmp_path / "u", days=1)
    chain = tmp_path / "chain.pem"
    chain.write_bytes(usurper.certificate.read_bytes() + server.certificate.read_bytes())
    with pytest.raises(ssl.SSLCertVerificationError):
        shake_hands(ServerCertificate(chain, usurper.key), authority.certificate, "localhost")


def test_a_renewed_certificate_needs_no_new_authority_at_the_silos(authority: Authority, tmp_path: Path) -> None:
    first = make_server_certificate(authority, ["a.example"], tmp_path / "s")
    before = first.certificate.read_bytes()
    renewed = make_server_certificate(authority, ["b.example"], tmp_path / "s")
    assert renewed == first and renewed.certificate.read_bytes() != before
    assert shake_hands(renewed, authority.certificate, "b.example") == "hello"
    assert [stat.S_IMODE(path.stat().st_mode) for path in (authority.key, renewed.key)] == [0o600, 0o600]
    renewed.key.chmod(0o640)
    with pytest.raises(ConfigError, match="chmod 600"):
        check_server_certificate(authority.certificate, renewed)


def test_what_certificates_say(authority: Authority, server: ServerCertificate) -> None:
    own, servers = read_certificate(authority.certificate), read_certificate(server.certificate)
    assert (own.authority, own.hosts, servers.authority) == (True, (), False)
    assert set(servers.hosts) == {"fl.example.org", "10.1.2.3", "::1", "localhost", "127.0.0.1"}
    now = datetime.now(UTC)
    assert (servers.expires - now) / timedelta(days=1) == pytest.approx(365, abs=0.1)
    assert (own.expires - now) / timedelta(days=1) == pytest.approx(3650, abs=0.01)
    check_server_certificate(authority.certificate, server)


@pytest.mark.parametrize("host", ["", "a b", "host:9092", "1.2.3", "300.1.1.1", "-a.org", "a..b", "*.org", "a" * 64])
def test_what_is_no_host_is_refused(authority: Authority, tmp_path: Path, host: str) -> None:
    with pytest.raises(ConfigError, match="neither a host name nor an address"):
        make_server_certificate(authority, [host], tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_an_authority_is_not_overwritten_nor_outlived(authority: Authority, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="authority here already"):
        make_authority(authority.key.parent)
    with pytest.raises(ConfigError, match="the authority itself expires"):
        make_server_certificate(authority, [], tmp_path / "s", days=3651)
    with pytest.raises(ConfigError, match="0 days"):
        make_server_certificate(authority, [], tmp_path / "s", days=0)


def test_damaged_files_are_named(authority: Authority, server: ServerCertificate, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_certificate(tmp_path / "none")
    (tmp_path / "x").write_bytes(server.certificate.read_bytes()[:200])
    with pytest.raises(ConfigError, match="not a certificate"):
        read_certificate(tmp_path / "x")
    mixed = Authority(authority.certificate, server.key)
    with pytest.raises(ConfigError, match="does not belong to the key"):
        make_server_certificate(mixed, [], tmp_path / "s")
    with pytest.raises(ConfigError, match="does not belong to the key"):
        check_server_certificate(authority.certificate, ServerCertificate(server.certificate, authority.key))
    for host in ("127.0.0.1", "LOCALHOST", "fl.example.org"):
        check_server_certificate(authority.certificate, server, host)
    damaged = Authority.at(authority.key.parent / "d")
    damaged.key.parent.mkdir(mode=0o700)
    damaged.certificate.write_bytes(authority.certificate.read_bytes())
    damaged.key.write_bytes(b"nonsense")
    damaged.key.chmod(0o600)
    with pytest.raises(ConfigError, match="not an elliptic-curve key"):
        make_server_certificate(damaged, [], tmp_path / "s")
