"""Checks of the network between silo and server; no check sends more than a handshake or a simple GET request."""

from __future__ import annotations

import http.client
import ssl
import time
from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path

from fedsync.common.proxies import ProxyRefused, Way, split
from fedsync.extras.doctor.machine_checks import Check, guarded, judge_expiry
from fedsync.identity.certificates import (
    CertificateReplaced,
    certificate_facts,
    prove_server,
    read_certificate,
    shown_certificate,
    trusting,
)

TIMEOUT_S = 5.0
MOST_SKEW_S = 60.0
"""Maximum clock skew; only new certificates tolerate an hour, because ``fedsync certs`` backdates them."""


def check_reachable(way: Way) -> Check:
    """Check that the server's address accepts connections, and measure the round-trip time."""
    times = []
    try:
        for _ in range(3):
            begin = time.perf_counter()
            way.connect(TIMEOUT_S).close()
            times.append(time.perf_counter() - begin)
    except ProxyRefused as error:
        return Check("server", False, f"{way}: {error}", error.remedy)
    except OSError as error:
        remedy = "Check the address, that the server runs, and the firewalls between"
        return Check("server", False, f"{way}: {error.strerror or error}", remedy)
    through = "" if way.proxy is None else f" through the proxy {way.proxy}"
    return Check("server", True, f"{way}{through}, round trip {1000 * min(times):.1f} ms")


@guarded("TLS")
def check_tls(way: Way, authority: Path, now: datetime | None = None) -> Check:
    """Check that the server's certificate is signed by the authority, covers its name, and does not expire soon."""
    try:
        version, facts = prove_server(way, authority, TIMEOUT_S)
        remedy = "Have the server's operator renew its certificate and restart the server"
        covers = f"{version}, the certificate covers {way.host}"
        return judge_expiry("TLS", covers, facts.expires, now or datetime.now(UTC), remedy)
    except ssl.SSLCertVerificationError as error:
        remedy = (
            "Compare ca.crt with the server's; `fedsync doctor --server` shows the hosts and expiry of its certificate"
        )
        return Check("TLS", False, error.verify_message, remedy)
    except (ProxyRefused, CertificateReplaced) as error:
        return Check("TLS", False, str(error), error.remedy)
    except OSError as error:
        return Check("TLS", False, f"{error}", "Check that a SuperLink with TLS listens there")


@guarded("served")
def check_served(address: str, certificate: Path, now: datetime, *, running: bool) -> Check:
    """Check that a running server presents the certificate that is on disk."""
    if not running:
        return Check("served", True, "not running")
    shown = shown_certificate(Way(*split(address)), TIMEOUT_S)
    if shown is None:
        return Check("served", False, f"no certificate is shown at {address}", "See superlink.log")
    facts, remedy = certificate_facts(shown), "Restart `fedsync server start`; runs go on"
    if facts.fingerprint != read_certificate(certificate).fingerprint:
        detail = f"silos are shown another certificate than {certificate}: until {facts.expires:%Y-%m-%d %H:%M}"
        return Check("served", False, detail, remedy)
    return judge_expiry("served", "the certificate on the disk", facts.expires, now, "Renew it, then restart")


@guarded("clock")
def check_clock(way: Way, authority: Path, clock: Callable[[], float]) -> Check:
    """Compare this machine's clock with the ``Date`` header of a server response, which has whole seconds."""
    trust = trusting(authority)
    try:
        with way.connect(TIMEOUT_S) as raw, trust.wrap_socket(raw, server_hostname=way.host) as secured:
            connection = http.client.HTTPConnection(way.host, way.port)
            connection.sock = secured
            before_s = clock()
            connection.request("GET", "/health")
            date = connection.getresponse().getheader("Date")
            after_s = clock()
        if date is None:
            return Check("clock", True, "the server does not say what time it is")
        there_s = parsedate_to_datetime(date).timestamp()
    except (OSError, http.client.HTTPException, ValueError) as error:
        return Check("clock", False, f"no answer to compare with: {error}", "See the lines above")
    return judge_skew(there_s, before_s, after_s)


def judge_skew(there_s: float, before_s: float, after_s: float) -> Check:
    """Compare the server's time, truncated to whole seconds, with the times of request and response [s]."""
    ahead, behind = before_s - (there_s + 1.0), there_s - after_s
    skew = max(ahead, behind, 0.0)
    if skew <= MOST_SKEW_S:
        return Check("clock", True, f"within {skew + 1.0:.0f} s of the server's")
    way = "ahead of" if ahead > 0 else "behind"
    return Check("clock", False, f"{skew:.0f} s {way} the server's", "Set both clocks, by NTP for example")
