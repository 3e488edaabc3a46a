"""What a bundle leaves in a SuperLink's database is what Flower leaves that handles each part by itself."""

import sqlite3
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from functools import partial
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from flwr.app.message import remove_content_from_message
from flwr.common.constant import SUPERLINK_NODE_ID, SubStatus
from flwr.common.serde import message_to_proto
from flwr.proto.fleet_pb2 import PullMessagesRequest, PushMessagesRequest
from flwr.proto.message_pb2 import PushObjectRequest
from flwr.server.superlink.linkstate import sql_linkstate
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree

from fedsync.config.gate import GateConfig
from fedsync.flower.internals import bundle_routes, versions
from fedsync.flower.internals.bundle_client import BundlingClient
from fedsync.flower.internals.bundles import PUSH, Bundle
from fedsync.flower.internals.one_transaction import PATIENCE_S, add_indexes, clean_up_seldom, one_transaction
from fedsync.flower.internals.pull import Arrivals
from tests.flower.internals.bundling import ask, look, parts, pulled, push, server_app, supernode
from tests.flower.internals.superlink import Silo, SuperLink, refused, serving

pytestmark = pytest.mark.skipif(not versions.supported(), reason="this flwr is not a tested version")

COLUMNS = {
    "objects": "content, is_available, ref_count",
    "object_children": "1",
    "run_objects": "1",
    "message_ins": "delivered_at = '', content, error, message_type",
    "message_res": "delivered_at = '', content, error, message_type",
    "object_push_sessions": "pending_count",
    "object_push_session_roots": "1",
    "object_push_session_pending": "1",
    "run": "bytes_sent, bytes_recv, clientapp_runtime",
}
"""What is the same of all rows, however often it is played: numbers and names are drawn."""


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SuperLink]:
    with serving(monkeypatch, GateConfig(), tmp_path / "link.db") as found:
        yield found


def rows(file: Path) -> dict[str, list[Any]]:
    """What is in the database."""
    with closing(sqlite3.connect(file)) as database:
        found = {
            table: database.execute(f"SELECT {columns} FROM {table}").fetchall() for table, columns in COLUMNS.items()
        }
    return {table: sorted((tuple(map(size, row)) for row in lines), key=repr) for table, lines in found.items()}


def size(value: object) -> object:
    """Contents have names in them that are drawn; only their sizes are the same."""
    return len(value) if isinstance(value, bytes) else value


WAITS = "dst_node_id = 1 AND delivered_at"

Steps = list[dict[str, list[Any]]]


def to_and_fro(link: SuperLink, note: Callable[[], None]) -> None:
    """Orders and answers, some of them sent again, while others wait."""
    berlin, (grid, _) = link.silo(), server_app(link)
    client = looking(berlin)
    for _ in range(2):
        name = ask(link, berlin, grid)
        note()
        found = client.PullMessages(PullMessagesRequest(node=berlin.node))
        note()
        parts(berlin, client, name, found.message_object_trees[0])
        answer = berlin.answer(name)
        assert push(berlin, client, answer) == []
        note()
        assert push(berlin, client, answer) == [], "nothing of it is missing"
        note()
        (arrival,) = pulled(Arrivals(grid), name)
        assert arrival.content is not None
        note()
        ask(link, link.silo("paris"), grid)
        assert look(berlin, client) == []


def half_before(link: SuperLink, note: Callable[[], None]) -> None:
    """An answer, a part of which came by itself before; then one that has none of its parts with it."""
    berlin = link.silo()
    client = looking(berlin)
    answer = berlin.answer(link.order(berlin))
    told = berlin.announce(answer)
    name = told.objects_to_push[0]
    berlin.part(told.session_id, name, get_all_nested_objects(answer)[name].deflate())
    note()
    assert push(berlin, client, answer) == []
    note()
    answer = berlin.answer(link.order(berlin))
    assert berlin.push(answer) == 3
    note()


def shared_parts(link: SuperLink, note: Callable[[], None]) -> None:
    """Two orders with the same content, which is there once."""
    silos, (grid, _) = (link.silo(), link.silo("paris")), server_app(link)
    grid.push_messages([link.message(SUPERLINK_NODE_ID, silo.number, "", size=0) for silo in silos])
    note()
    for silo in silos:
        assert len(look(silo, looking(silo))) == 1
        note()


