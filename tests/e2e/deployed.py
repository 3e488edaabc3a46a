"""A deployed federation as its people start it: ``fedsync server start``, and ``fedsync silo start`` for each silo."""

import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fedsync.common.locks import wait_until
from fedsync.common.processes import end_processes, free_ports
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key

WAIT_S = 120.0
TRAINER = "fedsync.silo.session.resident_trainer"

SMALL = "task={kind: mlp, data: {kind: blobs, samples: 200}}"
"""A task whose trainers import no library of data: for tests of processes, which learn nothing from what is trained."""


def fedsync(*arguments: str, cwd: Path) -> subprocess.Popen[bytes]:
    with (cwd / f"{arguments[0]}.out").open("ab") as out:
        command = [sys.executable, "-m", "fedsync", *arguments]
        return subprocess.Popen(command, cwd=cwd, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)


def children(word: str) -> list[psutil.Process]:
    """Return the descendants of this process that have a word in their command lines."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with suppress(psutil.Error):
            if word in " ".join(process.cmdline()):
                found.append(process)
    return found


def wait_for(holds: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    assert wait_until(holds, seconds, 0.1), what


def write_files(
    folder: Path, silos: Iterable[str], server: str = "", own: Callable[[str], str] = lambda silo: ""
) -> None:
    """Write certificates, keys, ``server.yaml`` and a file ``NAME.yaml`` for each silo, with a state folder NAME.

    ``server`` are further entries of the server's file, each followed by a comma, and ``own`` returns those of a silo.
    """
    make_server_certificate(make_authority(folder / "certs"), ["localhost"], folder / "certs")
    (port,) = free_ports(1)
    keys = {name: make_node_key(name, folder / "nodes") for name in silos}
    known = ", ".join(f"{name}: {key.public}" for name, key in keys.items())
    (folder / "server.yaml").write_text(
        f"{{{server} host: 127.0.0.1, port: {port}, certificates: certs, state: server, silos: {{{known}}}}}"
    )
    for index, (name, key) in enumerate(keys.items()):
        (folder / f"{name}.yaml").write_text(
            f"{{{own(name)} name: {name}, server: 'localhost:{port}', authority: certs/ca.crt, "
            f"node_key: {key.private}, state: {name}, index: {index}}}"
        )


@contextmanager
def deployed(
    folder: Path, silos: Iterable[str], servers: Sequence[str] = ("server",)
) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Start servers and silos from their files in ``folder``; at the end they end with code 0 and leave no process."""
    started = [fedsync("server", "start", "--server", f"{name}.yaml", cwd=folder) for name in servers]
    out = folder / "server.out"
    try:
        # A silo that comes before its registration is refused, and waits for its restart.
        wait_for(lambda: out.read_bytes().count(b"registered: ") >= len(servers), "a server did not come up")
        started += [fedsync("silo", "start", "--silo", f"{name}.yaml", cwd=folder) for name in silos]
        yield started
        family = [child for each in started for child in psutil.Process(each.pid).children(recursive=True)]
        for process in started:
            process.send_signal(signal.SIGTERM)
        assert [process.wait(timeout=60) for process in started] == [0] * len(started)
    finally:
        end_processes(started)
    assert not psutil.wait_procs(family, timeout=10)[1], "nothing is left"
