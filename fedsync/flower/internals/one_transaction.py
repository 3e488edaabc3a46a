"""A SuperLink's state for the length of one bundle: one transaction, and few statements.

Flower's handlers see to each part of a message by itself. With a database, a statement costs the SuperLink half a
millisecond of processor time, nearly all of it in Python, and an order with its answer took 85 ms. A bundle has a
message with all its parts, so most of that is done once:

| | Flower, for each part | here |
|---|---|---|
| whether the run goes on | cleans up after apps that died, then looks | looks, once a bundle |
| a message is stored, or taken | statements by SQLAlchemy's mapper | the same statements, most of them as text |
| bytes that went | added to the run's | added up, and written once a bundle |
| parts that come | announced in a session, claimed, stored, counted down | stored with their message |
| parts that go, and are removed | a transaction each | statements as text, in the bundle's transaction |
| answers for the app | nine statements by the mapper | four as text, where all is as it should be |
| who has a part that is removed | a look at all parts | two indexes |
| what waits for a node | a look at all messages | an index |

The rows are those that Flower leaves, and its handlers decide all that they decided. A bundle that is refused leaves
nothing. What does not have all its parts, and a state without a database, goes Flower's way.

It writes Flower's tables, for the versions in `fedsync.flower.internals.versions.TESTED` only.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from sqlite3 import Connection, Cursor
from types import MethodType
from typing import TYPE_CHECKING, Any
from uuid import uuid4

from sqlalchemy import event

from fedsync.flower.internals.bundle_objects import BundleObjects, Do

if TYPE_CHECKING:
    from flwr.proto.message_pb2 import ObjectTree
    from sqlalchemy.orm import Session

CLEAN_UP_S = 1.0
"""How often it is looked for apps that died [s]. Flower gives them a minute."""

PATIENCE_S = 30.0
"""How long a write waits for another one [s]. Flower's 5 s are short where a busy machine stops who writes."""

Told = Callable[[Any], None]

_COLUMNS = (
    "message_id, group_id, run_id, src_node_id, dst_node_id, reply_to_message_id, created_at, delivered_at, ttl, "
    "message_type, content, error"
)
_INDEXES = {"object_children": "child_id", "run_objects": "object_id", "message_ins": "dst_node_id, delivered_at"}
_NAMED = "IN (SELECT value FROM json_each(?))"
_RUNS_ON = "pending_at IS NOT NULL AND starting_at IS NOT NULL AND running_at IS NOT NULL AND finished_at IS NULL"


@contextmanager
def one_transaction(
    state: Any, told: Told, trees: Iterable[ObjectTree] = (), came: Mapping[str, bytes] | None = None
) -> Iterator[Any]:
    """What Flower's handlers are given as their state while they handle one bundle.

    Args:
        state: of the SuperLink.
        told: called with each message that is stored in another way than by the state's own method.
        trees: of the messages in the bundle.
        came: parts that came with it, by name.
    """
    if not has_one_database(state):
        yield state
        return
    with state.session() as session:
        view = _BundleState(state, session, told, trees, came or {})
        yield view
        view.settle()


def has_one_database(state: Any) -> bool:
    """Whether messages and their parts are in the same database."""
    url = getattr(state, "database_url", None)
    return url is not None and getattr(state.object_store, "database_url", None) == url


def clean_up_seldom(state: Any, clock: Callable[[], float] = time.monotonic) -> None:
    """Have a state with a database look for apps that died once in `CLEAN_UP_S`, not with each request."""
    if not has_one_database(state):
        return
    clean_up: Callable[[], None] = state._cleanup_expired_task_tokens
    due_s = clock()

    def clean_up_if_due() -> None:
        nonlocal due_s
        if clock() >= due_s:
            due_s = clock() + CLEAN_UP_S
            clean_up()

    vars(state)["_cleanup_expired_task_tokens"] = clean_up_if_due


def wait_patiently(state: Any) -> None:
    """Have writes of a state with a database wait for each other for `PATIENCE_S`."""
    if has_one_database(state):
        for each in (state, state.object_store):
            event.listen(each._engine, "connect", _set_patience)
            each._engine.dispose()  # connections that are there


def add_indexes(state: Any) -> None:
    """Have a database find by an index what it would find by a look at all that there are.

    That is what refers to a part that goes, and what waits for a node.
    """
    if has_one_database(state):
        with state.session() as session:
            do: Do = session.connection().connection.driver_connection.execute
            for table, columns in _INDEXES.items():
                do(f"CREATE INDEX IF NOT EXISTS fedsync_{table} ON {table} ({columns})", [])