def too_late(link: SuperLink, note: Callable[[], None]) -> None:
    """An answer to what is too old; an order for a node that is not there any more; a run that is over."""
    berlin, (grid, _) = link.silo(), server_app(link)
    client = looking(berlin)
    name = ask(link, berlin, grid)
    look(berlin, client)
    link.state.query("UPDATE message_ins SET created_at = created_at - 10000")
    push(berlin, client, berlin.answer(name))
    note()
    ask(link, berlin, grid)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(link.state.federation_manager, "filter_nodes", lambda nodes, federation: set())
        assert look(berlin, client) == []
    note()
    name = ask(link, berlin, grid)
    (task,) = link.state.get_tasks(run_ids=[link.run])
    link.state.finish_task(task.task_id, SubStatus.STOPPED, "")
    for call in (lambda: look(berlin, client), lambda: push(berlin, client, berlin.answer(name))):
        with suppress(httpx.HTTPStatusError):
            call()
        note()


def test_what_refers_to_a_part_or_waits_for_a_node_is_found_by_an_index(link: SuperLink, tmp_path: Path) -> None:
    """Whatever is removed is looked for there; a SuperLink that is started again has them already."""
    add_indexes(link.state)
    with closing(sqlite3.connect(tmp_path / "link.db")) as database:
        for table, column in (("object_children", "child_id"), ("run_objects", "object_id"), ("message_ins", WAITS)):
            plan = database.execute(f"EXPLAIN QUERY PLAN SELECT * FROM {table} WHERE {column} = ''").fetchall()
            assert f"USING INDEX fedsync_{table} " in plan[0][-1]


def looking(silo: Silo) -> BundlingClient:
    """A silo's client whose looks are not held."""
    client, _ = supernode(silo)
    client.patient = False
    return client


def _next(numbers: Iterator[int], *_: object, **__: object) -> int:
    return next(numbers)


def _note(steps: Steps, file: Path) -> None:
    steps.append(rows(file))


