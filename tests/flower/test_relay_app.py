"""A relay's app and its node: what the server asks passes over a socket, and large answers as files."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from fedsync.common.errors import ProtocolError
from fedsync.extras.relays.relay import RelayService
from fedsync.extras.relays.relay_app import serve_relay
from fedsync.extras.relays.relay_messages import RegionRequest, read_region_reply, write
from fedsync.flower import client_app
from fedsync.flower import flower_messages as messages
from fedsync.model.chunked_arrays import ArrayKeeper, file_part
from fedsync.model.transfer import Payload
from fedsync.silo.agent import answers
from fedsync.silo.agent.answers import ask_relay
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import STATE, Describe, Refused, read_reply, write_request
from fedsync.transport.port import SiloQuestion
from tests.flower.grid import DirectGrid, run_identity, said
from tests.flower.named_nodes import silent, silos_of


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with run_identity():
        yield


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    """Of an app whose relay has two silos."""
    path = tmp_path / "relay.sock"
    threading.Thread(target=serve_relay, args=(silos_of(silent, silent), path, None, tmp_path), daemon=True).start()
    return path


def test_what_is_asked_comes_back_over_the_socket(
    socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(STATE, str(tmp_path / "state"))
    said, payload = ask_relay(socket, "{}", write_request(Describe()), None)
    assert [each.node for each in read_region_reply(said, "relay").here] == [1, 2] and payload is None
    said, _ = ask_relay(socket, "{}", write(RegionRequest("s")), np.arange(3, dtype=np.uint8))
    refused = read_reply(said, "relay")
    assert isinstance(refused, Refused), "three bytes that nobody speaks of"
    assert [note.code for note in last_refusals(tmp_path / "state")] == [refused.code], "doctor shows the reason"
    assert "Traceback" not in caplog.text


def test_a_large_answer_is_a_file_that_the_caller_has_before_it_goes(
    socket: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keeper = ArrayKeeper(tmp_path / "sums")
    ask_relay(socket, "{}", write_request(Describe()), None)

    def large(self: RelayService, spec: str, text: str, payload: Payload | None) -> tuple[str, Payload]:
        return "large", keeper.write(2**22, (bytes([7]) * 2**20 for _ in range(4)))

    monkeypatch.setattr(RelayService, "ask", large)
    for _ in range(3):
        said, payload = ask_relay(socket, "{}", "", None)
        assert said == "large" and payload is not None and file_part(payload) is not None
        assert payload.nbytes == 2**22 and (payload == 7).all()


def test_who_waits_for_an_app_that_does_not_come_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_GREET_S", 0.1)
    with pytest.raises(OSError, match="is not there"):
        ask_relay(tmp_path / "none.sock", "{}", "", None)


def _asked(text: str, node_config: dict[str, str]) -> Message:
    grid = DirectGrid(1)
    context: Any = grid._contexts[1]
    context.node_config.update(node_config)
    asked = messages.request(1, SiloQuestion(text, spec="{}"))
    asked.metadata.__dict__["_message_id"] = "m"
    return client_app.app(asked, context)


def test_a_relay_s_node_hands_questions_on_and_says_that_it_is_one(socket: Path) -> None:
    reply = _asked(write_request(Describe()), {"relay": str(socket)})
    assert messages.is_relay(reply)
    assert len(read_region_reply(messages.read_answer(reply, "relay", 0)[0], "relay").here) == 2


def test_a_silo_s_node_takes_nothing_that_is_for_a_relay() -> None:
    reply = _asked(write(RegionRequest("s")), {})
    assert not messages.is_relay(reply)
    with pytest.raises(ProtocolError, match="message"):
        read_region_reply(messages.read_answer(reply, "silo", 0)[0], "silo")


def test_an_app_that_is_gone_is_a_refusal_and_one_line_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The notes that a silo's owner reads are in a folder that a relay does not have."""
    monkeypatch.setattr(answers, "_GREET_S", 0.1)
    monkeypatch.chdir(tmp_path)
    reply = _asked(write_request(Describe()), {"relay": str(tmp_path / "none.sock")})
    assert isinstance(said(reply)[0], Refused) and messages.is_relay(reply), "it is no silo that refuses"
    told = "a question of the server above has no answer, and is asked again: the relay's app is not there"
    assert [(record.getMessage(), record.exc_info) for record in caplog.records] == [(told, None)]
