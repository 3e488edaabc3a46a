"""Programs of Flower as children: what they are, what they are told, and that they end."""

import subprocess
import sys

import pytest

from fedsync.flower import launch

RUN = """
import sys, threading, time, types
from fedsync.flower import launch
def program():
    print(*sys.argv)
    threading.Thread(target=time.sleep, args=(600,)).start()
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


def test_a_program_that_flower_does_not_have_is_none() -> None:
    with pytest.raises(ValueError, match="unpack"):
        launch.entry_point("nothing")


@pytest.mark.slow
def test_a_supernode_without_a_connection_ends_whatever_it_has_begun() -> None:
    done = run("supernode", "--insecure")
    assert (done.returncode, done.stderr) == (1, "")


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
