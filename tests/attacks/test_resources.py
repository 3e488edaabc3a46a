"""How much of a machine others can make FedSync take: processes of a silo, its disk, connections to a page."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from fedsync.common.errors import FedSyncError, LimitReached, SiloBusy
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.extras.page import page_server as page
from fedsync.silo.protocol import STATE, Identity
from fedsync.silo.session import trainer_client as client
from fedsync.silo.session.trainer_client import MOST_TRAINERS, TrainerClient, stop_trainers
from fedsync.silo.session.trainer_folder import tenant
from fedsync.transport.hub import hub

STUB = (
    "import sys, time; from pathlib import Path; from fedsync.silo.session.trainer_folder import FolderLock; "
    "FolderLock.take(Path(sys.argv[2])); time.sleep(60)"
)


def test_run_texts_give_a_silo_no_more_trainers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each text of a run was another trainer of 290 MB, also where all came at once. These here only hold a folder."""
    monkeypatch.setenv(STATE, str(tmp_path))
    monkeypatch.setattr(client, "INTERPRETER", (sys.executable, "-P", "-c", STUB))
    refused: list[FedSyncError] = []

    def ask(number: int) -> None:
        try:
            TrainerClient(Identity(json.dumps(number), 0, "silo-a"))._start()
        except SiloBusy as error:
            refused.append(error)

    tmp_path.chmod(0o700)
    try:
        with ThreadPoolExecutor(6) as pool:
            list(pool.map(ask, range(6)))
        alive = [folder for folder in tmp_path.iterdir() if folder.is_dir() and tenant(folder) is not None]
        assert (len(alive), len(refused)) == (MOST_TRAINERS, 6 - MOST_TRAINERS)
        TrainerClient(Identity("0", 1, "silo-b"))._start()  # another silo has its own
    finally:
        for folder in tmp_path.iterdir():
            if folder.is_dir() and (pid := tenant(folder)):
                psutil.Process(pid).kill()
        stop_trainers(tmp_path)


def test_run_texts_fill_no_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Folders of the last hour stayed whatever the owner's limit; those of refused runs, too."""
    monkeypatch.setenv(STATE, str(tmp_path))
    monkeypatch.setenv(ALLOWED, json.dumps({"state_bytes": 1_000_000}))
    monkeypatch.setattr(client, "INTERPRETER", (sys.executable, "-P", "-c", "pass"))
    tmp_path.chmod(0o700)
    refused = []
    for number in range(6):
        try:
            TrainerClient(Identity(json.dumps([number, "x" * 400_000]), 0, "silo-a"))._start()
        except LimitReached as error:
            refused.append(str(error))
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) < 1_500_000
    assert len(refused) == 3 and all("the owner's state_bytes" in each for each in refused)
    TrainerClient(Identity(json.dumps([0, "x" * 400_000]), 0, "silo-a"))._start()  # a run of before goes on


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> page.PageServer:
    monkeypatch.setattr(hub, "STRANGER_S", 1.0)
    server = page.PageServer(tmp_path)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def connected(server: page.PageServer) -> socket.socket:
    made = socket.create_connection(("127.0.0.1", server.server_port), timeout=5)
    made.sendall(b"GET / HTTP/1.0\r\nX: ")
    return made


def test_dripping_connections_keep_nobody_from_a_page(served: page.PageServer) -> None:
    """A byte before each time limit held a place for ever; sixteen held them all."""
    held = [connected(served) for _ in range(page.MOST_AT_ONCE)]
    end_s = time.monotonic() + 2.5
    while time.monotonic() < end_s:
        for each in held:
            try:
                each.sendall(b"x")
            except OSError:
                continue
        asked = socket.create_connection(("127.0.0.1", served.server_port), timeout=5)
        host = f"Host: 127.0.0.1:{served.server_port}\r\n\r\n"
        asked.sendall(f"GET / HTTP/1.0\r\n{host}".encode())
        assert asked.recv(12) == b"HTTP/1.1 200"
        time.sleep(0.2)
    time.sleep(0.3)
    for each in held:
        with pytest.raises(ConnectionError):  # and no timeout of this test's own
            each.sendall(b"x")
            each.recv(1) or each.sendall(b"x")
    served.shutdown()