@pytest.mark.parametrize("play", [to_and_fro, half_before, shared_parts, too_late])
def test_the_rows_are_those_of_flowers_own_way(
    play: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ways: dict[str, Steps] = {}

    @contextmanager
    def its_own(state: Any, *_: object) -> Iterator[Any]:
        yield state

    for way in ("here", "Flower's"):
        steps, file = ways.setdefault(way, []), tmp_path / f"{way}.db"
        with monkeypatch.context() as patched:
            draw = partial(_next, count(10**18))
            patched.setattr(sql_linkstate, "generate_rand_int_from_bytes", draw)
            if way != "here":
                patched.setattr(bundle_routes, "one_transaction", its_own)
            with serving(patched, GateConfig(), file) as link:
                play(link, partial(_note, steps, file))
    assert ways["here"] == ways["Flower's"]
    assert len({repr(step) for step in ways["here"]}) > 2, "something is seen"


def answers(link: SuperLink, case: str, *, here: bool) -> tuple[list[tuple[int, int]], str]:
    """What an app finds for three messages, the first of which has an answer: which, with an error's code or 0."""
    silos = link.silo(), link.silo("paris")
    names = [link.order(silo) for silo in silos]
    for silo in silos:
        look(silo, looking(silo))
    names.append(link.order(silos[0]))
    push(silos[0], looking(silos[0]), silos[0].answer(names[0]))
    asked, run, found = set(names), link.run, list[Any]()
    with pytest.MonkeyPatch.context() as patched:
        if case in CHANGES:
            link.state.query(CHANGES[case])
        elif case == "strangers":
            patched.setattr(link.state.federation_manager, "filter_nodes", lambda nodes, federation: set())
        elif case == "unknown":
            asked.add("nothing")
        elif case == "of another run":
            run += 1
        try:
            with one_transaction(link.state, print) if here else nullcontext(link.state) as state:
                found = state.get_message_res(asked, run)
                state.delete_messages({each.metadata.reply_to_message_id for each in found})
        except ValueError as error:
            return [], str(error)
    order = {name: at for at, name in enumerate([*names, "nothing"])}
    codes = [each.error.code if each.has_error() else 0 for each in found]
    return sorted(zip((order[each.metadata.reply_to_message_id] for each in found), codes, strict=True)), ""


CHANGES = {
    "its node is gone": "UPDATE node SET online_until = 0",
    "too old": "UPDATE message_ins SET created_at = created_at - 10000",
    "too late": "UPDATE message_res SET created_at = created_at - 10000",
    "taken": "UPDATE message_res SET delivered_at = 'before'",
}


@pytest.mark.parametrize("case", ["plain", *CHANGES, "strangers", "unknown", "of another run"])
def test_answers_are_those_of_flowers_own_way(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ways = list[Any]()
    for here in (True, False):
        file = tmp_path / f"{here}.db"
        with monkeypatch.context() as patched:
            patched.setattr(sql_linkstate, "generate_rand_int_from_bytes", partial(_next, count(10**18)))
            with serving(patched, GateConfig(), file) as link:
                found = answers(link, case, here=here)
                ways.append((found, rows(file)["message_ins"], rows(file)["message_res"]))
    assert ways[0] == ways[1]
    expected = [(0, 0)] if case == "plain" else None
    assert expected in (None, ways[0][0][0])


def test_what_is_sound_takes_none_of_the_statements_that_flower_makes(
    link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object, **__: object) -> None:
        raise AssertionError("it costs half a millisecond")

    dear = ("store_message_ins", "store_message_res", "start_session", "store_object", "store_traffic", "_lock_run")
    looks = ("get_message_res", "delete_messages", "_check_stored_messages", "_claim_message_ins_rows")
    for name in (*dear, *looks, "_load_message_ins_rows", "get_valid_message_ins"):
        monkeypatch.setattr(sql_linkstate.SqlLinkState, name, never)
    berlin, (grid, _) = link.silo(), server_app(link)
    name = ask(link, berlin, grid)
    assert len(look(berlin, looking(berlin))) == 1
    assert push(berlin, looking(berlin), berlin.answer(name)) == []
    (arrival,) = pulled(Arrivals(grid), name)
    assert arrival.content is not None


def test_a_bundle_that_is_refused_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tight = GateConfig().model_copy(update={"waiting_bytes": 2**10})
    with serving(monkeypatch, tight, tmp_path / "link.db") as link:
        berlin = link.silo()
        answer = berlin.answer(link.order(berlin), size=2**11)
        before = rows(tmp_path / "link.db")
        assert refused(push, berlin, looking(berlin), answer) == 503, "more than may wait"
        assert rows(tmp_path / "link.db") == before


def test_a_part_that_is_not_what_its_name_says_is_refused(link: SuperLink, tmp_path: Path) -> None:
    berlin = link.silo()
    answer = berlin.answer(link.order(berlin))
    before = rows(tmp_path / "link.db")
    contents = {name: part.deflate() for name, part in get_all_nested_objects(answer).items()}
    request = PushMessagesRequest(
        node=berlin.node,
        messages_list=[message_to_proto(remove_content_from_message(answer))],
        message_object_trees=[get_object_tree(answer)],
    )
    sent = [
        PushObjectRequest(node=berlin.node, run_id=link.run, object_id=name, object_content=content + b"x")
        for name, content in contents.items()
    ]
    data = Bundle([each.SerializeToString() for each in (request, *sent)]).SerializeToString()
    found = httpx.post(f"http://127.0.0.1:{link.port}{PUSH}", content=data, headers=berlin.headers)
    assert found.status_code == 409
    assert rows(tmp_path / "link.db") == before


def test_who_finds_no_message_writes_nothing(link: SuperLink, tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "link.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")  # nobody else can write
        with one_transaction(link.state, print) as state:
            assert state.get_message_ins(node_id=link.silo().number, limit=1) == []
        other.execute("ROLLBACK")


def test_whoever_writes_waits_longer_than_flower_has_them_wait(link: SuperLink) -> None:
    for state in (link.state, link.state.object_store):
        assert state.query("PRAGMA busy_timeout") == [{"timeout": 1e3 * PATIENCE_S}]
        assert state.query("PRAGMA foreign_keys") == [{"foreign_keys": 1}], "Flower's own are as they were"


def test_it_is_looked_for_dead_apps_now_and_then() -> None:
    times, seen = [0.0], list[float]()
    state = SimpleNamespace(
        database_url="here",
        object_store=SimpleNamespace(database_url="here"),
        _cleanup_expired_task_tokens=lambda: seen.append(times[-1]),
    )
    clean_up_seldom(state, lambda: times[-1])
    for now_s in (0.0, 0.5, 0.9, 1.2, 1.3, 30.0):
        times.append(now_s)
        state._cleanup_expired_task_tokens()
    assert seen == [0.0, 1.2, 30.0]
