"""A silo that begins with another's snapshot believes it only as far as other silos built on it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import CatchUp, Link, LinkKind, SignedSnapshot, Start
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.keys.material import Purpose, seal_blob
from fedsync.cipher.silo import catch_up_checks, replica_state
from fedsync.cipher.silo.catch_up_checks import ReadLink
from fedsync.cipher.silo.replica_state import ReplicaState, Scales
from fedsync.common.errors import ProtocolError, SpoiledSum
from fedsync.core.orders import Evaluation
from tests.cipher.make import Federation, change, plan
from tests.cipher.silo.chains import with_a_history

FOUR = dict.fromkeys("abcd", 10)
AT = 2
"""Version of the snapshot."""


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Federation:
    """Four versions; one silo alone brought the third, two others the fourth, which they built on the third."""
    made = Federation(plan("pad"), tmp_path_factory.mktemp("snapshots"), FOUR)
    for version, names in enumerate(("abc", "abc", "b", "ac")):
        made.begin_all(names, version)
        made.commit(version + 1, made.answer_all(names, version))
    return made


def state_at(federation: Federation, version: int) -> ReplicaState:
    silo = federation.copy("d")
    silo.receive(federation.up_to("d", version), version)
    return silo._state


def from_snapshot(
    federation: Federation, state: ReplicaState, author: str = "b", links: tuple[Link, ...] | None = None
) -> CatchUp:
    """What a joiner is sent, with a snapshot that ``author`` made of this state."""
    sealed = replica_state.seal_snapshot(open_ring(federation.keys.silos[author]), federation.plan, state)
    links = federation.aggregator._chain.links[AT:] if links is None else links
    return CatchUp(Start.SNAPSHOT, AT, AT + len(links), tuple(links), sealed)


def check_of(federation: Federation, sent: CatchUp) -> str:
    silo = federation.copy("d")
    with pytest.raises(ProtocolError) as caught:
        silo.receive(sent.encode(), sent.version)
    assert silo.holds == -1
    return caught.value.check


def test_a_joiner_comes_to_the_model_of_all(federation: Federation) -> None:
    joiner = federation.copy("d")
    joiner.receive(from_snapshot(federation, state_at(federation, AT)).encode(), 4)
    expected = federation.begin("a", 4)
    np.testing.assert_array_equal(joiner.model, expected)
    assert joiner._state.digest == federation.silos["a"]._state.digest
    assert joiner._state.history.chain(4) == federation.silos["a"]._state.history.chain(4)


# One liar.

LIES: dict[str, Callable[[ReplicaState], ReplicaState]] = {
    "wrong values": lambda state: replace(state, model=state.model + np.float32(0.5)),
    "a last bit": lambda state: replace(state, model=np.nextafter(state.model, np.float32(9))),
    "wrong scales": lambda state: replace(
        state, scales=Scales(tuple((e[0] + 5, *e[1:]) for e in state.scales.exponents))
    ),
    "votes": lambda state: replace(state, scales=replace(state.scales, count=state.scales.count + 1)),
    "nothing was added": lambda state: replace(state, added={}),
}


@pytest.mark.parametrize("what", LIES)
def test_a_state_that_is_not_what_its_history_led_to_is_refused(what: str, federation: Federation) -> None:
    """A liar with the code computes the chain that its state would have; others built on another one."""
    state = LIES[what](state_at(federation, AT))
    assert check_of(federation, from_snapshot(federation, state)) == "snapshot"
    assert check_of(federation, from_snapshot(federation, with_a_history(federation, state))) == "chain"


def test_numbers_that_are_none_are_refused(federation: Federation) -> None:
    state = state_at(federation, AT)
    model = state.model.copy()
    model[7] = np.nan
    nobody_s = with_a_history(federation, replace(state, model=model))
    assert check_of(federation, from_snapshot(federation, nobody_s)) == "snapshot"


def test_what_its_author_did_not_sign_is_refused(federation: Federation) -> None:
    """b seals what it says is c's: it has the group's key, but not c's own. Or its last byte was changed."""
    sent = from_snapshot(federation, state_at(federation, AT))
    whole = bytes(sent.model)
    for lie in (b"\x01c" + whole[2:], b"\x01x" + whole[2:], whole[:-1] + bytes([whole[-1] ^ 1])):
        with pytest.raises(ProtocolError, match="not signed by"):
            federation.copy("d").receive(replace(sent, model=lie).encode(), sent.version)


def _cut(federation: Federation) -> bytes:
    """Sealed with the group's key, and no state."""
    ring = open_ring(federation.keys.silos["b"])
    return seal_blob(ring.group, Purpose.SNAPSHOT, replica_state._bound_to(federation.plan), bytes(9))


@pytest.mark.parametrize("what", ["no blob", "no state", "another run"])
def test_what_its_author_signed_and_is_no_snapshot_is_the_author_s_lie(what: str, federation: Federation) -> None:
    """It came through an honest server, so it is no forgery. It was counted as one, and joiners locked themselves."""
    ring, sent = open_ring(federation.keys.silos["b"]), from_snapshot(federation, state_at(federation, AT))
    run = federation.copy("d")._run
    sealed = {"no blob": b"junk", "no state": _cut(federation), "another run": bytes(sent.model)[106:]}[what]
    lie = SignedSnapshot.make(ring.own, bytes(32) if what == "another run" else run, AT, sealed)
    silo = federation.copy("d")
    with pytest.raises(SpoiledSum):
        silo.receive(replace(sent, model=lie).encode(), sent.version)


