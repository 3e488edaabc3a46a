"""TLS certificates of a federation: its own certificate authority, the server's certificate, and its check by silos.

Every silo gets the authority's certificate and trusts nothing else. The authority's key signs and stays offline. Keys
are ECDSA on P-256.

Source: X.509 version 3 as profiled by RFC 5280; host names as in RFC 6125 (subject alternative names only).
"""

from __future__ import annotations

import ipaddress
import re
import ssl
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fedsync.common.errors import ConfigError
from fedsync.common.files import ANYBODY_FILE, private_folder, read_private, write_atomically, write_private
from fedsync.common.foreign import shown
from fedsync.common.proxies import ProxyRefused, Way

AUTHORITY_DAYS = 3650
SERVER_DAYS = 365
MAX_DAYS = 36_500

_LOCAL = ("localhost", "127.0.0.1")
_LABEL = r"[A-Za-z0-9](?:[A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
_HOST = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_MAX_HOST = 253
_NUMBERS = re.compile(r"[0-9.]+")
# Clocks differ; a new certificate must be valid on all machines at once.
_SKEW = timedelta(hours=1)
_MAX_KEY_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class Authority:
    """Files of the federation's authority, PEM: a public certificate for every silo, and the secret signing key."""

    certificate: Path
    key: Path

    @classmethod
    def at(cls, folder: Path) -> Authority:
        return cls(folder / "ca.crt", folder / "ca.key")


@dataclass(frozen=True, slots=True)
class ServerCertificate:
    """Files of the server for TLS, PEM: its public certificate, and its secret key."""

    certificate: Path
    key: Path

    @classmethod
    def at(cls, folder: Path) -> ServerCertificate:
        return cls(folder / "server.pem", folder / "server.key")


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """Contents of a certificate: common name, covered hosts, end of validity (UTC), and SHA-256 (hexadecimal).
    ``authority``: it may sign other certificates.
    """

    subject: str
    hosts: tuple[str, ...]
    expires: datetime
    authority: bool
    fingerprint: str = ""


def make_authority(
    folder: Path, name: str = "FedSync authority", days: int = AUTHORITY_DAYS, now: datetime | None = None
) -> Authority:
    """Make an authority for one federation, in a folder that is created with mode 0700 if missing. `ConfigError` if the
    folder already has an authority, or is unsuitable.
    """
    private_folder(folder)
    authority = Authority.at(folder)
    if authority.key.exists() or authority.certificate.exists():
        problem = "there is an authority here already"
        raise ConfigError(str(folder), problem, "Use another folder; `fedsync certs init --renew` keeps the authority")
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(name)
    builder = _builder(subject, subject, key.public_key(), days, now)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_usage(signs_certificates=True), critical=True)
    write_private(authority.key, _private_pem(key))
    write_atomically(authority.certificate, _pem(builder.sign(key, hashes.SHA256())), ANYBODY_FILE)
    return authority


def check_hosts(hosts: Iterable[str]) -> list[x509.GeneralName]:
    """Return host names and IP addresses in certificate form, in order, unique; `ConfigError` for others."""
    return [_host(host) for host in dict.fromkeys(hosts)]


def check_days(days: int, most: int = MAX_DAYS) -> None:
    if not 1 <= days <= most:
        raise ConfigError("--days", f"{days} days", f"Give a number from 1 to {most}")


