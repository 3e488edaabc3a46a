"""HTTP proxies: selection by the environment, and connections through a proxy (CONNECT).

Flower's HTTP client reads the same variables by its own rules. So the code that starts a Flower process sets the
variables, with `proxied` or `unproxied`, to the proxy that this module selects.
"""

from __future__ import annotations

import base64
import ipaddress
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote, urlsplit

import psutil

from fedsync.common.errors import ConfigError
from fedsync.common.foreign import shown

DIRECT = "direct"
"""Value in place of a proxy's address: no proxy, whatever the environment says."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_HEAD = 16384
_AUTHENTICATE = 407
_UNREACHED = {502, 503, 504}


class ProxyRefused(OSError):
    """Failure of a proxy to make a connection."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(problem)
        self.remedy = remedy


@dataclass(frozen=True, slots=True)
class Proxy:
    """HTTP proxy; ``credentials`` are ``user:password`` or None, and never appear in texts."""

    host: str
    port: int
    credentials: str | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return _joined(self.host, self.port)

    @classmethod
    def parse(cls, text: str, place: str) -> Proxy:
        """Parse ``http://[user:password@]host:port``, ``http://`` optional; else raise `ConfigError` at ``place``."""
        try:
            url = urlsplit(text if "://" in text else f"http://{text}")
            if url.scheme == "http" and url.hostname:
                user = f"{unquote(url.username)}:{unquote(url.password or '')}" if url.username else None
                return cls(url.hostname, url.port or 80, user)
        except ValueError:
            pass
        problem = "not an HTTP proxy, and FedSync supports no other kind"
        raise ConfigError(place, problem, "Write http://HOST:PORT, also for HTTPS connections")


@dataclass(frozen=True, slots=True)
class Way:
    """Route of a silo to its server at ``host`` and ``port``, directly or through ``proxy``."""

    host: str
    port: int
    proxy: Proxy | None = None

    def __str__(self) -> str:
        return _joined(self.host, self.port)

    def connect(self, timeout_s: float) -> socket.socket:
        """Connect to the server; raises `ProxyRefused` if the proxy refuses, and `OSError` if nobody answers."""
        if self.proxy is None:
            return socket.create_connection((self.host, self.port), timeout=timeout_s)
        return _tunnel(self.proxy, str(self), timeout_s)


def way_to(address: str, environment: Mapping[str, str], named: str | None = None) -> Way:
    """Return the route to a TLS server: through the proxy ``named``, else by ``HTTPS_PROXY`` and ``NO_PROXY``.

    A server on this machine is never reached through a proxy. ``address`` is ``host:port``; ``named`` may be `DIRECT`.
    Lower-case variables take precedence. Raises `ConfigError` if the proxy's address is unusable.
    """
    host, port = split(address)
    if named == DIRECT or _here(host):
        return Way(host, port)
    if named is not None:
        return Way(host, port, Proxy.parse(named, "silo.yaml, proxy"))
    for name in ("https_proxy", "all_proxy"):
        found = _variable(environment, name)
        if found and not _excepted(host, port, _variable(environment, "no_proxy")):
            return Way(host, port, Proxy.parse(found, f"{name.upper()} in the environment"))
        if found:
            break
    return Way(host, port)


