"""Heartbeats that are heard, and written together: who is online is what it is where each is written."""

import sqlite3
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.common.constant import HEARTBEAT_PATIENCE, NOOP_ACCOUNT_NAME, NOOP_FLWR_AID
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.node_pb2 import Node
from flwr.server.superlink.linkstate import sql_linkstate
from flwr.superlink import main

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import versions
from fedsync.flower.internals.heartbeats import FLUSH_S, RISK_S, Heartbeats, _extend, hear_heartbeats
from tests.flower.internals.superlink import SuperLink, fresh_database, serving

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")

EVERY_S = 30.0
PATIENCE_S = HEARTBEAT_PATIENCE * EVERY_S


class Database:
    """A SuperLink's state in a database, whose heartbeats are heard, at a time that the test says."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.now_s = 1_000_000.0
        self.state: Any = main.create_app().state.linkstate_factory.state()
        self.heartbeats = Heartbeats(self.state, lambda: self.now_s)
        self.heartbeats.attach()

    def join(self, key: bytes = b"key") -> int:
        node: int = self.state.create_node(NOOP_FLWR_AID, NOOP_ACCOUNT_NAME, key, 0)
        assert self.state.activate_node(node, EVERY_S)
        assert self.beat(node)
        return node

    def beat(self, node: int) -> bool:
        return bool(self.state.acknowledge_node_heartbeat(node, EVERY_S))

    def look(self, node: int) -> bool:
        """A node looks for messages; returns whether that was written."""
        heard = self.heartbeats.hear(node)
        return not heard and self.beat(node)

    def online(self) -> set[int]:
        return {info.node_id for info in self.state.get_node_info(statuses=["online"])}

    @property
    def until_s(self) -> list[float]:
        """What is written: until when nodes are online."""
        with sqlite3.connect(self.file) as connection:
            return sorted(row[0] for row in connection.execute("SELECT online_until FROM node"))


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Database:
    (tmp_path / "link.db").write_bytes(fresh_database())
    monkeypatch.setenv("FLWR_DATABASE", str(tmp_path / "link.db"))
    found = Database(tmp_path / "link.db")
    monkeypatch.setattr(sql_linkstate, "now", lambda: datetime.fromtimestamp(found.now_s, UTC))
    return found


def test_a_heartbeat_is_not_written_until_somebody_looks_later(database: Database) -> None:
    node = database.join()
    begin_s = database.now_s
    database.now_s += 20.0
    assert database.beat(node)
    assert database.until_s == [begin_s + PATIENCE_S]
    assert database.online() == {node}
    assert database.until_s == [begin_s + PATIENCE_S], "it is fresh"
    database.now_s += FLUSH_S
    assert database.online() == {node}
    assert database.until_s == [begin_s + 20.0 + PATIENCE_S]


def test_heartbeats_are_written_together(database: Database) -> None:
    nodes = [database.join(bytes([index])) for index in range(5)]
    database.now_s += 20.0
    for node in nodes[:4]:
        assert database.beat(node)
    database.now_s += FLUSH_S
    assert database.beat(nodes[4])
    begin_s = database.now_s - 20.0 - FLUSH_S
    assert database.until_s == [begin_s + 20.0 + PATIENCE_S] * 4 + [begin_s + 20.0 + FLUSH_S + PATIENCE_S]


def test_a_node_is_online_as_long_as_where_each_heartbeat_is_written(database: Database) -> None:
    node = database.join()
    database.now_s += 20.0
    assert database.beat(node)
    for _ in range(int(PATIENCE_S) - 1):
        database.now_s += 1.0
        assert database.online() == {node}
    database.now_s += 1.0
    assert database.online() == set()


def test_a_node_whose_time_is_nearly_over_is_not_lost_between_two_looks(database: Database) -> None:
    node = database.join()
    database.now_s += PATIENCE_S - RISK_S
    assert database.beat(node)
    database.now_s += RISK_S + 1.0
    assert database.online() == {node}
    database.now_s += PATIENCE_S - RISK_S - 5.0
    assert database.beat(node)
    database.now_s += RISK_S - FLUSH_S + 1.0
    assert database.online() == {node}


def test_a_node_that_looks_for_messages_is_online_without_heartbeats(database: Database) -> None:
    """Looks that are held for 16 s, and nobody who asks who is online: for five minutes, and as long as each lasts."""
    node, other = database.join(), database.join(b"other")
    written = []
    for _ in range(20):
        database.now_s += 16.0
        written.append(database.look(node))
        assert database.now_s < max(database.until_s), "in the database, too"
    assert written == [False, True] * 10, "what was heard is written when it is 10 s old"
    assert database.online() == {node} and database.beat(other)
    database.now_s += PATIENCE_S - 1.0
    assert node in database.online()
    database.now_s += 1.0
    assert node not in database.online()


def test_a_look_of_a_node_whose_time_is_nearly_over_is_written(database: Database) -> None:
    node = database.join()
    database.now_s += PATIENCE_S - RISK_S
    assert database.look(node)
    assert database.until_s == [database.now_s + PATIENCE_S]
    assert not database.look(node), "that is known now"


def test_a_node_that_went_is_back_with_its_next_heartbeat(database: Database) -> None:
    node = database.join()
    assert database.state.deactivate_node(node)
    assert database.online() == set()
    assert database.beat(node)
    assert database.online() == {node}


def test_what_was_heard_of_a_node_that_went_is_not_written(database: Database) -> None:
    node = database.join()
    database.now_s += 5.0
    assert database.beat(node)
    assert database.state.deactivate_node(node)
    database.now_s += FLUSH_S
    assert database.online() == set()
    assert database.until_s == [database.now_s - FLUSH_S]


def test_what_is_written_while_a_node_goes_does_not_bring_it_back(database: Database) -> None:
    node = database.join()
    assert database.state.deactivate_node(node)
    _extend(database.state, {node: database.now_s + 3600})
    assert database.online() == set()


def test_a_node_that_was_taken_away_hears_so(database: Database) -> None:
    node = database.join()
    database.state.delete_node(NOOP_FLWR_AID, node)
    assert not database.beat(node)


def test_another_interval_is_written(database: Database) -> None:
    node = database.join()
    assert database.state.acknowledge_node_heartbeat(node, 2 * EVERY_S)
    assert database.until_s == [database.now_s + 2 * PATIENCE_S]


def test_after_a_restart_a_node_has_its_time(database: Database) -> None:
    node = database.join()
    for _ in range(20):
        for _ in range(24):
            database.now_s += 1.0
            database.online()
        assert database.beat(node)
    database.now_s += FLUSH_S
    database.online()
    # Another process begins here: it knows what is written.
    again = Database(database.file)
    again.now_s = database.now_s + PATIENCE_S - FLUSH_S - 1.0
    assert database.until_s == [database.now_s - FLUSH_S + PATIENCE_S]
    database.now_s = again.now_s
    assert again.online() == {node}


def test_what_cannot_be_written_is_written_later(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    from fedsync.flower.internals import heartbeats

    node = database.join()
    begin_s = database.now_s
    database.now_s += 20.0
    assert database.beat(node)
    database.now_s += FLUSH_S

    def locked(*_: object) -> None:
        raise OSError("locked")

    with monkeypatch.context() as patched:
        patched.setattr(heartbeats, "_extend", locked)
        with pytest.raises(OSError, match="locked"):
            database.online()
    assert database.online() == {node}
    assert database.until_s == [begin_s + 20.0 + PATIENCE_S]


def test_a_state_without_a_database_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLWR_DATABASE", ":flwr-in-memory:")
    state = main.create_app().state.linkstate_factory.state()
    hear_heartbeats(state)
    assert "acknowledge_node_heartbeat" not in vars(state)


@pytest.fixture(params=["memory", "database"])
def link(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    file = tmp_path / "link.db" if request.param == "database" else None
    with serving(monkeypatch, GateConfig(), file) as found:
        yield found


def test_the_gate_answers_heartbeats(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    from flwr.superlink.routers.fleet import router

    monkeypatch.setattr(router, "fleet_handlers", None)  # what Flower's own route calls
    silo = link.silo()
    told = silo.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=silo.node, heartbeat_interval=EVERY_S))
    assert told.success


def test_a_silo_has_no_heart_but_its_own(link: SuperLink) -> None:
    silo, other = link.silo(), link.silo("paris")
    with pytest.raises(httpx.HTTPStatusError) as caught:
        silo.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=other.node, heartbeat_interval=EVERY_S))
    assert caught.value.response.status_code == 401
    with pytest.raises(httpx.HTTPStatusError):
        silo.client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=Node(node_id=silo.number), heartbeat_interval=1))