def make_server_certificate(
    authority: Authority, hosts: Iterable[str], folder: Path, days: int = SERVER_DAYS, now: datetime | None = None
) -> ServerCertificate:
    """Make or renew the server's key and certificate, in a folder that is created with mode 0700 if missing. ``hosts``
    are the names and IP addresses of the server for silos; ``localhost`` and 127.0.0.1 are added. `ConfigError` for an
    invalid host, if the authority expires first, or if its files or the folder are unsuitable.
    """
    names = check_hosts((*hosts, *_LOCAL))
    issuer, issuer_key = _load(authority)
    private_folder(folder)
    key = ec.generate_private_key(ec.SECP256R1())
    builder = _builder(_name("FedSync server"), issuer.subject, key.public_key(), days, now)
    if (now or datetime.now(UTC)) + timedelta(days=days) > issuer.not_valid_after_utc:
        problem = f"the authority itself expires on {issuer.not_valid_after_utc:%Y-%m-%d}"
        raise ConfigError("--days", problem, "Give fewer days, or make another authority in another folder")
    extensions: tuple[tuple[x509.ExtensionType, bool], ...] = (
        (x509.BasicConstraints(ca=False, path_length=None), True),
        (_usage(signs_certificates=False), True),
        (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
        (x509.SubjectAlternativeName(names), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), False),
    )
    for extension, critical in extensions:
        builder = builder.add_extension(extension, critical)
    server = ServerCertificate.at(folder)
    write_private(server.key, _private_pem(key))
    write_atomically(server.certificate, _pem(builder.sign(issuer_key, hashes.SHA256())), ANYBODY_FILE)
    return server


def read_certificate(path: Path) -> CertificateFacts:
    return certificate_facts(_certificate(path))


def certificate_facts(certificate: x509.Certificate) -> CertificateFacts:
    hosts, authority = tuple[str, ...](), False
    for value in (each.value for each in certificate.extensions):
        if isinstance(value, x509.SubjectAlternativeName):
            hosts = (*value.get_values_for_type(x509.DNSName), *map(str, value.get_values_for_type(x509.IPAddress)))
        elif isinstance(value, x509.BasicConstraints):
            authority = value.ca
    subject = certificate.subject.get_attributes_for_oid(NameOID.COMMON_NAME)
    name = str(subject[0].value) if subject else certificate.subject.rfc4514_string()
    fingerprint = certificate.fingerprint(hashes.SHA256()).hex()
    return CertificateFacts(name, hosts, certificate.not_valid_after_utc, authority, fingerprint)


def check_server_certificate(authority: Path, server: ServerCertificate, host: str = _LOCAL[0]) -> None:
    """Raise `ConfigError` unless key, certificate and authority belong together, and the certificate covers a host."""
    certificate = _certificate(server.certificate)
    remedy = "Make it again with `fedsync certs init --renew`"
    if certificate.public_key() != _private_key(server.key, remedy).public_key():
        raise ConfigError(str(server.certificate), f"does not belong to the key {server.key}", remedy)
    try:
        certificate.verify_directly_issued_by(_certificate(authority))
    except (ValueError, TypeError, InvalidSignature):
        raise ConfigError(str(server.certificate), f"was not signed by {authority}", remedy) from None
    name, covered = str(_host(host).value), {each.lower() for each in certificate_facts(certificate).hosts}
    if not covered & {name, f"*.{name.partition('.')[2]}"}:
        problem = f"does not cover {name}, where this machine's own processes reach the server"
        raise ConfigError(str(server.certificate), problem, f"{remedy}, and --host {name} besides its other hosts")


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int, now: datetime | None
) -> x509.CertificateBuilder:
    check_days(days)
    begin = now or datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(begin - _SKEW)
        .not_valid_after(begin + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
    others = ("content_commitment", "key_encipherment", "data_encipherment", "key_agreement")
    unused = dict.fromkeys((*others, "encipher_only", "decipher_only"), False)
    signs = signs_certificates
    return x509.KeyUsage(digital_signature=not signs, key_cert_sign=signs, crl_sign=signs, **unused)


def _host(host: str) -> x509.GeneralName:
    with suppress(ValueError):
        return x509.IPAddress(ipaddress.ip_address(host))
    # A numeric name that is no valid address would never match.
    if len(host) > _MAX_HOST or not _HOST.fullmatch(host) or _NUMBERS.fullmatch(host):
        remedy = "Give a name such as fl.example.org, or an IP address, without a port"
        raise ConfigError("--host", f"{host[:80]!r} is neither a host name nor an address", remedy)
    return x509.DNSName(host.lower())


def _load(authority: Authority) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    remedy = "Put ca.crt and ca.key of one authority back; if ca.key is lost, make another authority in another folder"
    certificate, key = _certificate(authority.certificate, remedy), _private_key(authority.key, remedy)
    if certificate.public_key() != key.public_key():
        raise ConfigError(str(authority.certificate), f"does not belong to the key {authority.key}", remedy)
    return certificate, key


def _certificate(path: Path, remedy: str = "Make it with `fedsync certs init`") -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except OSError as error:
        problem = f"cannot be read: {error.strerror}"
    except ValueError:
        problem = "not a certificate in PEM form"
    raise ConfigError(str(path), problem, remedy)


def _private_key(path: Path, remedy: str) -> ec.EllipticCurvePrivateKey:
    data = read_private(path, _MAX_KEY_BYTES, remedy)
    try:
        key = serialization.load_pem_private_key(data, None)
    except (ValueError, TypeError):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigError(str(path), "not an elliptic-curve key in PEM form", remedy)
    return key


def _private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )


def _pem(certificate: x509.Certificate) -> bytes:
    return certificate.public_bytes(serialization.Encoding.PEM)


_UNKNOWN_ISSUER = {2, 18, 19, 20, 21}  # OpenSSL's error codes of a chain without a trusted root


class CertificateReplaced(OSError):
    """Error: the peer's certificate was signed by another authority than the federation's."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def prove_server(way: Way, authority: Path, timeout_s: float) -> tuple[str, CertificateFacts]:
    """Connect, and verify that the authority signed the certificate for the host name; return TLS version and contents.

    Raises:
        ConfigError: the authority's certificate cannot be read.
        ProxyRefused: a proxy refuses the connection.
        CertificateReplaced: a proxy presents its own certificate.
        OSError: the server does not answer, or not with TLS; `ssl.SSLCertVerificationError` for an invalid certificate.
    """
    trust = trusting(authority)
    try:
        with way.connect(timeout_s) as raw, trust.wrap_socket(raw, server_hostname=way.host) as secured:
            certificate = x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
            return str(secured.version()), certificate_facts(certificate)
    except ssl.SSLCertVerificationError as error:
        other = shown_certificate(way, timeout_s) if error.verify_code in _UNKNOWN_ISSUER else None
        issuer = None if other is None else other.issuer
        if issuer is None or issuer == x509.load_pem_x509_certificate(authority.read_bytes()).subject:
            raise  # perhaps another federation's server: authorities share a default name
        through = "a proxy between" if way.proxy is None else f"a proxy between ({way.proxy}, or one behind it)"
        remedy = f"Have its operator pass TLS to {way} unchanged; silos trust only the federation's authority"
        if way.proxy is None:
            remedy += ". If no proxy is there, another server has the address"
        name = shown(issuer.rfc4514_string(), 200)
        raise CertificateReplaced(f"{through} replaces the certificate: issuer {name}", remedy) from error


def trusting(authority: Path) -> ssl.SSLContext:
    """Return a context that trusts only this certificate; `ConfigError` if the file cannot be read."""
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # an SSLError is one
        problem = f"no certificate can be read from it: {error.strerror or error}"
        raise ConfigError(str(authority), problem, "Fetch ca.crt anew from the server's operator") from None


def what_is_between(way: Way, authority: Path, timeout_s: float) -> str | None:
    """Return the problem and remedy if a proxy blocks the way to the server; None if there is no proxy or no answer."""
    try:
        prove_server(way, authority, timeout_s)
    except (ProxyRefused, CertificateReplaced) as error:
        return f"{error}. {error.remedy}"
    except (OSError, ConfigError):
        pass
    return None


def shown_certificate(way: Way, timeout_s: float) -> x509.Certificate | None:
    """Return the peer's unverified certificate; no data are sent to the peer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with way.connect(timeout_s) as raw, context.wrap_socket(raw, server_hostname=way.host) as secured:
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None
