"""Transport over the hub (the server's own HTTPS port): one Flower message (*join*) invites a silo to connect to it.

| node | until | then |
|---|---|---|
| online at the SuperLink | at once; after a refusal or a lost session: after a pause, longer each time | invited |
| invited | its session begins | present |
| invited | it answers that it does not join | present, with this answer to each question; invited again later |
| present | its session is lost (`fedsync.transport.hub.sessions`) | gone; invited while it is online |
| any | its name is removed | gone, and not invited |

So Flower's node authentication identifies a silo once. A SuperNode that ends interrupts no order.
"""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from flwr.serverapp import Grid

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ConfigError, PolicyError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.flower import flower_messages as messages
from fedsync.flower.grid_transport import GridTransport, answer_in
from fedsync.model.transfer import Payload
from fedsync.server.run_folder import HUB, HubPlace, struck_silos
from fedsync.silo.agent.joins import JOINED
from fedsync.transport.hub.hub import Hub
from fedsync.transport.join import read_authority
from fedsync.transport.port import BASE, BESIDE_BYTES, Blob, Peer, SiloAnswer, SiloQuestion, Transport

logger = foreign.logger(__name__)

FOLDER = "hub"
"""Folder of sessions and large payloads, in the folder of a run's files."""

JOIN_TTL_S = 60.0
"""Time within which a join must reach its silo [s]."""

_JOINS = Backoff(20.0, 120.0)
_LOOK_S, _FIRST_S = 0.5, 0.1
_KEPT_BYTES = 2**24
_MOST_HEARD = 32
_PORT = "port"


@contextmanager
def way_to_silos(grid: Grid, folder: Path) -> Iterator[Transport]:
    """Open the transport to the silos of a run: a hub if the server has an address for it, else Flower's messages.
    Raises `ConfigError` if the hub cannot listen.
    """
    if not (place := os.environ.get(HUB)):
        yield GridTransport(grid)
        return
    transport = HubTransport.begin(grid, HubPlace.load(Path(place)), folder / FOLDER)
    try:
        yield transport
    finally:
        transport.close()


@dataclass(slots=True)
class _Invitation:
    """State of a node's joins: number sent, earliest time of the next, and the answer of a node that did not join."""

    count: int = 0
    again_s: float = 0.0
    problem: SiloAnswer | None = None