def test_a_server_keeps_what_its_author_signed_only(federation: Federation) -> None:
    """Else the joiner would take the author's junk for the server's forgery."""
    good = federation.silos["a"].snapshot()
    version = federation.silos["a"].holds
    for silo, at, sealed in (
        ("b", version, good),
        ("a", version - 1, good),
        ("a", version, good[:-1]),
        ("a", 0, good[:9]),
    ):
        with pytest.raises(ProtocolError, match=r"snapshot|header"):
            federation.aggregator.put_snapshot(silo, at, sealed)
    with pytest.MonkeyPatch.context() as forgetful:
        forgetful.setattr(federation.aggregator._chain, "first", version + 1)
        with pytest.raises(ProtocolError, match="not among those kept"):
            federation.aggregator.put_snapshot("a", version, good)


def test_all_snapshots_of_a_run_are_equally_long(federation: Federation) -> None:
    """The number of digits of what is in them was in their length."""
    state, ring = state_at(federation, AT), open_ring(federation.keys.silos["b"])
    evaluation = Evaluation(-1.2345678901234567e-300, 1.0, 10**30)
    figures = replace(state.pool, silos=frozenset("abcd"), loss=-1.2345678901234567e-300, evaluation=evaluation)
    long = replace(
        state,
        scales=Scales(tuple((-40 + e, -33, -39) for e in range(64)), 199, {"a": 99}),
        added={name: tuple(range(10**9, 10**9 + 64)) for name in "abcd"},
        pool=figures,
    )
    found = {
        len(replica_state.seal_snapshot(ring, federation.plan, one)) for one in (state, long, state_at(federation, 0))
    }
    assert len(found) == 1


@pytest.mark.parametrize("other", [{"run": "another"}, {"specification": bytes(31) + b"1"}])
def test_a_snapshot_of_another_run_or_version_is_refused(other: dict[str, object], federation: Federation) -> None:
    sent = from_snapshot(federation, state_at(federation, AT))
    with pytest.raises(ProtocolError, match="snapshot"):
        federation.copy("d", **other).receive(sent.encode(), sent.version)
    assert check_of(federation, from_snapshot(federation, state_at(federation, 3))) == "snapshot"


# Who stands for it.


@pytest.mark.parametrize(
    ("author", "links", "check"),
    [
        ("b", (), "snapshot"),  # nobody
        ("b", (3,), "snapshot"),  # itself
        ("b", (3, 4), None),  # a and c
        ("a", (3,), None),  # b
    ],
)
def test_half_of_the_silos_stand_for_a_snapshot(
    author: str, links: tuple[int, ...], check: str | None, federation: Federation
) -> None:
    chain = federation.aggregator._chain.links
    sent = from_snapshot(federation, state_at(federation, AT), author, tuple(chain[version - 1] for version in links))
    if check is None:
        federation.copy("d").receive(sent.encode(), sent.version)
    else:
        assert check_of(federation, sent) == check


def test_updates_from_before_do_not_stand_for_it(tmp_path: Path) -> None:
    """c is slow: what it adds after the snapshot began before it."""
    federation = Federation(plan("pad"), tmp_path, FOUR)
    federation.begin_all("abc", 0)
    for version in range(2):
        federation.commit(version + 1, [federation.answer("b", change(version))])
        federation.begin("b", version + 1)
    federation.commit(3, [federation.answer("c", change(9))])
    sent = from_snapshot(federation, federation.silos["b"]._state)
    assert check_of(federation, sent) == "snapshot"


def test_a_silo_that_has_a_history_is_not_led_elsewhere_by_a_snapshot(federation: Federation) -> None:
    state, silo = state_at(federation, AT), federation.copy("d")
    sent = from_snapshot(federation, state)
    silo._state = state_at(federation, 3)
    elsewhere = replace(sent, version=3, links=(Link(LinkKind.EMPTY),))
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ProtocolError, match="computed another version 3"):
        patch.setattr(catch_up_checks, "attesters", lambda silos: 1)
        silo.receive(replace(elsewhere, version=4, links=(*elsewhere.links, *elsewhere.links)).encode(), 4)
    with pytest.raises(ProtocolError, match="it leads to version 2, but this silo was already at 3"):
        silo.receive(replace(sent, version=2, links=()).encode(), 2)
    assert silo.holds == 3
    silo.receive(sent.encode(), 4)


def test_a_snapshot_of_a_later_version_has_the_same_past(federation: Federation) -> None:
    sent, silo = from_snapshot(federation, state_at(federation, AT)), federation.copy("d")
    begun = state_at(federation, 0)
    silo._state = silo._opener.follow(begun, ReadLink(LinkKind.EMPTY, ()))[0]
    with pytest.raises(ProtocolError, match="computed another version 1"):
        silo.receive(sent.encode(), 4)
