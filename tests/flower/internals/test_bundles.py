"""Messages that travel with their parts, and requests that are held until there is one, against Flower's own states."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.supercore.inflatable.inflatable_object import get_object_tree

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import bundle_client, bundle_routes, versions
from fedsync.flower.internals.bundle_client import BundlingClient, node_client
from fedsync.flower.internals.bundles import APP_WAIT, HEARTBEAT, MOST_BYTES, PULL, PULL_NOW, PUSH, Bundle
from fedsync.flower.internals.pull import Arrivals
from fedsync.flower.internals.waiting import still_waiting
from tests.flower.internals.bundling import MOST, ask, look, parts, pulled, push, server_app, supernode
from tests.flower.internals.superlink import Silo, SuperLink, serving

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")

SOON_S = 20.0
"""Less than a request is held, and far more than anything else takes."""


@pytest.fixture(params=["memory", "database"])
def link(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    database = tmp_path / "link.db" if request.param == "database" else None
    with serving(monkeypatch, GateConfig(), database) as found:
        yield found


refused = pytest.mark.parametrize("link", ["memory", pytest.param("database", marks=pytest.mark.full)], indirect=True)
"""A test of what is refused before anything is stored, so that one kind of store tells as much as two."""


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    """Flower's own, without a gate."""
    with serving(monkeypatch, GateConfig(), gate=False) as found:
        yield found


