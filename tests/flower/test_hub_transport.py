"""The hub as a transport: one join a node, who is here, what counts as the answer of who does not join, large bytes."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from flwr.app import Error, Message

from fedsync.common.errors import ConfigError
from fedsync.flower import flower_messages as messages
from fedsync.flower import hub_transport
from fedsync.flower.grid_transport import GridTransport
from fedsync.flower.hub_transport import FOLDER, JOIN_TTL_S, HubTransport, way_to_silos
from fedsync.server.run_folder import HUB, HubPlace
from fedsync.silo.agent.joins import JOINED
from fedsync.transport.join import Join
from fedsync.transport.port import BESIDE_BYTES, SiloQuestion
from tests.flower.grid import DirectGrid
from tests.transport.hubs import Served, served

pytestmark = pytest.mark.usefixtures("silos_here")


class Silos:
    """A grid whose nodes join, or answer a join with something else."""

    def __init__(self, up: Served, nodes: dict[int, str]) -> None:
        self.up, self.nodes = up, nodes
        self.says: dict[int, Callable[[Message], Message | None]] = {}
        self.joins: list[tuple[int, Join]] = []
        self._replies: dict[str, Message] = {}
        self.away = False

    def get_nodes(self) -> list[Any]:
        if self.away:
            raise ConnectionError("the SuperLink is away")
        return [SimpleNamespace(node_id=node, name=name, last_activated_at="1") for node, name in self.nodes.items()]

    def push_messages(self, sent: Iterable[Message]) -> Iterator[str]:
        for message in sent:
            node, identifier = message.metadata.dst_node_id, f"message {len(self.joins)}"
            message.metadata.__dict__["_message_id"] = identifier
            text = messages.read_join(message)
            assert text is not None, "nothing but joins goes over Flower"
            self.joins.append((node, Join.parse(text)))
            reply = self.says.get(node, self.joined)(message)
            if reply is not None:
                self._replies[identifier] = reply
            yield identifier

    def joined(self, message: Message) -> Message:
        self.up.line(self.joins[-1][1]).join()
        return messages.answer(message, JOINED)

    def pull_messages(self, names: Iterable[str]) -> list[Message]:
        return [self._replies.pop(name) for name in names if name in self._replies]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[Served]:
    with served(tmp_path) as found:
        yield found


def transport(silos: Silos, struck: Callable[[], set[str]] = set) -> HubTransport:
    up = silos.up
    made = HubTransport(silos, up.hub, Path("/nowhere"), [up.address], up.authority, struck)  # type: ignore[arg-type]
    made._invite()
    return made


def test_each_node_gets_one_join_and_is_here_by_its_name(up: Served) -> None:
    silos = Silos(up, {11: "berlin", 12: ""})
    made = transport(silos)
    for _ in range(3):
        made._invite()
    assert sorted(node for node, _ in silos.joins) == [11, 12]
    assert len({join.secret for _, join in silos.joins}) == 2
    assert [(peer.node_id, peer.name) for peer in made.peers()] == [(11, "berlin"), (12, "")]


@pytest.mark.parametrize(
    ("name", "address"), [("2001:db8::1", "http://[2001:db8::1]:"), ("a.example", "http://a.example:")]
)
def test_the_address_in_a_join_is_an_address_of_the_hub(name: str, address: str, tmp_path: Path) -> None:
    made = HubTransport.begin(DirectGrid(0), HubPlace(name=name), tmp_path / FOLDER)
    try:
        join = Join.parse(made._hub.invite("a", made._addresses, "").dump())
        assert join.addresses[0].startswith(address) and join.trusted([name], None) == join
    finally:
        made.close()


def test_a_node_that_goes_offline_stays_while_its_session_does(up: Served) -> None:
    silos = Silos(up, {11: "berlin"})
    made = transport(silos)
    before = made.peers()
    silos.nodes = {}
    made._invite()
    assert made.peers() == before, "the end of a SuperNode ends no session"


def test_while_the_superlink_is_away_silos_go_on(up: Served) -> None:
    silos = Silos(up, {11: "berlin"})
    made = transport(silos)
    silos.away = True
    thread = threading.Thread(target=made.invite, daemon=True)
    thread.start()
    time.sleep(0.5)
    assert thread.is_alive() and len(made.peers()) == 1
    made._over.set()
    thread.join(5)


def test_a_run_that_ends_is_no_superlink_that_is_away(up: Served, caplog: pytest.LogCaptureFixture) -> None:
    """The folder of the hub is removed while a join is written there."""
    silos: Any = Silos(up, {11: "berlin"})
    made = transport(silos)
    silos.get_nodes = lambda: made._over.set() or ["no node"]
    made.invite()
    assert not caplog.text


@pytest.mark.parametrize("says", ["an error", "a refusal", "nonsense"])
def test_a_node_that_does_not_join_answers_so_to_every_question(up: Served, says: str) -> None:
    def answer(message: Message) -> Message:
        match says:
            case "an error":
                return Message(Error(2, "No query function registered"), reply_to=message)
            case "a refusal":
                return messages.answer(message, '{"type":"Refused"}')
        reply = messages.answer(message, "")
        del reply.content.config_records["fedsync"]["text"]
        return reply

    silos = Silos(up, {11: "berlin"})
    silos.says[11] = answer
    made = transport(silos)
    made._invite()  # hears of it
    for _ in range(200):
        if made.peers():
            break
        time.sleep(0.02)
    (peer,) = made.peers()
    (name,) = made.send([(11, SiloQuestion("describe"))])
    (told,) = made.receive()
    assert (peer.node_id, told.name) == (11, name)
    assert (told.problem != "", told.code) == {"an error": (True, 2), "a refusal": (False, None)}.get(
        says, (True, None)
    )
    silos.says.clear()
    made._invited["11 berlin"].again_s = 0.0
    made._invite()
    (again,) = made.peers()
    assert again.since != peer.since, "it counts as another one"


def test_a_join_that_is_on_its_way_is_not_made_invalid_by_another(up: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    silos, now = Silos(up, {11: "berlin"}), [time.monotonic()]
    silos.says[11] = lambda message: None
    made = transport(silos)
    monkeypatch.setattr(hub_transport, "time", SimpleNamespace(monotonic=lambda: now[0]))
    now[0] += JOIN_TTL_S - 1
    made._invite()
    assert len(silos.joins) == 1
    now[0] += 2
    made._invite()
    assert len(silos.joins) == 2, "the first is lost"


def test_a_node_that_was_offline_is_invited_at_once(up: Served) -> None:
    silos = Silos(up, {11: "berlin"})
    silos.says[11] = lambda message: None
    made = transport(silos)
    silos.nodes = {}
    made._invite()
    silos.nodes = {11: "berlin"}
    made._invite()
    assert len(silos.joins) == 2


def test_who_was_struck_off_is_out_and_is_invited_no_more(up: Served) -> None:
    silos, struck = Silos(up, {11: "berlin", 12: "paris"}), set[str]()
    made = transport(silos, lambda: struck)
    made._invite()  # both are here, so that no earlier join delays another
    struck.add("berlin")
    made._invite()
    made._invite()
    assert [peer.name for peer in made.peers()] == ["paris"] and len(silos.joins) == 2
    assert made.send([(11, SiloQuestion("describe"))]) == [None]


def test_who_was_struck_off_is_out_while_the_superlink_is_away(up: Served) -> None:
    silos, struck = Silos(up, {11: "berlin", 12: "paris"}), set[str]()
    made = transport(silos, lambda: struck)
    struck.add("berlin")
    silos.away = True
    with pytest.raises(ConnectionError):
        made._invite()
    assert [peer.name for peer in made.peers()] == ["paris"]


def test_a_model_is_at_the_hub_once_and_goes(up: Served, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silos = Silos(up, {11: "berlin", 12: "paris"})
    made, publish = transport(silos), Mock(wraps=up.hub.publish)
    monkeypatch.setattr(up.hub, "publish", publish)
    model = np.ones(2 * BESIDE_BYTES, np.uint8)
    names = made.send([(node, SiloQuestion("train", model)) for node in (11, 12)])
    blobs = tmp_path / "hub" / "blobs"
    assert len(list(blobs.iterdir())) == 1 and publish.call_count == 1
    made.keep([name for name in names if name])
    assert len(list(blobs.iterdir())) == 1
    made.send([(11, SiloQuestion("train", np.zeros(2**25, np.uint8)))])
    made.keep([name for name in names if name])
    assert len(list(blobs.iterdir())) == 2, "the first was not fetched yet"
    made.keep([])
    assert len(list(blobs.iterdir())) == 1, "the newest stays: the next silo gets the same"
    made.send([(11, SiloQuestion("small", np.zeros(10, np.uint8)))])
    assert len(list(blobs.iterdir())) == 1


def test_a_server_without_a_hub_asks_in_flowers_messages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(HUB, raising=False)
    with way_to_silos(DirectGrid(1), tmp_path) as silos:
        assert isinstance(silos, GridTransport)
    assert not (tmp_path / FOLDER).exists()


def test_a_hub_comes_back_at_its_port_and_leaves_nothing_when_the_run_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    HubPlace().save(tmp_path / "hub.json")
    monkeypatch.setenv(HUB, str(tmp_path / "hub.json"))
    run, grid = tmp_path / "run", DirectGrid(0)
    first = HubTransport.begin(grid, HubPlace.load(tmp_path / "hub.json"), run / FOLDER)
    port = (run / FOLDER / "port").read_text()
    first._over.set()
    first._hub.close(over=False)  # killed, as far as silos can tell
    with way_to_silos(grid, run):
        assert (run / FOLDER / "port").read_text() == port
    assert not (run / FOLDER).exists()


def test_ports_that_are_taken_are_passed_over(tmp_path: Path) -> None:
    first = HubTransport.begin(DirectGrid(0), HubPlace(), tmp_path / "a")
    taken = int((tmp_path / "a" / "port").read_text())
    try:
        with pytest.raises(ConfigError, match="cannot listen"):
            HubTransport.begin(DirectGrid(0), HubPlace(ports=(taken,)), tmp_path / "b")
        second = HubTransport.begin(DirectGrid(0), HubPlace(ports=(taken, 0)), tmp_path / "c")
        assert int((tmp_path / "c" / "port").read_text()) != taken
        second.close()
    finally:
        first.close()


@pytest.mark.parametrize("text", ["", "{}", '{"ports": 1}', json.dumps({"ports": [1], "other": 1})])
def test_a_place_that_is_none_is_told(text: str, tmp_path: Path) -> None:
    (tmp_path / "hub.json").write_text(text)
    with pytest.raises(ConfigError, match="cannot be read"):
        HubPlace.load(tmp_path / "hub.json")