class HubTransport:
    """Transport over a hub; see `begin`. A separate thread calls ``grid``, because it blocks while the SuperLink is
    away. ``authority`` is the CA certificate of the hub's certificate, PEM; empty without TLS.
    """

    def __init__(
        self,
        grid: Grid,
        hub: Hub,
        folder: Path,
        addresses: Sequence[str],
        authority: str = "",
        struck: Callable[[], Collection[str]] = tuple,
    ) -> None:
        self._grid, self._hub, self._folder, self._struck = grid, hub, folder, struck
        self._addresses, self._authority = tuple(addresses), authority
        self._invited: dict[str, _Invitation] = {}
        self._joins: dict[str, str] = {}
        self._hearing: set[str] = set()
        self._online: frozenset[str] = frozenset()
        self._asked: set[str] = set()
        self._came: list[SiloAnswer] = []
        self._serial = 0
        # Large payloads at the hub, newest last, by object identity: many silos receive the same payload.
        self._published: dict[int, tuple[Payload, Blob]] = {}
        self._over = threading.Event()

    @classmethod
    def begin(cls, grid: Grid, place: HubPlace, folder: Path) -> HubTransport:
        """Start the hub in a run's folder, and invite all online nodes; `ConfigError` if it cannot listen."""
        hub = Hub(folder)
        if place.proxy:
            sockets = Path(place.sockets)
            sockets.mkdir(mode=0o700, parents=True, exist_ok=True)  # an existing folder may admit nginx's user
            hub.start(socket=sockets / f"{hub.run}.sock")
            address = f"https://{place.proxy}{BASE}/{hub.run}"
        else:
            name = f"[{place.name}]" if ":" in place.name else place.name  # an IPv6 address
            address = f"{'https' if place.certificate else 'http'}://{name}:{_listen(hub, place, folder)}{BASE}"
        authority = read_authority(Path(place.authority)) if place.authority else ""
        struck = partial(struck_silos, Path(place.struck)) if place.struck else set
        transport = cls(grid, hub, folder, [address], authority, struck)
        threading.Thread(target=transport.invite, name="joins", daemon=True).start()
        logger.info("silos come to %s", address)
        return transport

    def close(self) -> None:
        self._over.set()
        self._hub.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    # Membership.

    def peers(self) -> list[Peer]:
        here, failed = self._hub.peers(), dict(self._invited)
        found = [Peer(*_node(silo), since) for silo, since in here.items()]
        found += [
            Peer(*_node(silo), f"not joined {each.count}")
            for silo, each in failed.items()
            if each.problem is not None and silo not in here and silo in self._online
        ]
        return found

    def invite(self) -> None:
        pause_s, away = _FIRST_S, False
        while not self._over.wait(pause_s):
            pause_s = _LOOK_S
            try:
                self._invite()
                away = False
            except Exception as error:  # the SuperLink is away, or was restarted, or a file is damaged
                if not away and not self._over.is_set():  # `close` removes the folder of sessions
                    logger.warning("no silo is invited; connected silos continue: %s", error)
                away = True

    def _invite(self) -> None:
        struck = set(self._struck())
        for silo in self._hub.peers():  # also while the SuperLink is away
            if _node(silo)[1] in struck:
                self._hub.strike_off(silo)
        nodes = {f"{each.node_id} {each.name}".rstrip(): each.node_id for each in self._grid.get_nodes()}
        self._online, here, now_s = frozenset(nodes), self._hub.peers(), time.monotonic()
        for silo in here:
            self._invited.pop(silo, None)
        self._hear_replies(here)
        for silo in self._invited.keys() - nodes.keys():
            self._invited[silo].again_s = 0.0  # offline: its join may be lost
        for silo, node in nodes.items():
            kept = self._invited.get(silo, _Invitation())
            if silo in here or now_s < kept.again_s or self._hub.returns(silo) or _node(silo)[1] in struck:
                continue
            join = self._hub.invite(silo, self._addresses, self._authority).dump()
            for identifier in self._grid.push_messages([messages.join(node, join, JOIN_TTL_S)]):
                if identifier:
                    self._joins[identifier] = silo
            # A new join makes the last one invalid, and a busy machine needs long for each: wait its full time.
            again_s = now_s + max(JOIN_TTL_S, _JOINS.pause_s(kept.count))
            self._invited[silo] = replace(kept, count=kept.count + 1, again_s=again_s)

    def _hear_replies(self, here: Collection[str]) -> None:
        """Collect the replies to joins; a silo that is present needs none. Each reply has its own thread: Flower waits
        for the parts of a reply as long as the silo delays them.
        """
        for identifier, silo in list(self._joins.items()):
            if silo in here:
                self._joins.pop(identifier, None)
            elif identifier not in self._hearing and len(self._hearing) < _MOST_HEARD:
                self._hearing.add(identifier)
                threading.Thread(target=self._hear, args=(identifier, silo), daemon=True).start()
        for identifier in list(self._joins)[: -4 * (len(self._online) + 1)]:
            self._joins.pop(identifier, None)  # an old join: no reply will come

    def _hear(self, identifier: str, silo: str) -> None:
        try:
            for reply in self._grid.pull_messages([identifier]):
                kept = self._invited.get(silo)
                if self._joins.pop(identifier, None) is not None and kept is not None:
                    answer = answer_in(reply, "", 0)
                    kept.again_s = time.monotonic() + _JOINS.pause_s(kept.count - 1)
                    kept.problem = None if answer.text == JOINED else replace(answer, relay=False)
        except Exception as error:  # the SuperLink is away
            logger.debug("a reply cannot be fetched: %s", error)
        finally:
            self._hearing.discard(identifier)

    # Requests and answers.

    def send(self, questions: Sequence[tuple[int, SiloQuestion]]) -> list[str | None]:
        if not questions:
            return []  # the driver calls this every turn, often without questions
        here = {_node(silo)[0]: silo for silo in self._hub.peers()}
        failed = {_node(silo)[0]: each.problem for silo, each in dict(self._invited).items()}
        return [self._send(here.get(node), failed.get(node), question) for node, question in questions]

    def _send(self, silo: str | None, problem: SiloAnswer | None, question: SiloQuestion) -> str | None:
        if silo is None and problem is not None:
            self._serial += 1
            self._came.append(replace(problem, name=f"not joined/{self._serial}"))
            self._asked.add(self._came[-1].name)
            return self._came[-1].name
        if silo is None:
            return None
        try:
            name = self._hub.send(silo, replace(question, payload=self._beside(question.payload)))
        except PolicyError as error:
            logger.warning("%s", error)
            return None
        if name is not None:
            self._asked.add(name)
        return name

    def _beside(self, payload: Payload | Blob | None) -> Payload | Blob | None:
        if payload is None or isinstance(payload, Blob) or payload.nbytes <= BESIDE_BYTES:
            return payload
        if id(payload) not in self._published:
            self._published[id(payload)] = payload, self._hub.publish(payload)
        return self._published[id(payload)][1]

    def receive(self) -> list[SiloAnswer]:
        came, self._came = [*self._came, *self._hub.receive()], []
        found = []
        for each in came:
            if each.name in self._asked:
                self._asked.remove(each.name)
                found.append(each)
        return found

    def wait(self, seconds: float) -> None:
        if not self._came:
            self._came += self._hub.receive(seconds)

    def waiting(self, names: Collection[str]) -> set[str]:
        """Return all asked: the hub keeps a question until it is answered."""
        return self._asked.intersection(names)

    def keep(self, names: Collection[str]) -> None:
        for name in self._asked.difference(names):
            self._asked.remove(name)
            self._hub.forget(name)
        published = self._published
        while len(published) > 1 and sum(blob.nbytes for _, blob in published.values()) > _KEPT_BYTES:
            del published[next(iter(published))]
        self._hub.keep({blob.digest for _, blob in published.values()})


def _node(silo: str) -> tuple[int, str]:
    node, _, name = silo.partition(" ")
    return int(node), name


def _listen(hub: Hub, place: HubPlace, folder: Path) -> int:
    """Listen on the run's previous port, which its silos still use, else on a free one; `ConfigError` without one."""
    kept, ports = folder / _PORT, list(place.ports)
    with suppress(OSError, ValueError):
        ports.insert(0, int(kept.read_text(encoding="ascii")))
    files = (Path(place.certificate), Path(place.key)) if place.certificate else (None, None)
    problem = ConfigError("hub", "no port is given", "Write hub: {port: 9093} in server.yaml")
    for each in ports:
        try:
            port = hub.start(place.host, each, certificate=files[0], key=files[1])
        except ConfigError as error:
            problem = error
        else:
            write_atomically(kept, str(port).encode(), OWNER_FILE)
            return port
    raise problem
