"""Proof of the server's identity over the connection that a silo uses."""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509

from fedsync.common.errors import ConfigError
from fedsync.common.foreign import shown
from fedsync.common.proxies import ProxyRefused, Way
from fedsync.identity.certificates import CertificateFacts, certificate_facts

_UNKNOWN_ISSUER = {2, 18, 19, 20, 21}
"""OpenSSL's error codes of a chain without a trusted root."""


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
        remedy = f"Have who runs it pass TLS to {way} on as it is; a silo trusts the federation's authority alone"
        if way.proxy is None:
            remedy += ". If no proxy is there, another server has the address"
        name = shown(issuer.rfc4514_string(), 200)
        raise CertificateReplaced(f"{through} replaces the certificate: issuer {name}", remedy) from error


def trusting(authority: Path) -> ssl.SSLContext:
    """Return a context that trusts only this certificate; raises `ConfigError` if the file cannot be read."""
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