class Later:
    """A call in a thread of its own."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self._found: list[Any] = []
        self._thread = threading.Thread(target=lambda: self._found.append(call()), daemon=True)
        self._thread.start()

    def result(self) -> Any:
        self._thread.join(SOON_S)
        assert self._found, "it is still held"
        return self._found[0]


def held(link: SuperLink, silo: Silo) -> None:
    """Return when the silo has a request that waits."""
    for _ in range(2000):
        if any(line.held and line.owner == silo.number for line in list(link.server.lines._all)):
            return
        threading.Event().wait(0.01)
    raise AssertionError("no request is held")


def test_an_order_and_its_answer_take_two_requests_on_either_side(link: SuperLink) -> None:
    berlin, (grid, asked) = link.silo(), server_app(link)
    client, paths = supernode(berlin)
    name = ask(link, berlin, grid)
    found = client.PullMessages(PullMessagesRequest(node=berlin.node))
    assert [message.metadata.message_id for message in found.messages_list] == [name]
    assert len(parts(berlin, client, name, found.message_object_trees[0])) == 3
    answer = berlin.answer(name)
    assert push(berlin, client, answer) == []
    assert paths == [PULL, PUSH]
    (arrival,) = pulled(Arrivals(grid), name)
    assert arrival.content is not None and arrival.content.content == answer.content
    assert asked == ["/v1/runtime/fedsync/push", "/v1/runtime/fedsync/pull"]


def test_an_answer_that_is_here_waits_for_no_thread(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    berlin, (grid, _) = link.silo(), server_app(link)
    client, _ = supernode(berlin)
    names = [ask(link, berlin, grid) for _ in range(2)]
    fetched = list[str]()

    def noted(names: list[str], ask: Callable[[str], bytes]) -> dict[str, bytes]:
        fetched.append(threading.current_thread().name)
        return {name: ask(name) for name in names}

    monkeypatch.setattr("flwr.supercore.inflatable.inflatable_utils.pull_objects", noted)
    for name in names:
        look(berlin, client)
        assert push(berlin, client, berlin.answer(name)) == []
    assert pulled(Arrivals(grid), names[0])[0].content is not None and fetched == []
    monkeypatch.setattr("fedsync.flower.internals.bundle_client.BundlingClient.came_whole", lambda *_: False)
    assert pulled(Arrivals(grid), names[1])[0].content is not None
    assert len(fetched) == 1 and fetched != [threading.main_thread().name], "one that is on its way is waited for"


def test_a_held_request_is_answered_when_a_message_is_stored(link: SuperLink) -> None:
    berlin, (grid, _) = link.silo(), server_app(link)
    client, _ = supernode(berlin)
    for _ in range(2):  # the second time, nothing is looked for before
        later = Later(lambda: look(berlin, client))
        held(link, berlin)
        name = ask(link, berlin, grid)
        assert [message.metadata.message_id for message in later.result()] == [name]


def test_messages_that_came_while_a_silo_was_at_work_are_found_one_after_the_other(link: SuperLink) -> None:
    berlin, (grid, _) = link.silo(), server_app(link)
    client, _ = supernode(berlin)
    names = {ask(link, berlin, grid) for _ in range(3)}
    assert {look(berlin, client)[0].metadata.message_id for _ in names} == names


def test_a_message_for_another_is_not_heard(link: SuperLink) -> None:
    berlin, paris, (grid, _) = link.silo(), link.silo("paris"), server_app(link)
    first, second = (supernode(each)[0] for each in (berlin, paris))
    waits, gets = Later(lambda: look(berlin, first)), Later(lambda: look(paris, second))
    held(link, berlin)
    name = ask(link, paris, grid)
    assert [message.metadata.message_id for message in gets.result()] == [name]
    held(link, berlin)
    name = ask(link, berlin, grid)
    assert [message.metadata.message_id for message in waits.result()] == [name]


def test_a_node_has_one_request_that_waits(link: SuperLink) -> None:
    berlin = link.silo()
    client, _ = supernode(berlin)
    first = Later(lambda: look(berlin, client))
    held(link, berlin)
    second = Later(lambda: look(berlin, client))
    assert first.result() == [], "the next one takes its place"
    link.order(berlin)
    assert len(second.result()) == 1


def test_a_silo_with_answers_under_way_is_not_held(link: SuperLink) -> None:
    berlin = link.silo()
    client, paths = supernode(berlin)
    client.patient = False
    for _ in range(2):
        assert look(berlin, client) == []
    link.order(berlin)
    assert len(look(berlin, client)) == 1
    assert set(paths) == {PULL_NOW}


def test_who_waits_keeps_nobody_from_anything(link: SuperLink) -> None:
    silos = [link.join(f"silo-{index}") for index in range(50)]  # more than there are threads
    waiting = [Later(lambda silo=silo: look(silo, node_client(silo.client))) for silo in silos]  # type: ignore[misc]
    for silo in silos:
        held(link, silo)
    berlin = link.silo()
    asked = link.order(berlin)
    assert len(berlin.pull()) == 1 and berlin.push(berlin.answer(asked)) == 3
    for silo in silos:
        link.order(silo)
    assert all(len(each.result()) == 1 for each in waiting)


@refused
@pytest.mark.parametrize("path", [PULL, PUSH, f"{APP_WAIT}10", "/v1/runtime/fedsync/pull"])
def test_strangers_are_refused(path: str, link: SuperLink) -> None:
    for headers in ({}, {"flwr-task-token": "0" * 256}):
        assert httpx.post(f"http://127.0.0.1:{link.port}{path}", headers=headers).status_code == 401


@refused
def test_a_node_is_not_heard_at_the_apps_routes(link: SuperLink) -> None:
    found = httpx.post(f"http://127.0.0.1:{link.port}{APP_WAIT}10", headers=link.silo().headers)
    assert found.status_code == 401


@refused
@pytest.mark.parametrize("liar", ["message", "part"])
def test_a_silo_bundles_for_itself_only(liar: str, link: SuperLink) -> None:
    berlin, paris = link.silo(), link.silo("paris")
    answer = paris.answer(link.order(paris))
    message = PushMessagesRequest(
        node=paris.node if liar == "message" else berlin.node,
        messages_list=[message_to_proto(remove_content_from_message(answer))],
        message_object_trees=[get_object_tree(answer)],
    )
    part = PushObjectRequest(node=paris.node, run_id=link.run, object_id="0" * 64, object_content=b"x")
    data = Bundle([message.SerializeToString(), part.SerializeToString()]).SerializeToString()
    found = httpx.post(f"http://127.0.0.1:{link.port}{PUSH}", content=data, headers=berlin.headers)
    assert found.status_code == 403
    assert link.state.get_message_res({answer.metadata.reply_to_message_id}, link.run) == []


@refused
@pytest.mark.parametrize(
    "data", [b"", b"\x00", b"\x00\x00\x00\x05abc", b"\xff" * 8, b"\x00\x00\x00\x01\xff", b"\0" * 2**17]
)
def test_what_is_no_bundle_is_refused(data: bytes, link: SuperLink) -> None:
    found = httpx.post(f"http://127.0.0.1:{link.port}{PUSH}", content=data, headers=link.silo().headers)
    assert found.status_code in (400, 409)


@refused
def test_a_bundle_is_no_longer_than_it_may_be(link: SuperLink) -> None:
    data = b"\0" * (MOST_BYTES + 1)
    try:
        found = httpx.post(f"http://127.0.0.1:{link.port}{PUSH}", content=data, headers=link.silo().headers)
    except httpx.TransportError:  # it is cut off while it sends
        return
    assert found.status_code == 413


def test_a_server_that_ends_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(monkeypatch, GateConfig()) as link:
        berlin = link.silo()
        client, _ = supernode(berlin)
        later = Later(lambda: failing(lambda: look(berlin, client)))
        held(link, berlin)
        link.server.config.timeout_graceful_shutdown = None
    assert later.result(), "its line is cut"


def failing(call: Callable[[], Any]) -> bool:
    with pytest.raises(httpx.TransportError):
        call()
    return True


def test_an_app_hears_at_once_of_an_answer(link: SuperLink) -> None:
    berlin, (grid, _) = link.silo(), server_app(link)
    client, _ = supernode(berlin)
    app: BundlingClient = vars(grid)["_client"]
    arrivals, name = Arrivals(grid), ask(link, berlin, grid)
    assert arrivals.pull({name: MOST}) == []
    later = Later(lambda: app._ask(f"{APP_WAIT}10000", []))
    look(berlin, client)
    push(berlin, client, berlin.answer(name))
    assert later.result() == []
    assert len(pulled(arrivals, name)) == 1


def test_a_silo_that_looks_for_messages_sends_no_heartbeats(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    berlin, lived = link.silo(), list[int]()
    client, paths = supernode(berlin)
    monkeypatch.setattr(link.state, "acknowledge_node_heartbeat", lambda node, s: lived.append(node) or True)
    monkeypatch.setattr(bundle_routes, "HOLD_S", 0.1)
    beat = SendNodeHeartbeatRequest(node=berlin.node, heartbeat_interval=30)
    assert client.SendNodeHeartbeat(beat).success and paths == [HEARTBEAT], "it has not looked yet"
    for client.patient in (True, False):
        assert look(berlin, client) == []
        assert client.SendNodeHeartbeat(beat).success and paths[-1] != HEARTBEAT
    assert set(lived) == {berlin.number}
    if not hasattr(link.state, "session"):  # there each one is written
        assert len(lived) == 4, "one heartbeat, a look that is held, which is two, and one that is not"
    monkeypatch.setattr(bundle_client, "HEARD_S", 0.0)
    assert client.SendNodeHeartbeat(beat).success and paths[-1] == HEARTBEAT


def test_a_silo_whose_answer_was_taken_sends_no_heartbeat(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    berlin, lived, (grid, _) = link.silo(), list[int](), server_app(link)
    client, paths = supernode(berlin)
    name = ask(link, berlin, grid)
    look(berlin, client)
    monkeypatch.setattr(link.state, "acknowledge_node_heartbeat", lambda node, s: lived.append(node) or True)
    beat, long_s = SendNodeHeartbeatRequest(node=berlin.node, heartbeat_interval=30), bundle_client.HEARD_S
    monkeypatch.setattr(bundle_client, "HEARD_S", 0.0)
    assert client.SendNodeHeartbeat(beat).success and paths[-1] == HEARTBEAT, "its order took long"
    monkeypatch.setattr(bundle_client, "HEARD_S", long_s)
    vars(client)["_heard_s"] = float("-inf")
    lived.clear()
    assert push(berlin, client, berlin.answer(name)) == []
    assert client.SendNodeHeartbeat(beat).success and paths[-1] == PUSH
    if not hasattr(link.state, "session"):  # there each one is written
        assert lived == [berlin.number]


def test_a_node_is_never_so_long_without_a_word_that_it_counts_as_gone() -> None:
    from flwr.common import constant

    pause_s = constant.HEARTBEAT_DEFAULT_INTERVAL - constant.HEARTBEAT_CALL_TIMEOUT
    pause_s *= constant.HEARTBEAT_BASE_MULTIPLIER + constant.HEARTBEAT_RANDOM_RANGE[1]
    online_s = constant.HEARTBEAT_PATIENCE * constant.HEARTBEAT_DEFAULT_INTERVAL
    assert bundle_client.HEARD_S + pause_s + 15.0 < online_s, "a heartbeat may take as long as that"
    assert bundle_routes.HOLD_S + 2.0 < bundle_client.HEARD_S, "who only waits sends none"


def test_an_app_hears_which_of_its_messages_wait(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until they are fetched, and their answers until the app has fetched those. A state without a database is mute."""
    monkeypatch.setattr(bundle_client, "MOST_FRAMES", 2)
    berlin, paris, (grid, _) = link.silo(), link.silo("paris"), server_app(link)
    client, _ = supernode(berlin)
    arrivals, names = Arrivals(grid), [ask(link, one, grid) for one in (berlin, berlin, paris)]
    told = [arrivals.waiting([*names, "unknown"])]
    (fetched,) = (message.metadata.message_id for message in look(berlin, client))
    told.append(arrivals.waiting(names))
    push(berlin, client, berlin.answer(fetched))
    told.append(arrivals.waiting(names))
    assert len(pulled(arrivals, fetched)) == 1
    told.append(arrivals.waiting(names))
    here = set(names) if hasattr(link.state, "session") else set()
    assert told == [here, here - {fetched}, here, here - {fetched}]


