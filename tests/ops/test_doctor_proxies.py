"""The doctor, a SuperNode and transfers behind a proxy: on their way through it, and what they say if it keeps them."""

import os
import subprocess
from pathlib import Path

import pytest

from fedsync.common.proxies import Way
from fedsync.config.silo_start import SiloStartConfig
from fedsync.core.errors import ConfigError
from fedsync.flower.internals.parcel_client import ParcelClient
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.server_proof import trusting
from fedsync.ops.doctor.checks import Check
from fedsync.ops.doctor.preflight import _check_way
from fedsync.ops.programs import silo_programs, way_to_server
from tests.ops.test_doctor import failed
from tests.proxy import proxy

HOST = "fl.example.org"


@pytest.fixture
def config(certificates: Path, tmp_path: Path) -> SiloStartConfig:
    return SiloStartConfig(
        name="berlin", server=f"{HOST}:9092", authority=str(certificates / "ca.crt"), node_key="/k", state=str(tmp_path)
    )


@pytest.fixture
def inspecting(tmp_path: Path) -> Path:
    """Certificates of a proxy that ends TLS: of its own authority, for the server's name."""
    folder = tmp_path / "inspecting"
    folder.mkdir(mode=0o700)
    make_server_certificate(make_authority(folder, "Example Corp Web Filter"), [HOST], folder)
    return folder


def checked(config: SiloStartConfig) -> dict[str, Check]:
    return {check.name: check for check in _check_way(lambda: way_to_server(config), config.authority)}


def said_by_supernode(config: SiloStartConfig, **environment: str) -> str:
    """What a SuperNode says that ends before Flower's own connection."""
    (program,) = silo_programs(config)
    done = subprocess.run(
        program.command, env={**os.environ, **program.environment, **environment}, capture_output=True, timeout=60
    )
    assert done.returncode == 1
    return done.stderr.decode()


def test_all_goes_through_the_proxy(
    port: int,
    config: SiloStartConfig,
    certificates: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No name service knows the server: only the proxy reaches it."""
    with proxy(to=port, user="anna:secret") as through:
        monkeypatch.setenv("HTTPS_PROXY", through.url.replace("//", "//anna:secret@"))
        found = checked(config)
        assert all(check.ok for check in found.values()), found
        assert f"through the proxy 127.0.0.1:{through.port}" in found["server"].detail
        assert "TLSv1.3" in found["TLS"].detail and "within" in found["clock"].detail
        assert set(through.asked) == {f"CONNECT {HOST}:9092 HTTP/1.1"} and len(through.asked) == 5
        assert "secret" not in str(found)
        line = ParcelClient(config.server, trusting(certificates / "ca.crt"), dict)._line()
        line.request("GET", "/v1/fedsync/parcels")
        assert line.getresponse().status == 200 and len(through.asked) == 6
        line.close()
        (program,) = silo_programs(config)
        assert program.environment["https_proxy"].endswith(f"@127.0.0.1:{through.port}")
        assert not any("secret" in part for part in program.command), "all users can read a command line"


def test_loopback_goes_through_none(
    port: int,
    config: SiloStartConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with proxy(status="403 Forbidden") as through:
        for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY"):
            monkeypatch.setenv(name, through.url)
        monkeypatch.delenv("NO_PROXY", raising=False)
        here = config.model_copy(update={"server": f"localhost:{port}"})
        assert all(check.ok for check in checked(here).values())
        assert ParcelClient(f"127.0.0.1:{port}", None, dict)._way == Way("127.0.0.1", port)
        assert through.asked == []


def test_a_proxy_that_passes_nothing_on_is_named(config: SiloStartConfig) -> None:
    with proxy(status="407 Proxy Authentication Required") as through:
        asking = config.model_copy(update={"proxy": through.url})
        failed(checked(asking)["server"], "wants a user and a password", "HTTPS_PROXY=http://USER:PASSWORD@")
        assert "wants a user and a password" in said_by_supernode(asking)
    failed(checked(asking)["server"], "the proxy 127.0.0.1", "that the proxy runs")
    junk = config.model_copy(update={"proxy": "socks5://x:1"})
    failed(checked(junk)["server"], "names no HTTP proxy", "http://HOST:PORT")


def test_a_proxy_that_reads_along_is_named(config: SiloStartConfig, inspecting: Path) -> None:
    with proxy(reads=inspecting) as through:
        config = config.model_copy(update={"proxy": through.url})
        found = checked(config)
        says = "replaces the certificate: issuer CN=Example Corp Web Filter"
        assert found["server"].ok
        failed(found["TLS"], says, "pass TLS to fl.example.org:9092 on as it is")
        assert said_by_supernode(config).startswith("a proxy between") and says in said_by_supernode(config)


def test_another_federations_server_is_none_that_reads_along(config: SiloStartConfig, tmp_path: Path) -> None:
    folder = tmp_path / "other"
    folder.mkdir(mode=0o700)
    make_server_certificate(make_authority(folder), [HOST], folder)
    with proxy(reads=folder) as through:
        failed(checked(config.model_copy(update={"proxy": through.url}))["TLS"], "", "Compare ca.crt")


def test_a_silos_file_names_a_proxy_that_can_be_used(config: SiloStartConfig) -> None:
    told = config.model_dump(exclude_unset=True)
    assert SiloStartConfig(**told, proxy="direct").proxy == "direct"
    with pytest.raises(ConfigError, match="names no HTTP proxy"):
        SiloStartConfig(**told, proxy="socks5://x:1")
    with pytest.raises(ValueError, match="goes through no proxy"):
        SiloStartConfig(name="a", server="b:1", state="/s", insecure=True, proxy="http://p:1")
