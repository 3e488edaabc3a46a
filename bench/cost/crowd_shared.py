"""Results that the encrypted silos of one process share, because each silo would compute the same.

A silo opens the sums that it has missed on its own machine. A thousand silos in one process would open each sum a
thousand times, with one key and one result, on the machine whose server is measured. So they share:

| shared | as long as |
|---|---|
| the group key, and the objects that encrypt and make tags with it | always: a group has one |
| the parsed specification of the run | its text is the same |
| a catch-up, parsed and authenticated | its bytes are the same, by SHA-256, and D of the state that it continues |
| an opened version: the model, and the rest of the silo's state | the same link is applied to a state of the same D |

D is the digest of all that led to a version (`fedsync.cipher.silo.history`), so equal D mean equal states. Each
silo still has its own node key, connection and serial numbers, receives all its bytes, follows its own chain, and
seals and signs its own update. The server receives the same messages as without sharing.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from fedsync.cipher import suites
from fedsync.cipher.encoding.catch_up import CatchUp
from fedsync.cipher.encoding.integrity import Authentic, Authenticator
from fedsync.cipher.keys.keyring import Ring, open_group, open_silo
from fedsync.cipher.keys.material import GroupKey
from fedsync.cipher.silo.catch_up_checks import CatchUpReader, ReadLink
from fedsync.cipher.silo.history import added_content
from fedsync.cipher.silo.opening import Opener
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.cipher.silo.replica_state import ReplicaState
from fedsync.cipher.suites.suite import Sealer
from fedsync.config.run_spec import RunSpec
from fedsync.core.orders import PooledFigures
from fedsync.model.layout import Vector, as_bytes

KEPT = 64
"""Results of a kind that are kept, the newest; of catch-ups these are some 40 MB."""

Value = TypeVar("Value")


class Kept(Generic[Value]):
    """The newest results of something that takes long. Several threads may ask; one at a time finds."""

    def __init__(self, most: int = KEPT) -> None:
        self._most = most
        self._lock = threading.Lock()
        self._found: dict[Hashable, Value] = {}

    def find(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """What was made for the key, or is made now."""
        with self._lock:
            if key not in self._found:
                while len(self._found) >= self._most:
                    del self._found[next(iter(self._found))]
                self._found[key] = make()
            return self._found[key]


_GROUPS = Kept[GroupKey](1)
_SEALERS = Kept[Sealer](1)
_AUTHENTICATORS = Kept[Authenticator](1)
_SPECS = Kept[RunSpec](2)
_Read = tuple[Authentic | None, tuple[ReadLink, ...]]
_READ = Kept[_Read]()
_BEGUN = Kept[ReplicaState](1)
_FOLLOWED = Kept[tuple[ReplicaState, PooledFigures | None]]()
_open_suite = suites.open_suite


def ring(folder: Path) -> Ring:
    """The keys of a silo in memory, where what is counted and remembered of its runs is, too."""
    own = open_silo(folder)
    group = _GROUPS.find(folder.parent, lambda: open_group(folder))
    if group.members.get(own.name) != own.public:
        raise SystemExit(f"{folder}: the group does not know {own.name}")
    return Ring(own, group)


def specification(text: str) -> RunSpec:
    return _SPECS.find(text, lambda: RunSpec.parse(text))


def share(replica: object) -> None:
    """Have a silo's replica, if it is an encrypted one, share what it reads and opens."""
    if isinstance(replica, EncryptedReplica):
        # Its tables have 0.7 MB.
        tags = _AUTHENTICATORS.find(replica._run, lambda: replica._authenticator)
        vars(replica._reader).update(_authenticator=tags)
        reader, opener = _Reader(replica._reader), _Opener(replica._opener)
        vars(replica).update(_authenticator=tags, _reader=reader, _opener=opener)


def share_sealers() -> None:
    """Have replicas that are made from now on seal with one context."""
    vars(suites)["open_suite"] = lambda kind, group: _SEALERS.find(
        (kind, group.fingerprint), lambda: _open_suite(kind, group)
    )


def _led_to(state: ReplicaState | None) -> bytes:
    """D of a state; nothing before there is one."""
    return b"" if state is None else state.history.chains[-1]


class _Reader:
    """A `CatchUpReader` that reads each message once for all silos whose state is the same."""

    def __init__(self, inner: CatchUpReader) -> None:
        self._inner = inner

    def read(self, received: CatchUp, base: ReplicaState | None, author: str | None = None) -> _Read:
        key = _led_to(base), author, hashlib.sha256(received.encode().data).digest()
        return _READ.find(key, lambda: self._inner.read(received, base, author))

    def check_claims(
        self, links: Sequence[ReadLink], known: Mapping[int, bytes], base: ReplicaState | None, author: str | None
    ) -> None:
        self._inner.check_claims(links, known, base, author)


class _Opener:
    """An `Opener` that opens each version once for all silos."""

    def __init__(self, inner: Opener) -> None:
        self._inner = inner

    def begin(self, calibration: Authentic, model: Vector, run: bytes) -> ReplicaState:
        key = run, added_content([calibration.head], b""), hashlib.sha256(as_bytes(model).data).digest()
        return _BEGUN.find(key, lambda: _still(self._inner.begin(calibration, model, run)))

    def follow(self, state: ReplicaState, link: ReadLink) -> tuple[ReplicaState, PooledFigures | None]:
        def opened() -> tuple[ReplicaState, PooledFigures | None]:
            following, figures = self._inner.follow(state, link)
            return _still(following), figures

        return _FOLLOWED.find((_led_to(state), link.kind, link.contents), opened)


def _still(state: ReplicaState) -> ReplicaState:
    """The state, whose arrays nobody may write to any more."""
    for each in (state.model, *state.moments.vectors):
        each.flags.writeable = False
    return state