def test_an_app_hears_of_its_own_messages_only(link: SuperLink) -> None:
    name = ask(link, link.silo(), server_app(link)[0])
    assert still_waiting(link.state, link.run + 1, [name]) == []
    assert still_waiting(link.state, link.run, []) == []


def test_a_superlink_without_the_routes_is_used_in_flowers_own_way(plain: SuperLink) -> None:
    berlin = plain.silo()
    client, paths = supernode(berlin)
    asked = plain.order(berlin)
    assert [message.metadata.message_id for message in look(berlin, client)] == [asked]
    answer = berlin.answer(asked)
    assert len(push(berlin, client, answer)) == 3, "each part is still to be pushed"
    assert paths == [PULL, "/v1/fleet/pull-messages", "/v1/fleet/push-messages"], "it is asked for them once"
    client.SendNodeHeartbeat(SendNodeHeartbeatRequest(node=berlin.node, heartbeat_interval=30))
    assert paths[3:] == [HEARTBEAT], "there a look is none"


def test_it_is_asked_for_them_again_after_a_while(plain: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    berlin = plain.silo()
    client, paths = supernode(berlin)
    look(berlin, client)
    monkeypatch.setattr(bundle_client, "ABSENT_S", -1.0)
    look(berlin, client)
    assert paths.count(PULL) == 2


def test_what_does_not_fit_goes_flowers_own_way(link: SuperLink, monkeypatch: pytest.MonkeyPatch) -> None:
    berlin, (grid, _) = link.silo(), server_app(link)
    client, paths = supernode(berlin)
    monkeypatch.setattr(bundle_routes, "MOST_BYTES", 10)
    name = ask(link, berlin, grid)
    found = client.PullMessages(PullMessagesRequest(node=berlin.node))
    assert parts(berlin, client, name, found.message_object_trees[0])
    client._most = 10
    assert len(push(berlin, client, berlin.answer(name))) == 3
    assert paths.count("/v1/fleet/pull-object") >= 2 and "/v1/fleet/push-messages" in paths


def test_a_request_is_held_no_longer_than_lines_stand(link: SuperLink) -> None:
    assert bundle_routes.HOLD_S <= 25.0
    assert bundle_routes.HOLD_S + 10.0 <= bundle_client.HELD_S < 60.0, "firewalls forget what is silent for longer"


def test_a_look_whose_connection_has_died_is_given_up_in_time() -> None:
    class Mute:
        def _unary_unary(self, *, timeout: float, **told: object) -> None:
            waited.append(timeout)
            raise httpx.ReadTimeout("nothing is heard")

    waited: list[float] = []
    with pytest.raises(httpx.ReadTimeout):
        bundle_client.node_client(Mute()).PullMessages(PullMessagesRequest())
    assert waited == [bundle_client.HELD_S]


def test_frames_come_back_as_they_went() -> None:
    frames, read = [b"", b"a", b"b" * 1000], Bundle()
    read.ParseFromString(Bundle(frames).SerializeToString())
    assert read.frames == frames


def test_an_app_of_such_a_superlink_goes_flowers_own_way_too(plain: SuperLink) -> None:
    berlin, (grid, asked) = plain.silo(), server_app(plain)
    name = ask(plain, berlin, grid)
    assert [message.metadata.message_id for message in berlin.pull()] == [name]
    berlin.push(berlin.answer(name))
    (arrival,) = pulled(Arrivals(grid), name)
    assert arrival.content is not None
    assert asked[:2] == ["/v1/runtime/fedsync/push", "/v1/runtime/push-messages"]
    assert sum(path.startswith("/v1/runtime/fedsync/") for path in asked) == 1
