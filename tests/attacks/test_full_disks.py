"""How much of a disk others can make a silo or a relay fill by what is asked and answered at the same time."""

import json
import shutil
import threading
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.model.transfer import Payload
from fedsync.silo.agent import answers
from fedsync.silo.agent.answers import Place
from fedsync.silo.protocol import (
    SOCKET,
    STATE,
    Answer,
    Describe,
    Forward,
    Forwarded,
    Refusal,
    write_reply,
    write_request,
)
from fedsync.silo.session import resident_trainer
from fedsync.silo.session.trainer_folder import FolderLock
from fedsync.silo.session.trainer_socket import call, receive, send

AT_ONCE, NBYTES = 8, 400_000
Usage = namedtuple("Usage", "total used free")


def bytes_in(folder: Path) -> int:
    return sum(each.stat().st_size for each in folder.rglob("*") if each.is_file())


def asked_at_once(folder: Path, place: Place) -> int:
    """Ask questions with large payloads, none of which is answered before all have come; return the bytes on disk."""
    spec = RunSpec.of(StrategyConfig.load("fedavg", ["task.kind=digits"]), None, 2).dump()
    came = threading.Barrier(AT_ONCE)

    def ask(number: int) -> None:
        def fetch(to: Path) -> Payload | None:
            time.sleep(0.5)  # it is on its way
            to.mkdir(parents=True, exist_ok=True)
            (to / f"{number}.parcel").write_bytes(bytes(NBYTES))
            return np.zeros(NBYTES, np.uint8)

        came.wait(10)
        place.answer(spec, write_request(Describe()), NBYTES, fetch)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(ask, range(AT_ONCE)))
    return bytes_in(folder)


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    monkeypatch.setattr(answers, "connect", lambda identity: lambda text, payload: ("{}", None))
    monkeypatch.setattr(answers, "ask_relay", lambda *asked: ("{}", None))
    return tmp_path / "state"


def test_questions_at_once_have_the_owners_room_together(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each was compared with what lay there before any of the others had come."""
    monkeypatch.setenv(ALLOWED, json.dumps({"state_bytes": 1_000_000}))
    assert 0 < asked_at_once(state, Place({})) <= 1_000_000


def test_questions_to_a_relay_leave_some_of_its_disk(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay has no owner who bounds it, and nobody counted what it was asked."""
    total = 2_000_000
    usage = lambda path: Usage(total, bytes_in(state), total - bytes_in(state))  # noqa: E731
    monkeypatch.setattr(shutil, "disk_usage", usage)
    state.mkdir(mode=0o700)
    assert 0 < asked_at_once(state, Place({"relay": str(state / "relay.sock")})) <= 0.95 * total


def test_large_answers_that_wait_have_the_owners_room(state: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server asks for the model again and again, and takes none: each answer was another file."""
    monkeypatch.setenv(ALLOWED, json.dumps({"state_bytes": 1_000_000}))
    folder = state / "trainer"
    folder.mkdir(mode=0o700, parents=True)
    server = resident_trainer._Server(folder, FolderLock(folder, 0))
    service = SimpleNamespace(ask=lambda text, payload: (text, np.zeros(NBYTES, np.uint8)), busy=False, hangs=False)
    server.loaded(service)  # type: ignore[arg-type]
    threading.Thread(target=server._let_in, daemon=True).start()
    refused, held = [], []
    for _ in range(AT_ONCE):
        caller = call(folder / SOCKET)
        assert caller is not None
        send(caller, Forward(write_reply(Answer()), 1.0))
        reply, answer = receive(caller)
        held.append(answer)
        if isinstance(reply, Forwarded) and Refusal.LIMIT.value in reply.text:
            refused.append(reply)
    assert bytes_in(state) <= 1_000_000
    assert 0 < len(refused) < AT_ONCE
