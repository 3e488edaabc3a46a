"""A real federation for `bench/faults/soak.py`: `fedsync server start`, a `fedsync silo start` each, and their keys.

The first silo reaches the server and the hubs through a proxy, which can drop all traffic on request. Flower and
FedSync use no proxy for loopback addresses, so hubs have a host name that only the proxies know.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path
from unittest.mock import patch

import psutil
import yaml

from bench.faults.lossy_lines import SERVER, Lines
from bench.faults.soak_lies import COMMAND, FILE, LIE
from fedsync.cipher.keys.authority import emulated_keys
from fedsync.common.errors import FedSyncError
from fedsync.common.processes import end_processes, free_ports
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.identity.node_keys import make_node_key
from fedsync.ops import runs
from fedsync.silo.owner.model_export import export_kept

START_S = 120.0
OWN_APP = "fedsync.flower.server_app:app"
HUB_NAME = "hub.invalid"
"""No machine has it; proxies of this module take it, as any other, for this one."""


@contextmanager
def bundled(own: str, other: str) -> Iterator[None]:
    """What is submitted meanwhile names another app in the place of one of FedSync's own."""
    with patch.object(runs, "_PROJECT", runs._PROJECT.replace(own, other)):
        yield


class Proxy:
    """Forwards connections, until it is told to swallow everything for a while. An HTTP proxy (CONNECT) too.

    Args:
        target: where connections go that do not ask for another port of this machine.
        bytes_s: what it carries there, over all connections [bytes/s]; the way back is as fast as it can be.
    """

    def __init__(self, target: tuple[str, int], bytes_s: float = inf) -> None:
        self._target = target
        self._bytes_s = bytes_s
        self._line = threading.Lock()
        self._free_s = 0.0
        self._until_s = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self, seconds: float) -> None:
        """Let nothing through for so long; connections from before are lost."""
        self._until_s = time.monotonic() + seconds

    def _accept(self) -> None:
        while True:
            inside, _ = self._listener.accept()
            threading.Thread(target=self._connect, args=(inside,), daemon=True).start()

    def _connect(self, inside: socket.socket) -> None:
        self._wait()
        try:
            outside = socket.create_connection(_asked(inside) or self._target)
        except OSError:
            inside.close()
            return
        for one, other, bytes_s in ((inside, outside, self._bytes_s), (outside, inside, inf)):
            threading.Thread(target=self._pump, args=(one, other, bytes_s), daemon=True).start()

    def _pump(self, one: socket.socket, other: socket.socket, bytes_s: float) -> None:
        with contextlib.suppress(OSError):
            while (data := one.recv(65536)) and not self._wait():
                self._carry(len(data) / bytes_s)
                other.sendall(data)
        for each in (one, other):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        one.close()

    def _carry(self, seconds: float) -> None:
        """Take the line for so long, after whoever has it."""
        with self._line:
            end_s = self._free_s = max(self._free_s, time.monotonic()) + seconds
        time.sleep(max(end_s - time.monotonic(), 0.0))

    def _wait(self) -> bool:
        """Whether something was swallowed."""
        waited = False
        while time.monotonic() < self._until_s:
            waited = True
            time.sleep(0.1)
        return waited


def _asked(inside: socket.socket) -> tuple[str, int] | None:
    """Target that a connection names (CONNECT); None if it names none, as one of TLS."""
    if inside.recv(1, socket.MSG_PEEK) != b"C":
        return None
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        if not (byte := inside.recv(1)):
            raise OSError("it ended")
        head += byte
    inside.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
    return "127.0.0.1", int(head.split()[1].rpartition(b":")[2])


