"""What silos may put into a SuperLink's database, against Flower's own handlers and states."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PushMessagesRequest
from flwr.proto.message_pb2 import ObjectTree
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedsync.config.gate import GateConfig
from tests.flower.internals.superlink import SuperLink, refused, serving


@pytest.fixture(params=["memory", "database"])
def link(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    database = tmp_path / "link.db" if request.param == "database" else None
    with serving(monkeypatch, GateConfig(waiting_bytes=2**20, waiting_messages=3), database) as found:
        yield found


def test_an_answer_gets_there_once(link: SuperLink) -> None:
    berlin = link.silo()
    asked = link.order(berlin)
    assert [message.metadata.message_id for message in berlin.pull()] == [asked]
    answer = berlin.answer(asked)
    assert berlin.push(answer) == 3
    assert berlin.push(answer) == 0, "sent again: nothing is missing"
    assert berlin.push(berlin.answer(asked)) == 0, "another answer"
    (got,) = link.state.get_message_res({asked}, link.run)
    assert got.metadata.message_id == answer.metadata.message_id
    assert sessions(link) == 1, "that of the order, whose parts did not come"


def sessions(link: SuperLink) -> int:
    """Sessions of messages whose parts have not all come, as Flower keeps them."""
    if hasattr(link.state, "_object_push_sessions"):
        return len(link.state._object_push_sessions)
    return int(link.state.query("SELECT COUNT(*) AS n FROM object_push_sessions")[0]["n"])


def test_an_answer_goes_on_after_its_line_broke(link: SuperLink) -> None:
    berlin = link.silo()
    answer = berlin.answer(link.order(berlin))
    first = berlin.announce(answer)
    name, *_ = first.objects_to_push
    assert berlin.part(first.session_id, name, get_all_nested_objects(answer)[name].deflate())
    assert berlin.push(answer) == 2, "the rest, in another session"
    assert not berlin.part(first.session_id, name, b""), "the first one is over"


@pytest.mark.parametrize(
    "lie", ["server's name", "other's name", "to another", "answers nothing", "other's parts", "no time", "two"]
)
def test_a_silo_speaks_for_itself_only(lie: str, link: SuperLink) -> None:
    berlin, paris = link.silo(), link.silo("paris")
    asked = link.order(paris)
    source, target, answers = paris.number, SUPERLINK_NODE_ID, asked
    if lie == "server's name":
        source, target, answers = SUPERLINK_NODE_ID, berlin.number, ""
    elif lie == "other's name":
        source, answers = berlin.number, link.order(berlin)
    elif lie == "to another":
        target = berlin.number
    elif lie == "answers nothing":
        answers = ""
    message = link.message(source, target, answers, ttl=300.0)
    head, tree = message_to_proto(remove_content_from_message(message)), get_object_tree(message)
    if lie == "other's parts":
        tree = get_object_tree(paris.answer(asked))
    elif lie == "no time":
        head.metadata.created_at = float("nan")
    request = PushMessagesRequest(
        node=paris.node, messages_list=[head] * (1 + (lie == "two")), message_object_trees=[tree]
    )
    before = sessions(link)
    assert refused(paris.client.PushMessages, request) == 403
    assert link.state.num_message_res() == 0 and sessions(link) == before
    assert len(link.silo().pull()) == (lie == "other's name"), "berlin hears of nothing but its own"


def test_what_another_was_asked_is_not_answered(link: SuperLink) -> None:
    berlin, paris = link.silo(), link.silo("paris")
    before = sessions(link)
    for answers in (link.order(berlin), "0" * 64):
        before += answers != "0" * 64
        told = paris.announce(paris.answer(answers))
        assert list(told.objects_to_push) == [] and link.state.num_message_res() == 0
        assert sessions(link) == before, "a message that Flower refuses leaves nothing behind"


def test_parts_are_those_of_the_message(link: SuperLink) -> None:
    berlin, paris = link.silo(), link.silo("paris")
    answer = berlin.answer(link.order(berlin))
    told, parts = berlin.announce(answer), get_all_nested_objects(answer)
    name = told.objects_to_push[0]
    content = parts[name].deflate()
    assert refused(paris.part, told.session_id, name, content) == 403, "another's session"
    assert refused(berlin.part, "", name, content) == 403, "none"
    assert not berlin.part("made up", name, content)
    other = berlin.answer("x")
    assert not berlin.part(told.session_id, other.object_id, other.deflate()), "not announced"
    assert berlin.part(told.session_id, name, content)
    children = [ObjectTree(object_id="a" * 64)]
    tree = ObjectTree(object_id=answer.object_id, children=children)
    assert refused(berlin.announce, answer, tree) == 403, "it was announced with other parts"


def test_what_waits_is_bounded(link: SuperLink) -> None:
    berlin, paris = link.silo(), link.silo("paris")
    large = 400_000
    asked = [link.order(berlin) for _ in range(5)]
    kept = [berlin.answer(name, large) for name in asked]
    assert berlin.push(kept[0]) == berlin.push(kept[1]) == 3
    assert refused(berlin.push, kept[2]) == 503, "more than 2^20 bytes"
    assert paris.push(paris.answer(link.order(paris), large)) == 3, "others have room"
    link.state.object_store.delete(kept[0].object_id)  # as when the app has fetched it
    assert berlin.push(kept[2]) == 3, "now there is room"
    small = [berlin.answer(name) for name in asked[3:]]
    assert berlin.push(small[0]) == 3
    assert refused(berlin.announce, small[1]) == 503, "three wait"
    link.state.object_store.delete(kept[1].object_id)
    assert berlin.push(small[1]) == 3


def test_a_message_is_small_without_its_parts(link: SuperLink) -> None:
    berlin = link.silo()
    answer = berlin.answer(link.order(berlin))
    head = message_to_proto(remove_content_from_message(answer))
    head.metadata.group_id = "x" * 2**19
    request = PushMessagesRequest(
        node=berlin.node, messages_list=[head], message_object_trees=[get_object_tree(answer)]
    )
    assert refused(berlin.client.PushMessages, request) == 403
    request = PushMessagesRequest(
        node=berlin.node, messages_list=[message_to_proto(answer)], message_object_trees=[get_object_tree(answer)]
    )
    assert refused(berlin.client.PushMessages, request) == 403, "its content belongs into parts"
    parts = [ObjectTree(object_id=f"{number:064x}") for number in range(2**16)]
    assert refused(berlin.announce, answer, ObjectTree(object_id=answer.object_id, children=parts)) == 403