def _set_patience(connection: Connection, _: object) -> None:
    connection.execute(f"PRAGMA busy_timeout = {int(1e3 * PATIENCE_S)}")


class _BundleState:
    """The state, within a transaction. What is not here is its own."""

    def __init__(
        self, state: Any, session: Session, told: Told, trees: Iterable[ObjectTree], came: Mapping[str, bytes]
    ) -> None:
        from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

        self._state, self._told, self._came = state, told, came
        self._whole = all(part.object_id in came for tree in trees for part in iterate_object_tree(tree))
        self._statuses: dict[int, Any] = {}
        self._federations: dict[int, str | None] = {}
        self._took: defaultdict[int, list[float]] = defaultdict(lambda: [0, 0, 0.0])
        self._stored: set[tuple[int, str]] = set()
        self._locked: dict[int, dict[str, Any]] = {}
        self._do: Do = session.connection().connection.driver_connection.execute  # type: ignore[union-attr]
        self.object_store = BundleObjects(state.object_store, self._do)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)

    def get_run_status(self, run_ids: set[int]) -> dict[int, Any]:
        for run in run_ids - self._statuses.keys():
            self._statuses[run] = self._status(run)
        return {run: self._statuses[run] for run in run_ids}

    def _status(self, run: int) -> Any:
        from flwr.common.constant import Status
        from flwr.supercore.run import RunStatus
        from flwr.supercore.utils import uint64_to_int64

        self._state._cleanup_expired_task_tokens()
        tasks = "run JOIN task ON task.task_id = run.primary_task_id"
        found = self._do(f"SELECT 1 FROM {tasks} WHERE run.run_id = ? AND {_RUNS_ON}", [uint64_to_int64(run)])
        return RunStatus(Status.RUNNING, "", "") if found.fetchone() else self._state.get_run_status({run})[run]

    def store_traffic(self, run_id: int, *, bytes_sent: int, bytes_recv: int) -> None:
        self._took[run_id][0] += bytes_sent
        self._took[run_id][1] += bytes_recv

    def add_clientapp_runtime(self, run_id: int, runtime: float) -> None:
        self._took[run_id][2] += runtime

    def settle(self) -> None:
        """Write what was added up."""
        for run, took in self._took.items():
            self.object_store.count(run, *took)

    def start_session(self, run_id: int) -> str:
        return str(uuid4() if self._whole else self._state.start_session(run_id))

    def _cleanup_push_session(self, session_id: str, *, cleanup_messages: bool) -> None:
        if not self._whole:
            self._state._cleanup_push_session(session_id, cleanup_messages=cleanup_messages)

    def store_message_and_object_tree(
        self, message: Any, object_tree: ObjectTree, session_id: str
    ) -> tuple[bool, list[str]]:
        if not self._whole:
            found: tuple[bool, list[str]] = self._state.store_message_and_object_tree(message, object_tree, session_id)
            return found
        # What is not plainly sound, Flower looks at, and says what is wrong.
        if message.metadata.reply_to_message_id:
            stored = self._put_answer(message) or _flowers(self, "store_message_res")(message) is not None
        else:
            stored = self._put_order(message) or _flowers(self, "store_message_ins")(message) is not None
        if not stored:
            return False, []
        run = message.metadata.run_id
        missing = self.object_store.store(run, object_tree, self._came)
        self._stored.update((run, name) for name in missing)
        self._told(message)
        return True, missing

    def _put_order(self, message: Any) -> bool:
        """Store a sound message to a node; see Flower's `store_message_ins`."""
        from flwr.common.constant import SUPERLINK_NODE_ID
        from flwr.server.utils.validator import validate_message
        from flwr.supercore.constant import NodeStatus
        from flwr.supercore.utils import uint64_to_int64

        told = message.metadata
        run = self._lock_run(told.run_id, require_unfinished=True)
        status = NodeStatus.ONLINE, NodeStatus.OFFLINE
        known = "SELECT 1 FROM node WHERE node_id = ? AND status IN (?, ?)"
        sound = (
            not any(validate_message(message=message, is_reply_message=False))
            and told.src_node_id == SUPERLINK_NODE_ID
            and run is not None
            and self._do(known, [uint64_to_int64(told.dst_node_id), *status]).fetchone() is not None
            and self._state.federation_manager.has_node(told.dst_node_id, run["federation_id"])
        )
        return sound and self._put("message_ins", message)

    def _put_answer(self, message: Any) -> bool:
        """Store a sound answer; see Flower's `store_message_res`."""
        from flwr.common.constant import MESSAGE_TTL_TOLERANCE
        from flwr.server.utils.validator import validate_message
        from flwr.supercore.utils import uint64_to_int64

        told = message.metadata
        run = self._lock_run(told.run_id, require_unfinished=True)
        asked = None if run is None else self.get_valid_message_ins(told.reply_to_message_id)
        sound = (
            not any(validate_message(message=message, is_reply_message=True))
            and asked is not None
            and asked["run_id"] == uint64_to_int64(told.run_id)
            and asked["dst_node_id"] == uint64_to_int64(told.src_node_id)
            and told.ttl + told.created_at - asked["created_at"] - asked["ttl"] <= MESSAGE_TTL_TOLERANCE
        )
        return sound and self._put("message_res", message)

    def _put(self, table: str, message: Any) -> bool:
        """Insert a message; False where there is one of its name, or another that answers the same."""
        from flwr.server.superlink.linkstate.utils import convert_uint64_values_in_dict_to_sint64, message_to_dict

        row = message_to_dict(message)
        convert_uint64_values_in_dict_to_sint64(row, ["run_id", "src_node_id", "dst_node_id"])
        marks = ", ".join("?" * len(row))
        insert = f"INSERT INTO {table} ({', '.join(row)}) VALUES ({marks}) ON CONFLICT DO NOTHING"
        return self._do(insert, [*row.values()]).rowcount == 1

    def _lock_run(self, run_id: int, *, require_unfinished: bool = False) -> dict[str, Any] | None:
        """The run's row, that nobody else changes until the transaction ends."""
        from flwr.supercore.utils import uint64_to_int64

        if not require_unfinished or run_id in self._locked:
            return self._locked.get(run_id) or _flowers(self, "_lock_run")(run_id)
        unfinished = "SELECT 1 FROM task WHERE task.task_id = run.primary_task_id AND finished_at IS NULL"
        lock = f"UPDATE run SET run_id = run_id WHERE run_id = ? AND EXISTS ({unfinished})"
        columns = "run_id, federation_id, primary_task_id"
        for row in self._do(f"{lock} RETURNING {columns}", [uint64_to_int64(run_id)]).fetchall():
            self._locked[run_id] = dict(zip(columns.split(", "), row, strict=True))
        return self._locked.get(run_id)

    def get_message_ins(self, node_id: int, limit: int | None, *, run_id: int | None = None) -> list[Any]:
        found: list[Any] = _flowers(self, "get_message_ins")(node_id, limit, run_id=run_id)
        return found

    def get_valid_message_ins(self, message_id: str) -> dict[str, Any] | None:
        rows = self._sound_rows({message_id})
        if rows is None:
            _flowers(self, "_check_stored_messages")({message_id})
            rows = self._load_message_ins_rows({message_id})
        return next(iter(rows), None)

    def _claim_message_ins_rows(
        self, node_id: int, limit: int | None, run_id: int | None = None
    ) -> list[dict[str, Any]]:
        from flwr.supercore.date import now
        from flwr.supercore.utils import uint64_to_int64

        time, node = now(), uint64_to_int64(node_id)
        there = "dst_node_id = ? AND delivered_at = '' AND created_at + ttl > ? ORDER BY created_at, message_id LIMIT 1"
        # Nothing is written where there is none.
        look = f"SELECT message_id FROM message_ins WHERE {there}"
        while found := self._do(look, [node, time.timestamp()]).fetchone():
            if limit != 1 or run_id is not None:
                claimed: list[dict[str, Any]] = _flowers(self, "_claim_message_ins_rows")(node_id, limit, run_id)
                return claimed
            claim = "UPDATE message_ins SET delivered_at = ? WHERE message_id = ? AND delivered_at = ''"
            if self._do(claim, [time.isoformat(), found[0]]).rowcount:
                return self._load_message_ins_rows({found[0]})
        return []

    def _load_message_ins_rows(self, message_ids: set[str]) -> list[dict[str, Any]]:
        load = f"SELECT {_COLUMNS} FROM message_ins WHERE message_id {_NAMED} ORDER BY created_at, message_id"
        return _rows(self._do(load, [json.dumps([*message_ids])]))

    def _check_stored_messages(self, message_ids: set[str], run_id: int | None = None) -> None:
        """Remove those that are too old, or of nodes that are not there any more: by Flower, where one may be."""
        if run_id is not None or self._sound_rows(message_ids) is None:
            _flowers(self, "_check_stored_messages")(message_ids, run_id)

    def _sound_rows(self, message_ids: set[str]) -> list[dict[str, Any]] | None:
        """Messages, if none of them is too old, or of a node that is not there any more."""
        from flwr.supercore.date import now

        late_s = now().timestamp()
        rows = self._load_message_ins_rows(message_ids)
        return rows if all(row["created_at"] + row["ttl"] > late_s and self._runs(row) for row in rows) else None

    def _runs(self, row: dict[str, Any]) -> bool:
        """Whether a message is between nodes of the federation of its run."""
        from flwr.supercore.utils import int64_to_uint64

        nodes, run = {int64_to_uint64(row[end]) for end in ("src_node_id", "dst_node_id")}, row["run_id"]
        if run not in self._federations:
            found = self._do("SELECT federation_id FROM run WHERE run_id = ?", [run]).fetchone()
            self._federations[run] = None if found is None else found[0]
        federation = self._federations[run]
        return federation is not None and self._state.federation_manager.filter_nodes(nodes, federation) == nodes

    def get_message_res(self, message_ids: set[str], run_id: int) -> list[Any]:
        """Answers to these messages. Flower makes some up: of nodes that are gone, and for what is too old."""
        found = self._take_answers(message_ids, run_id)
        return list(self._state.get_message_res(message_ids=message_ids, run_id=run_id)) if found is None else found

    def _take_answers(self, message_ids: set[str], run_id: int) -> list[Any] | None:
        """Answers to messages that are all there, of nodes that are online; None where Flower has to say more."""
        from flwr.server.superlink.linkstate.utils import convert_sint64_values_in_dict_to_uint64, dict_to_message
        from flwr.supercore.constant import NodeStatus
        from flwr.supercore.date import now
        from flwr.supercore.utils import uint64_to_int64

        time, run = now(), uint64_to_int64(run_id)
        asked = self._sound_rows(message_ids)
        if asked is None or len(asked) < len(message_ids) or any(row["run_id"] != run for row in asked):
            return None
        online = f"SELECT node_id FROM node WHERE online_until >= ? AND status != ? AND node_id {_NAMED}"
        nodes = {row["dst_node_id"] for row in asked}
        here = self._do(online, [time.timestamp(), NodeStatus.UNREGISTERED, json.dumps([*nodes])]).fetchall()
        there = f"delivered_at = '' AND reply_to_message_id {_NAMED}"
        names = json.dumps([*message_ids])
        rows = _rows(self._do(f"SELECT {_COLUMNS} FROM message_res WHERE {there}", [names]))
        if len(here) < len(nodes) or any(row["created_at"] + row["ttl"] <= time.timestamp() for row in rows):
            return None
        if rows:
            self._do(f"UPDATE message_res SET delivered_at = ? WHERE {there}", [time.isoformat(), names])
        for row in rows:
            row["delivered_at"] = time.isoformat()
            convert_sint64_values_in_dict_to_uint64(row, ["run_id", "src_node_id", "dst_node_id"])
        return [dict_to_message(row) for row in rows]

    def delete_messages(self, message_ins_ids: set[str]) -> None:
        """Remove messages and their answers."""
        if message_ins_ids:
            for table, column in (("message_ins", "message_id"), ("message_res", "reply_to_message_id")):
                self._do(f"DELETE FROM {table} WHERE {column} {_NAMED}", [json.dumps([*message_ins_ids])])

    def store_object(self, run_id: int, session_id: str, object_id: str, object_content: bytes) -> bool:
        if (run_id, object_id) in self._stored:
            return True
        return bool(self._state.store_object(run_id, session_id, object_id, object_content))

    def get_object(self, run_id: int, object_id: str) -> bytes | None:
        content = self.object_store.get(object_id)
        if content != b"":
            return content
        found: bytes | None = self._state.get_object(run_id, object_id)
        return found


def _rows(found: Cursor) -> list[dict[str, Any]]:
    """Messages, by column."""
    return [dict(zip(_COLUMNS.split(", "), row, strict=True)) for row in found]


def _flowers(view: _BundleState, name: str) -> Any:
    """Flower's method of this name, to which the view is the state."""
    return MethodType(getattr(type(view._state), name), view)
