"""Which way leads to a server, and that Flower's HTTP client is told to go the same."""

import itertools
import os
from collections.abc import Iterator

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.proxies import DIRECT, Proxy, ProxyRefused, Way, proxied, unproxied, way_to
from tests.proxy import as_httpx_goes, proxy

SERVER, URL = "fl.example.org:9092", "http://proxy.example.org:3128"
THROUGH = Proxy("proxy.example.org", 3128)


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in list(os.environ):
        if name.lower().endswith("_proxy"):
            monkeypatch.delenv(name)
    yield


@pytest.mark.parametrize(
    ("excepted", "through"),
    [
        ("", True),
        ("example.org", False),
        (".example.org", False),
        ("*.example.org", False),
        ("FL.example.org", False),
        ("fl.example.org:9092", False),
        ("fl.example.org:443", True),
        ("ample.org, other.org", True),
        ("*", False),
        ("other.org,10.0.0.0/8", True),
    ],
)
def test_the_environment_names_proxy_and_exempt(excepted: str, through: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HTTPS_PROXY": URL, "NO_PROXY": excepted}
    way = way_to(SERVER, variables)
    assert way.proxy == (THROUGH if through else None)
    told = {**variables, **proxied(way, variables)}
    assert as_httpx_goes(told, f"https://{SERVER}", monkeypatch) == (str(THROUGH) if through else None)


def test_addresses_and_networks_are_excepted(monkeypatch: pytest.MonkeyPatch) -> None:
    for address in ("10.1.2.3:9092", "[fd00::7]:9092"):
        variables = {"https_proxy": URL, "no_proxy": "10.0.0.0/8,fd00::/16"}
        assert way_to(address, variables).proxy is None
        told = {**variables, **proxied(way_to(address, variables), variables)}
        assert as_httpx_goes(told, f"https://{address}", monkeypatch) is None
    assert way_to("11.1.2.3:9092", variables).proxy == THROUGH


@pytest.mark.slow
@pytest.mark.parametrize("address", ["localhost:9092", "127.0.0.1:9092", "[::1]:9092", "127.0.0.2:9092"])
@pytest.mark.parametrize("named", [None, URL])
def test_no_proxy_leads_to_this_machine(address: str, named: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HTTPS_PROXY": URL, "HTTP_PROXY": URL, "ALL_PROXY": URL}
    way = way_to(address, variables, named)
    assert way.proxy is None
    for scheme in ("http", "https"):
        assert as_httpx_goes({**variables, **proxied(way, variables)}, f"{scheme}://{address}", monkeypatch) is None
    # A silo's way to its server leads through the proxy; calls on its own machine do not.
    told = {**variables, **proxied(way_to(SERVER, variables), variables)}
    assert as_httpx_goes(told, f"https://{SERVER}", monkeypatch) == str(THROUGH)
    if address != "127.0.0.2:9092":
        assert as_httpx_goes(told, f"https://{address}", monkeypatch) is None
        assert as_httpx_goes({**variables, **unproxied(variables)}, f"http://{address}", monkeypatch) is None


def test_the_owners_word_goes_before_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HTTPS_PROXY": "http://other:1", "NO_PROXY": "fl.example.org,paris.org"}
    way = way_to(SERVER, variables, URL)
    assert way.proxy == THROUGH
    told = {**variables, **proxied(way, variables)}
    assert as_httpx_goes(told, f"https://{SERVER}", monkeypatch) == str(THROUGH)
    assert as_httpx_goes(told, "https://paris.org", monkeypatch) is None
    direct = way_to(SERVER, {"HTTPS_PROXY": URL}, DIRECT)
    assert direct.proxy is None
    told = {"HTTPS_PROXY": URL, **proxied(direct, {"HTTPS_PROXY": URL})}
    assert as_httpx_goes(told, f"https://{SERVER}", monkeypatch) is None


def test_without_a_proxy_nothing_is_told() -> None:
    assert unproxied({"PATH": "/bin"}) == {} and proxied(Way("fl.example.org", 1), {"PATH": "/bin"}) == {}
    assert way_to(SERVER, {"HTTPS_PROXY": URL, "https_proxy": ""}).proxy is None, "small letters win"
    assert way_to(SERVER, {"ALL_PROXY": URL}).proxy == THROUGH


def test_a_proxy_that_nobody_can_use_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("socks5://p:1", "https://p:1", "http://", "http://p:port"):
        with pytest.raises(ConfigError, match="HTTPS_PROXY in the environment: not an HTTP proxy"):
            way_to(SERVER, {"HTTPS_PROXY": text})
    # Flower's client would fail, also for calls on this machine.
    for name, text in itertools.product(("all_proxy", "HTTPS_PROXY", "http_proxy"), ("socks5://p:1", "x://", "p:port")):
        variables = {name: text}
        assert as_httpx_goes({**variables, **unproxied(variables)}, "http://127.0.0.1:1", monkeypatch) is None
    for excepted in ("[::1]", "[fd00::7]:9092,other.org", "fd00::/8", "host:port", "ü.de", "::1,host:80"):
        variables = {"HTTPS_PROXY": URL, "NO_PROXY": excepted}
        assert as_httpx_goes({**variables, **unproxied(variables)}, "https://127.0.0.1:1", monkeypatch) is None
    assert unproxied({"HTTPS_PROXY": "https://p:1"}).keys() == {"no_proxy", "NO_PROXY"}, "for downloads of a task"


def test_a_password_is_used_and_never_shown() -> None:
    with proxy(user="anna:s p:ß", status="") as through:
        named = through.url.replace("http://", "http://anna:s%20p%3A%C3%9F@")
        way = way_to(SERVER, {"HTTPS_PROXY": named})
        assert "anna" not in repr(way) and way.proxy is not None and way.proxy.credentials == "anna:s p:ß"
        way.connect(5.0).close()
        assert proxied(way, {})["https_proxy"] == named, "Flower's client is told them"


@pytest.mark.parametrize(
    ("status", "says", "remedy"),
    [
        ("407 Proxy Authentication Required", "requires a user and a password", "HTTPS_PROXY=http://USER:PASSWORD@"),
        ("403 Forbidden", "refuses to connect to fl.example.org:9092 (403 Forbidden)", "allow CONNECT"),
        ("502 Bad Gateway", "cannot reach fl.example.org:9092", "that the server runs"),
        ("junk", "does not answer as an HTTP proxy does", "allow CONNECT"),
    ],
)
def test_each_refusal_is_a_sentence_with_a_remedy(status: str, says: str, remedy: str) -> None:
    with proxy(status=status) as through:
        way = way_to(SERVER, {"HTTPS_PROXY": through.url})
        with pytest.raises(ProxyRefused) as caught:
            way.connect(5.0)
    assert says in str(caught.value) and remedy in caught.value.remedy
    assert through.asked == ["CONNECT fl.example.org:9092 HTTP/1.1"]
    with pytest.raises(ProxyRefused, match="does not answer"):
        way.connect(5.0)
