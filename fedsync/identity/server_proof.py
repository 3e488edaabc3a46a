"""Whether the server proves that it is the federation's, on the way that a silo goes to it."""

from __future__ import annotations

import ssl
from pathlib import Path

from cryptography import x509

from fedsync.common.errors import ConfigError
from fedsync.common.foreign import shown
from fedsync.common.proxies import ProxyRefused, Way
from fedsync.identity.certificates import CertificateFacts, certificate_facts

_UNKNOWN_ISSUER = {2, 18, 19, 20, 21}
"""OpenSSL's codes of a chain that does not lead to who is trusted."""


class CertificateReplaced(OSError):
    """What answers has a certificate that another authority than the federation's signed.

    Args:
        problem: who did.
        remedy: what the silo's owner can do.
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


def prove_server(way: Way, authority: Path, timeout_s: float) -> tuple[str, CertificateFacts]:
    """Have the server prove that the authority signed for it, under the name it is called by.

    Returns:
        The version of TLS, and the certificate.

    Raises:
        ConfigError: the authority's certificate cannot be read.
        ProxyRefused: a proxy in between passes nothing on.
        CertificateReplaced: a proxy in between shows a certificate of its own.
        ssl.SSLCertVerificationError: it proves something else.
        OSError: nobody answers, or not by TLS.
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
            raise  # also where another federation's server answers: its authority is called as this one
        through = "a proxy between" if way.proxy is None else f"a proxy between ({way.proxy}, or one behind it)"
        remedy = f"Have who runs it pass TLS to {way} on as it is; a silo trusts the federation's authority alone"
        if way.proxy is None:
            remedy += ". If no proxy is there, another server has the address"
        name = shown(issuer.rfc4514_string(), 200)
        raise CertificateReplaced(f"{through} replaces the certificate: issuer {name}", remedy) from error


def trusting(authority: Path) -> ssl.SSLContext:
    """What trusts this certificate alone; raises `ConfigError` where it cannot be read."""
    try:
        return ssl.create_default_context(cafile=str(authority))
    except OSError as error:  # an SSLError is one
        problem = f"no certificate can be read from it: {error.strerror or error}"
        raise ConfigError(str(authority), problem, "Fetch ca.crt anew from the server's operator") from None


def what_is_between(way: Way, authority: Path, timeout_s: float) -> str | None:
    """What keeps a silo from its server, and the remedy, where that is a proxy; None where it is not, or unknown."""
    try:
        prove_server(way, authority, timeout_s)
    except (ProxyRefused, CertificateReplaced) as error:
        return f"{error}. {error.remedy}"
    except (OSError, ConfigError):
        pass
    return None


def shown_certificate(way: Way, timeout_s: float) -> x509.Certificate | None:
    """The certificate that is shown there, unchecked; nothing else is said to whoever shows it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        with way.connect(timeout_s) as raw, context.wrap_socket(raw, server_hostname=way.host) as secured:
            return x509.load_der_x509_certificate(secured.getpeercert(binary_form=True) or b"")
    except (OSError, ValueError):
        return None