class Federation:
    """A server and its silos, with TLS, node authentication and keys for encryption.

    Args:
        folder: for all of their files; of a short name, for trainers' sockets are below it.
        silos: how many.
        line_bytes_s: what the first silo's line carries to the server [bytes/s].
        liar: whether the first silo lies, once told to.
        lines: between namespaces in which server and silos are; None has them all on loopback.
        keys: for encryption; without them runs are in the clear.
        code: of each silo, see `fedsync.config.silo_start`.
    """

    def __init__(
        self,
        folder: Path,
        silos: int,
        line_bytes_s: float = inf,
        *,
        liar: bool = False,
        lines: Lines | None = None,
        keys: bool = True,
        code: str = "installed",
    ) -> None:
        host, named = ("127.0.0.1", "localhost") if lines is None else (SERVER, SERVER)
        self._lines, self.sealed = lines, keys
        self.folder = folder
        self.names = [f"silo-{index}" for index in range(silos)]
        (port,) = free_ports(1)
        self.proxy = Proxy(("127.0.0.1", port), line_bytes_s)
        self._others = Proxy(("127.0.0.1", port))
        certificates = folder / "certs"
        make_server_certificate(
            make_authority(certificates), [named, *([HUB_NAME] if lines is None else [])], certificates
        )
        issued = emulated_keys(self.names, folder / "keys") if keys else None
        server = {"host": host, "port": port, "certificates": "certs", "state": "server"}
        if lines is None:
            server["hub"] = {"name": HUB_NAME, "port": 0}
        nodes = {name: make_node_key(name, folder / "nodes") for name in self.names}
        public = {name: str(node.public) for name, node in nodes.items()}
        held = {} if issued is None else {"keys": str(issued.server_file)}
        self._write("server.yaml", {**server, "silos": public, **held})
        for index, name in enumerate(self.names):
            place = HUB_NAME if lines is None else named  # hubs are reached as the server is
            silo = {"name": name, "server": f"{place}:{port}", "state": f"s{index}", "index": index, "code": code}
            silo |= {"authority": "certs/ca.crt", "node_key": str(nodes[name].private)}
            if lines is None:
                silo["hub_hosts"] = [HUB_NAME]
            if issued is not None:  # and runs of one silo, too
                silo |= {"keys": str(issued.silos[name]), "seal": {"members": 1}}
            self._write(f"{name}.yaml", silo)
        self.config = ServerStartConfig.load(folder / "server.yaml")
        self._liars = {self.names[0]} if liar else set()
        self._supervisors: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start all of it, or start it again; returns when the server knows its silos."""
        self._fedsync("server", "start", "--server", "server.yaml")
        end_s = time.monotonic() + START_S
        while "silos registered" not in (self.folder / "server.out").read_text():
            if time.monotonic() > end_s:
                raise SystemExit(f"the server did not start: {(self.folder / 'server.out').read_text()[-500:]}")
            time.sleep(0.2)
        for name in self.names:
            self._fedsync("silo", "start", "--silo", f"{name}.yaml", log=name)

    def lie(self, lie: str | None) -> None:
        """Have the liar, where there is one, lie so from now on, or be honest."""
        file = self.folder / LIE
        if lie is None:
            file.unlink(missing_ok=True)
        else:
            file.write_text(lie)

    def stop(self) -> None:
        """Have all of it end as it does by itself."""
        end_processes(list(reversed(self._supervisors)))
        self._supervisors.clear()

    def kill(self) -> None:
        """Kill -9 every process of it, those that watch over others first."""
        for each in self._supervisors:
            each.kill()
            each.wait()
        self._supervisors.clear()
        for process in self.processes(""):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def processes(self, word: str, since_s: float = 0.0) -> list[psutil.Process]:
        """Those with this word in their command line that began after a time of day; supervisors are not among them."""
        home = str(self.folder)
        return [each for each in psutil.process_iter() if each.create_time() >= since_s and _is(each, word, home)]

    def supervisors(self) -> list[psutil.Process]:
        """Those that watch over others: the server's first, then one of each silo."""
        with contextlib.suppress(psutil.NoSuchProcess):
            return [psutil.Process(each.pid) for each in self._supervisors]
        return []

    def versions(self) -> Iterator[int]:
        """Of the models that silos keep of their latest run, each read when it is asked for (some four seconds)."""
        for name in self.names:
            with contextlib.suppress(FedSyncError):
                config = SiloStartConfig.load(self.folder / f"{name}.yaml")
                yield export_kept(config, self.folder / "models").version

    @property
    def resumed(self) -> int:
        """How often the server's supervisor has resumed a run."""
        return (self.folder / "server.out").read_text().count("resumed at version")

    def _fedsync(self, *arguments: str, log: str = "server") -> None:
        before = [] if self._lines is None or log == "server" else self._lines.entering(log)
        program = COMMAND if log in self._liars else (sys.executable, "-m", "fedsync")
        environment = {**os.environ, FILE: str(self.folder / LIE)}
        if self._lines is None and log != "server":
            proxy = self.proxy if log == self.names[0] else self._others
            environment["HTTPS_PROXY"] = f"http://127.0.0.1:{proxy.port}"
        with (self.folder / f"{log}.out").open("ab") as out:
            process = subprocess.Popen(
                [*before, *program, *arguments],
                cwd=self.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._supervisors.append(process)

    def _write(self, name: str, content: dict[str, object]) -> None:
        (self.folder / name).write_text(yaml.safe_dump(content))


def _is(process: psutil.Process, word: str, home: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.environ().get("FLWR_HOME", "").startswith(home) and word in " ".join(process.cmdline())
    return False
