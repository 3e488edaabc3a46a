"""The doctor, a SuperNode and an agent behind a proxy: on their way through it, and what they say if it keeps them."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.silo_start import SiloStartConfig
from fedsync.extras.doctor.machine_checks import Check
from fedsync.extras.doctor.preflight import _check_way
from fedsync.identity.certificates import ServerCertificate, make_authority, make_server_certificate
from fedsync.ops.programs import silo_programs, way_to_server
from fedsync.ops.supervisor import Program
from fedsync.transport.hub.hub import Hub
from fedsync.transport.hub_line import HubLine
from fedsync.transport.join import new_secret
from fedsync.transport.port import BASE
from tests.extras.doctor.test_doctor import failed
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


@pytest.fixture
def hub(certificates: Path, tmp_path: Path) -> Iterator[tuple[Hub, int]]:
    made, files = Hub(tmp_path / "hub"), ServerCertificate.at(certificates)
    port = made.start(certificate=files.certificate, key=files.key)
    yield made, port
    made.close(over=False)


def joined(hub: Hub, address: str, certificates: Path) -> None:
    """An agent's first request to a hub, in this process's environment."""
    join = hub.invite("1 berlin", [f"https://{address}{BASE}"], (certificates / "ca.crt").read_text())
    line = HubLine(join, new_secret())
    try:
        line.join()
    finally:
        line.close()
    assert "1 berlin" in hub.peers()


def program(config: SiloStartConfig, role: str) -> Program:
    return next(each for each in silo_programs(config) if each.role == role)


def checked(config: SiloStartConfig) -> dict[str, Check]:
    return {check.name: check for check in _check_way(lambda: way_to_server(config), config.authority)}


def said_by_supernode(config: SiloStartConfig, **environment: str) -> str:
    """What a SuperNode says that ends before Flower's own connection."""
    node = program(config, "supernode")
    done = subprocess.run(
        node.command, env={**os.environ, **node.environment, **environment}, capture_output=True, timeout=60
    )
    assert done.returncode == 1
    return done.stderr.decode()


def test_all_goes_through_the_proxy(
    port: int, config: SiloStartConfig, certificates: Path, monkeypatch: pytest.MonkeyPatch, hub: tuple[Hub, int]
) -> None:
    """No name service knows the server: only the proxy reaches it."""
    with proxy(to=port, user="anna:sesame") as through:
        monkeypatch.setenv("HTTPS_PROXY", through.url.replace("//", "//anna:sesame@"))
        found = checked(config)
        assert all(check.ok for check in found.values()), found
        assert f"through the proxy 127.0.0.1:{through.port}" in found["server"].detail
        assert "TLSv1.3" in found["TLS"].detail and "within" in found["clock"].detail
        assert set(through.asked) == {f"CONNECT {HOST}:9092 HTTP/1.1"} and len(through.asked) == 5
        assert "sesame" not in str(found)
        for role in ("supernode", "agent"):
            each = program(config, role)
            assert each.environment["https_proxy"].endswith(f"@127.0.0.1:{through.port}")
            assert not any("sesame" in part for part in each.command), "all users can read a command line"
        told = program(config, "agent").environment
        assert "https_proxy" not in program(config, "room").environment, "it has nothing to do with the network"
    with proxy(to=hub[1], user="anna:sesame") as through:
        for name, value in told.items():
            monkeypatch.setenv(name, value.replace(told["https_proxy"], through.url.replace("//", "//anna:sesame@")))
        joined(hub[0], f"{HOST}:9093", certificates)
        assert set(through.asked) == {f"CONNECT {HOST}:9093 HTTP/1.1"}


def test_a_proxy_that_passes_nothing_on_is_named(config: SiloStartConfig) -> None:
    with proxy(status="407 Proxy Authentication Required") as through:
        asking = config.model_copy(update={"proxy": through.url})
        failed(checked(asking)["server"], "requires a user and a password", "HTTPS_PROXY=http://USER:PASSWORD@")
        assert "requires a user and a password" in said_by_supernode(asking)
    failed(checked(asking)["server"], "the proxy 127.0.0.1", "that the proxy runs")
    junk = config.model_copy(update={"proxy": "socks5://x:1"})
    failed(checked(junk)["server"], "not an HTTP proxy", "http://HOST:PORT")


@pytest.mark.slow
def test_a_proxy_that_reads_along_is_named(config: SiloStartConfig, inspecting: Path) -> None:
    with proxy(reads=inspecting) as through:
        config = config.model_copy(update={"proxy": through.url})
        found = checked(config)
        says = "replaces the certificate: issuer CN=Example Corp Web Filter"
        assert found["server"].ok
        failed(found["TLS"], says, "pass TLS to fl.example.org:9092 unchanged")
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
    with pytest.raises(ConfigError, match="not an HTTP proxy"):
        SiloStartConfig(**told, proxy="socks5://x:1")
    with pytest.raises(ValueError, match="goes through no proxy"):
        SiloStartConfig(name="a", server="b:1", state="/s", insecure=True, proxy="http://p:1")
