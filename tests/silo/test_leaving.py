"""When a resident trainer leaves: it makes room if it is idle, and never while somebody is to get an answer."""

import errno
import gc
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedsync.model.transfer import Payload
from fedsync.silo.protocol import IDENTITY, PASSING, SOCKET, Forward, Identity, MakeRoom, SocketRequest, TrainerState
from fedsync.silo.session import resident_trainer, trainer_client
from fedsync.silo.session.resident_trainer import _Server
from fedsync.silo.session.trainer_client import make_room
from fedsync.silo.session.trainer_folder import TENURE, FolderLock
from fedsync.silo.session.trainer_socket import call, receive, send


def test_a_trainer_makes_room_for_one_of_the_same_silo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def tell(folder: Path, request: SocketRequest) -> None:
        assert request == MakeRoom()
        asked.append(folder.name)

    monkeypatch.setattr(trainer_client, "_tell", tell)
    silos = {"mine": (0, "a"), "mine-before": (0, "a"), "others": (1, "b"), "torn": None}
    for folder, silo in silos.items():
        (tmp_path / folder).mkdir()
        text = "{" if silo is None else json.dumps({"index": silo[0], "name": silo[1], "spec": folder})
        (tmp_path / folder / IDENTITY).write_text(text)
    make_room(tmp_path / "mine", Identity("mine", 0, "a"))
    assert asked == ["mine-before"]


class _Ended(BaseException):
    """In place of this process's end."""


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Server:
    """One in this process, which nobody is let in to, and whose trainer has a large answer."""
    monkeypatch.setattr(os, "_exit", Mock(side_effect=_Ended))
    lock = FolderLock.take(tmp_path)
    assert lock is not None
    server = _Server(tmp_path, lock)
    service: Any = SimpleNamespace(busy=False, unrevealed=False, ask=lambda *asked: ("", np.ones(16_000_000, np.uint8)))
    server.loaded(service)
    return server


@pytest.mark.parametrize(
    ("busy", "unrevealed", "idle_s", "ends"),
    [
        *((False, False, 31.0, True), (False, False, 29.0, False), (True, False, 1000.0, False)),
        *((False, True, 31.0, False), (False, True, 901.0, True), (True, True, 1000.0, False)),
    ],
)
def test_an_idle_trainer_makes_room(busy: bool, unrevealed: bool, idle_s: float, ends: bool, server: _Server) -> None:
    service: Any = SimpleNamespace(busy=busy, unrevealed=unrevealed)
    server.loaded(service)
    server._asked_at_s = time.monotonic() - idle_s
    with pytest.raises(_Ended) if ends else nullcontext():
        assert isinstance(server._reply(MakeRoom(), None)[0], TrainerState)


def calling(server: _Server, folder: Path) -> Connection:
    """Somebody who has asked the trainer, which lets in whoever calls."""
    threading.Thread(target=server._let_in, daemon=True).start()
    caller = call(folder / SOCKET)
    assert caller is not None
    send(caller, Forward("", 0.0))
    return caller


def test_nobody_leaves_before_its_answer_has(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident_trainer, "_IN_MEMORY_BYTES", 2**30)
    caller = calling(server, tmp_path)
    assert caller.poll(10.0), "the header is here, and 16 MB are more than a socket takes"
    server._leave()
    assert receive(caller)[1] is not None
    begin_s = server._asked_at_s
    with pytest.raises(_Ended):
        while True:  # until the thread has noted that all is sent
            server._leave()
    assert server._asked_at_s >= begin_s, "idle since the answer, not since the question"


def test_a_large_answer_is_a_file_of_its_map(server: _Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The socket carries its name. On a full disk it carries the answer."""

    def asked() -> tuple[Payload, int]:
        _, answer = receive(calling(server, tmp_path))
        assert answer is not None
        return answer, len([*tmp_path.glob(f"{PASSING}*")])

    answer, files = asked()
    assert (answer.size, answer.min(), files) == (16_000_000, 1, 1)
    del answer
    gc.collect()
    assert not [*tmp_path.glob(f"{PASSING}*")]

    monkeypatch.setattr(Path, "open", Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    answer, files = asked()
    assert (answer.size, answer.min(), files) == (16_000_000, 1, 0)


def test_nobody_leaves_while_somebody_is_at_the_door(server: _Server, tmp_path: Path) -> None:
    first = call(tmp_path / SOCKET)
    server._leave()
    second = call(tmp_path / SOCKET)
    assert first is not None and second is not None, "the door is where it was"


def test_a_trainer_that_comes_second_ends_before_it_loads_anything(tmp_path: Path) -> None:
    assert FolderLock.take(tmp_path) is not None
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "fedsync.silo.session.resident_trainer", str(tmp_path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0
    assert "fedsync.silo.session.trainer_folder" in done.stderr, "what is imported is listed"
    assert "torch" not in done.stderr
    assert [file.name for file in tmp_path.iterdir()] == [TENURE], "it has left the other one's socket alone"
