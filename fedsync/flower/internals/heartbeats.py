"""Heartbeats that are not written down one by one.

Each silo says every 20 seconds or so that it lives. Flower writes that into its database, a transaction each, by
extending the time until which the node counts as online. Here a heartbeat is *heard*: kept in memory, and written
with all others when somebody asks who is online, or another one comes. A look for messages is a heartbeat, too, so that
a silo that waits sends no other (`fedsync.flower.internals.bundle_client`): each would take a connection of its own.

| heartbeat of a node | is |
|---|---|
| that nothing is known of in this process, or of another interval | written at once, as Flower does |
| whose time in the database ends within `RISK_S` | likewise |
| any other | heard; written with all that were, when the first of them is `FLUSH_S` old |

What is heard is so at most `FLUSH_S` older in the database than it is when somebody looks there, and no node expires
meanwhile. So nodes go offline when they would without this. After a restart the time of a node ends at most `FLUSH_S`
sooner than it would have. A node that goes, or is taken away, is known no more, so that its next heartbeat is Flower's.

It takes the place of methods of Flower's state, for the versions in `fedsync.flower.internals.versions.TESTED` only,
and where there is a database.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from flwr.common.constant import HEARTBEAT_DEFAULT_INTERVAL, HEARTBEAT_PATIENCE

if TYPE_CHECKING:
    from flwr.server.superlink.linkstate import LinkState

FLUSH_S = 10.0
"""How long a heartbeat may wait to be written [s], where somebody looks at who is online."""

RISK_S = 15.0
"""A node whose time in the database ends so soon has its heartbeat written at once [s]; more than `FLUSH_S`."""

PROMPT_S = 1.0
"""A node whose heartbeats come sooner than this after each other waits with them as with any request [s]."""

_LOOKS = ("get_nodes", "get_node_info", "get_message_res")
_ENDS = ("activate_node", "deactivate_node")


class Prompt:
    """Whose heartbeat goes before other requests: of each node one in `PROMPT_S`.

    Heartbeats go first so that nobody counts as gone who waits with many. A node that sends nothing else, each with
    another interval so that it has to be written, would have nearly all turns.

    Args:
        clock: seconds, from anywhere.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._went: dict[int, float] = {}

    def goes_first(self, node_id: int) -> bool:
        """Whether a node's heartbeat goes first; if so, its next ones do not for a while."""
        now_s = self._clock()
        while self._went and now_s - next(iter(self._went.values())) >= PROMPT_S:
            del self._went[next(iter(self._went))]
        if node_id in self._went:
            return False
        self._went[node_id] = now_s
        return True


class Heartbeats:
    """Stands before a state's heartbeats.

    Args:
        state: of the SuperLink, with a database.
        clock: time of day [s].
    """

    def __init__(self, state: LinkState, clock: Callable[[], float] = time.time) -> None:
        self._state: Any = state
        self._clock = clock
        self._lock = threading.Lock()
        self._written: dict[int, tuple[float, float]] = {}
        self._heard: dict[int, float] = {}
        self._first_s = 0.0
        self._write = self._state.acknowledge_node_heartbeat

    def attach(self) -> None:
        """Take the place of the state's own methods."""
        replaced = {name: self._flushed(getattr(self._state, name)) for name in _LOOKS}
        for name in _ENDS:
            replaced[name] = self._forgetting(getattr(self._state, name), 0)
        replaced["delete_node"] = self._forgetting(self._state.delete_node, 1)
        vars(self._state).update(replaced, acknowledge_node_heartbeat=self.acknowledge)

    def hear(self, node_id: int) -> bool:
        """Note that a node lives, as long as nothing has to be written for that; else False, and `acknowledge` does."""
        now_s = self._clock()
        with self._lock:
            ends_s, interval = self._written.get(node_id, (0.0, 0.0))
            due = bool(self._heard) and now_s - self._first_s >= FLUSH_S
            if due or ends_s <= now_s + RISK_S:
                return False
            self._first_s = self._first_s if self._heard else now_s
            self._heard[node_id] = now_s + HEARTBEAT_PATIENCE * interval
        return True

    def acknowledge(self, node_id: int, heartbeat_interval: float) -> bool:
        """A node lives; False where there is no such node. As Flower's method of a state."""
        now_s = self._clock()
        until_s = now_s + HEARTBEAT_PATIENCE * heartbeat_interval
        with self._lock:
            ends_s, interval = self._written.get(node_id, (0.0, 0.0))
            heard = interval == heartbeat_interval and ends_s > now_s + RISK_S
            if heard:
                self._first_s = self._first_s if self._heard else now_s
                self._heard[node_id] = until_s
        if heard:
            self._flush_if_due()
            return True
        known: bool = self._write(node_id, heartbeat_interval)
        with self._lock:
            self._heard.pop(node_id, None)
            if known:
                self._written[node_id] = until_s, heartbeat_interval
            else:
                self._written.pop(node_id, None)
        return known

    def _flush_if_due(self) -> None:
        """Write what was heard, if the first of it has waited long enough."""
        with self._lock:
            if not self._heard or self._clock() - self._first_s < FLUSH_S:
                return
            heard, self._heard = self._heard, {}
        try:
            _extend(self._state, heard)  # without the lock, for others may have the database
        except Exception:
            with self._lock:
                self._heard = heard | self._heard
            raise
        with self._lock:
            for node, until_s in heard.items():
                if node in self._written:
                    before_s, interval = self._written[node]
                    self._written[node] = max(before_s, until_s), interval

    def _flushed(self, look: Callable[..., Any]) -> Callable[..., Any]:
        """A look at who is online, before which the database hears what is due."""

        def looked(*arguments: Any, **options: Any) -> Any:
            self._flush_if_due()
            return look(*arguments, **options)

        return looked

    def _forgetting(self, change: Callable[..., Any], place: int) -> Callable[..., Any]:
        """A change of a node's state, whose number is the argument at this place."""

        def changed(*arguments: Any, **options: Any) -> Any:
            node = options["node_id"] if "node_id" in options else arguments[place]
            with self._lock:
                self._heard.pop(node, None)
                self._written.pop(node, None)
            return change(*arguments, **options)

        return changed


def _extend(state: Any, until_s: dict[int, float]) -> None:
    """Have nodes that are online count as such until these times, in one transaction."""
    from flwr.supercore.constant import NodeStatus
    from flwr.supercore.state.schema.linkstate_models import Node
    from flwr.supercore.utils import uint64_to_int64
    from sqlalchemy import bindparam, update

    statement = (
        update(Node)
        .execution_options(dml_strategy="core_only")
        .where(Node.node_id == bindparam("which"), Node.status == NodeStatus.ONLINE)
        .where(Node.online_until < bindparam("until"))
        .values(online_until=bindparam("until"))
    )
    with state.session() as session:
        session.execute(statement, [{"which": uint64_to_int64(node), "until": at} for node, at in until_s.items()])


def note_life(state: LinkState, node_id: int) -> list[bytes]:
    """Take note of a node as a heartbeat of its own does; no frames answer that."""
    state.acknowledge_node_heartbeat(node_id, HEARTBEAT_DEFAULT_INTERVAL)
    return []


def hear_heartbeats(state: LinkState) -> Callable[[int], bool]:
    """Keep heartbeats of nodes in memory as long as that may be, where the state has a database; returns `hear`."""
    if not hasattr(state, "session"):
        return lambda node_id: False
    heartbeats = Heartbeats(state)
    heartbeats.attach()
    return heartbeats.hear
