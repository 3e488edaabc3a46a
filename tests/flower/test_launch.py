"""Programs of Flower as children: what they are, what they are told, and that they end."""

import subprocess
import sys
from pathlib import Path

import pytest

from fedsync.flower import launch
from fedsync.flower.process_environment import flower_environment, flower_in_this_process
from tests.proxy import as_httpx_goes

RUN = """
import sys, threading, time, types
from fedsync.flower import launch
def program():
    print(*sys.argv)
    threading.Thread(target=time.sleep, args=(600,)).start()
    if "--fails" in sys.argv:
        raise ValueError("a fault")
launch.entry_point = lambda name: types.SimpleNamespace(load=lambda: program)
launch.main(sys.argv[1:])
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What becomes of a program that notes its arguments and returns, with a thread that goes on."""
    command = [sys.executable, "-u", "-c", RUN, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.parametrize("name", ["superlink", "supernode", "superexec"])
def test_programs_are_flower_s_own(name: str) -> None:
    assert launch.entry_point(name).load().__module__.startswith("flwr.")


@pytest.mark.slow
def test_a_supernode_without_a_connection_ends_whatever_it_has_begun() -> None:
    done = run("supernode", "--insecure")
    assert (done.returncode, done.stderr) == (1, "")
    done = run("supernode", "--insecure", "--fails")
    assert done.returncode == 1 and done.stderr.rstrip().endswith("ValueError: a fault")


@pytest.mark.slow
def test_a_supernode_serves_its_own_processes_on_loopback_at_a_free_port() -> None:
    ports = []
    for _ in range(2):
        name, *options, port = run("supernode", "--insecure").stdout.split()
        assert (name, options) == ("flower-supernode", ["--insecure", "--host", "127.0.0.1", "--port"])
        ports.append(int(port))
    assert all(1024 < port < 65536 for port in ports)


@pytest.mark.parametrize(
    "arguments", [("superlink", "--insecure", "--isolation", "process"), ("supernode", "--port", "5")]
)
def test_a_program_is_told_what_it_was_told_here(arguments: tuple[str, ...]) -> None:
    assert run(*arguments).stdout.split() == [f"flower-{arguments[0]}", *arguments[1:]]


URLS = ["http://127.0.0.1:9092", "https://127.0.0.1:9092", "https://localhost:9092", "https://[::1]:9092"]
PROXY = "http://proxy.example.org:3128"


# Calls on one machine go through no proxy, whatever the environment of whoever starts Flower says.


@pytest.fixture
def behind_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, PROXY)
    for name in ("NO_PROXY", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.slow
@pytest.mark.usefixtures("behind_a_proxy")
@pytest.mark.parametrize("url", URLS)
def test_flowers_processes(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert as_httpx_goes({}, url, monkeypatch) == "proxy.example.org:3128", "this is what is to be kept from them"
    assert as_httpx_goes(flower_environment(tmp_path), url, monkeypatch) is None
    assert as_httpx_goes(flower_environment(tmp_path), "https://wandb.example.org", monkeypatch) is not None
    with flower_in_this_process(tmp_path):
        assert as_httpx_goes({}, url, monkeypatch) is None