def split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def unproxied(environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    """Return variables that make HTTP clients reach this machine and ``hosts`` directly; empty without a proxy."""
    given = {name: _variable(environment, name) for name in ("http_proxy", "https_proxy", "all_proxy")}
    if not any(given.values()):
        return {}
    listed = [each.strip() for each in _variable(environment, "no_proxy").split(",")]
    # Flower's client fails on IPv6 networks or addresses in brackets, and on unusable proxies, even in direct calls.
    plain = [each for each in listed if each and each.isascii()]
    known = [each for each in plain if ":" not in each or each.partition(":")[2].isdigit() or _is_address(each)]
    addresses = (address.address for each in psutil.net_if_addrs().values() for address in each)
    own = [address for address in addresses if _is_address(address)]
    told = ",".join(dict.fromkeys([*known, *_LOOPBACK, *own, *hosts]))
    unusable = [name for name, text in given.items() if text and not _usable(text)]
    return {"no_proxy": told, "NO_PROXY": told, **{each: "" for name in unusable for each in (name, name.upper())}}


def _usable(text: str) -> bool:
    try:
        return bool(Proxy.parse(text.replace("https://", "http://", 1), ""))
    except ConfigError:
        return False


def proxied(way: Way, environment: Mapping[str, str], *hosts: str) -> dict[str, str]:
    if way.proxy is None:
        return unproxied(environment, way.host, *hosts)
    user, _, password = (way.proxy.credentials or "").partition(":")
    secret = f"{quote(user, safe='')}:{quote(password, safe='')}@" if way.proxy.credentials else ""
    address = f"http://{secret}{way.proxy}"
    told = {"https_proxy": address, "HTTPS_PROXY": address, "all_proxy": "", "ALL_PROXY": ""}
    kept = [each for each in _variable(environment, "no_proxy").split(",") if not _excepted(way.host, way.port, each)]
    return {**told, **unproxied({**environment, **told, "no_proxy": ",".join(kept), "NO_PROXY": ""})}


def _tunnel(proxy: Proxy, target: str, timeout_s: float) -> socket.socket:
    try:
        raw = socket.create_connection((proxy.host, proxy.port), timeout=timeout_s)
    except OSError as error:
        problem = f"the proxy {proxy} does not answer: {error.strerror or error}"
        raise ProxyRefused(problem, "Check HTTPS_PROXY, or proxy in silo.yaml, and that the proxy runs") from error
    try:
        known = ""
        if proxy.credentials is not None:
            known = f"Proxy-Authorization: Basic {base64.b64encode(proxy.credentials.encode()).decode()}\r\n"
        raw.sendall(f"CONNECT {target} HTTP/1.1\r\nHost: {target}\r\n{known}\r\n".encode("ascii"))
        _judge(proxy, target, _head(raw))
    except (UnicodeError, TimeoutError) as error:
        raw.close()
        raise ProxyRefused(f"the proxy {proxy} does not answer CONNECT: {error}", _remedy(target)) from error
    except BaseException:
        raw.close()
        raise
    return raw


def _head(raw: socket.socket) -> bytes:
    """Read the head of a response byte by byte: the rest belongs to the server."""
    head = b""
    while not head.endswith(b"\r\n\r\n") and len(head) < _MAX_HEAD:
        byte = raw.recv(1)
        if not byte:
            break
        head += byte
    return head


def _judge(proxy: Proxy, target: str, head: bytes) -> None:
    version, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    if not head.endswith(b"\r\n\r\n") or not version.startswith("HTTP/1.") or not rest[:3].isdigit():
        raise ProxyRefused(f"the proxy {proxy} does not answer as an HTTP proxy does", _remedy(target))
    status, told = int(rest[:3]), shown(rest, 80)
    if 200 <= status < 300:
        return
    if status == _AUTHENTICATE:
        wants = "requires a user and a password" if proxy.credentials is None else "refuses the user and the password"
        raise ProxyRefused(
            f"the proxy {proxy} {wants} ({told})",
            f"Write HTTPS_PROXY=http://USER:PASSWORD@{proxy} into the silo's environment; if it requires NTLM or "
            "Kerberos, put a local proxy that speaks it in between",
        )
    if status in _UNREACHED:
        remedy = f"Check the server's address and that the server runs, and ask the proxy's operator about {target}"
        raise ProxyRefused(f"the proxy {proxy} cannot reach {target} ({told})", remedy)
    raise ProxyRefused(f"the proxy {proxy} refuses to connect to {target} ({told})", _remedy(target))


def _remedy(target: str) -> str:
    return f"Have its operator allow CONNECT to {target}, or add a host with a direct connection to NO_PROXY"


def _here(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower().rstrip(".") == "localhost"


def _excepted(host: str, port: int, listed: str) -> bool:
    name = host.lower()
    for each in (entry.strip().lower() for entry in listed.split(",")):
        bare, _, number = each.rpartition(":")
        if bare and number.isdigit() and not _is_address(each):
            if int(number) != port:
                continue
            each = bare.strip("[]")
        domain = each.removeprefix("*").lstrip(".")
        if each == "*" or (domain and (name == domain or name.endswith(f".{domain}"))) or _within(name, each):
            return True
    return False


def _within(host: str, network: str) -> bool:
    try:
        return ipaddress.ip_address(host) in ipaddress.ip_network(network, strict=False)
    except ValueError:
        return False


def _is_address(text: str) -> bool:
    try:
        return "%" not in text and bool(ipaddress.ip_address(text))
    except ValueError:
        return False


def _variable(environment: Mapping[str, str], name: str) -> str:
    return environment[name] if name in environment else environment.get(name.upper(), "")


def _joined(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
