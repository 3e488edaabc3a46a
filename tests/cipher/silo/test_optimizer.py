"""Silos step alike: each opens the sums and runs the same optimizer, whatever befell it and whoever lies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding import catch_up
from fedsync.cipher.encoding.catch_up import CatchUp, Link, Start
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo import replica_state
from fedsync.cipher.silo.replica_state import ReplicaState
from fedsync.common.errors import ProtocolError, SpoiledSum
from fedsync.core.actions import Commit
from fedsync.model.cautious_adam import Cautious
from fedsync.model.control_variates import ControlVariates
from fedsync.model.layout import Vector
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.model.server_optimizer import LARGEST, Adaptive, HeavyBall, Moments, ServerOptimizer
from tests.cipher.lying_server import entry_of
from tests.cipher.make import INITIAL, LAYOUT, Federation, change, plan
from tests.cipher.silo.chains import EMPTY, refused, to, undo, with_a_history
from tests.cipher.silo.test_spoiled import LIES, _put, alike, committed, states

OPTIMIZERS: dict[str, ServerOptimizer] = {
    "fedavgm": HeavyBall(0.8, 1.0, grace=1),
    # With a tau that is large beside what rounding does to a change.
    "fedadam": Adaptive("adam", 0.05, 0.9, 0.99, 0.05),
    "cautious-adam": Cautious("adam", 0.05, 0.8, 0.95, 0.05).fitted(LAYOUT),
    "cautious-adam, one layer": replace(Cautious("adam", 0.05, 0.8, 0.95, 0.05).fitted(LAYOUT), leads=True),
    "fedyogi": Adaptive("yogi", 0.05, 0.9, 0.99, 0.05),
    "fedadagrad": Adaptive("adagrad", 0.05, 0.0, 0.0, 0.05),
    "scaffold": ControlVariates(0.7),
}
every_kind = pytest.mark.parametrize("kind", OPTIMIZERS)

WHO = ["abc", "abc", "ab", "abc", "ac", "abc"]
"""Whose updates each version takes; who is left out has begun, and is in the next one, two versions late."""


def made(
    optimizer: ServerOptimizer, folder: Path, kind: str = "pad", silos: str = "abcd", **options: int
) -> Federation:
    sealed: EncryptionPlan = replace(plan(kind, **options), optimizer=optimizer)
    return Federation(sealed, folder, dict.fromkeys(silos, 10))


def follow(federation: Federation, rounds: Sequence[str], plain: PlainAggregator | None = None) -> int:
    """Versions in which these silos' updates are, beside a server in the clear; returns the newest."""
    waiting: dict[str, int] = {}
    for version, names in enumerate(rounds):
        for name in sorted({*names, *"abc"} - waiting.keys()):
            federation.begin(name, version)
            waiting[name] = version
            if plain is not None:
                plain.begin(f"{name}/{federation.serials[name]}")
        ids = []
        for name in names:
            update = change(10 * version + ord(name))
            ids.append(federation.answer(name, update))
            waiting.pop(name)
            if plain is not None:
                plain.put(name, ids[-1], update)
        federation.commit(version + 1, ids)
        if plain is not None:
            plain.commit(Commit(version + 1, dict.fromkeys(sorted(ids), 1 / len(ids))))
    return len(rounds)


def newest(federation: Federation, version: int, name: str = "d") -> ReplicaState:
    """Of a silo that has nothing and is sent all."""
    federation.aggregator.holds(name, -1)
    silo = federation.copy(name)
    silo.receive(federation.aggregator.outgoing(name), version)
    return silo._state


# Not cautious Adam: of a value that hardly changes rounding decides whether it moves.
@pytest.mark.parametrize("kind", sorted(each for each in OPTIMIZERS if each != "scaffold" and "cautious" not in each))
def test_encrypted_it_comes_to_what_it_comes_to_in_the_clear(kind: str, tmp_path: Path) -> None:
    """Real BFV, and updates of several ages. Each value is rounded by a step at most, of 2^-15 in the first round."""
    federation = made(OPTIMIZERS[kind], tmp_path, "bfv", silos="abc")
    plain = PlainAggregator(INITIAL, optimizer=OPTIMIZERS[kind])
    version = follow(federation, WHO, plain)
    model = newest(federation, version, "a").model
    moved = np.abs(plain.model - INITIAL).mean()
    assert np.abs(model - plain.model).max() < 0.1 * moved
    assert np.abs(model - plain.model).mean() < 0.002 * moved


@pytest.mark.slow
@every_kind
def test_who_was_killed_came_late_or_took_a_snapshot_agrees_to_the_bit(kind: str, tmp_path: Path) -> None:
    federation = made(OPTIMIZERS[kind], tmp_path)
    file = tmp_path / "copy.bin"
    killed = federation.copy("d", file)
    follow(federation, WHO[:3])
    whole = federation.all_for("d").encode()
    killed.receive(whole, 3)
    resumed = federation.copy("d", file)
    assert resumed.holds == 3 and resumed._state.digest == killed._state.digest
    assert resumed._state.moments.vectors[0].tobytes() == killed._state.moments.vectors[0].tobytes()

    federation.begin_all("abc", 3)
    federation.commit(4, federation.answer_all("abc"))
    found = [federation.begin(name, 4) is not None and federation.silos[name]._state for name in "abc"]
    links = federation.aggregator._chain.links
    resumed.receive(CatchUp(Start.HELD, 3, 4, tuple(links[3:])).encode(), 4)
    found += [resumed._state, newest(federation, 4)]

    ring = open_ring(federation.keys.silos["b"])
    sealed = replica_state.seal_snapshot(ring, federation.plan, killed._state)
    _, opened = replica_state.open_snapshot(ring, federation.plan, killed._run, sealed, 3)
    joiner = federation.copy("d")
    joiner._state = opened
    joiner.receive(CatchUp(Start.HELD, 3, 4, tuple(links[3:])).encode(), 4)
    alike([*found, joiner._state])


@every_kind
def test_a_moment_that_differs_in_one_bit_is_noticed(kind: str, tmp_path: Path) -> None:
    """It is in the digest that silos attest to each other."""
    federation = made(OPTIMIZERS[kind], tmp_path)
    state = newest(federation, follow(federation, ["abc"]))
    for which, vector in enumerate(state.moments.vectors):
        other = vector.copy()
        other[-1] = np.nextafter(other[-1], np.float32(9))
        vectors = tuple(other if each == which else kept for each, kept in enumerate(state.moments.vectors))
        assert replace(state, moments=replace(state.moments, vectors=vectors)).digest != state.digest
    assert replace(state, moments=replace(state.moments, steps=2)).digest != state.digest


@pytest.mark.slow
@every_kind
@pytest.mark.parametrize("what", ["values", "progress", "votes"])
def test_a_spoiled_sum_leaves_momentum_as_it_was(kind: str, what: str, tmp_path: Path) -> None:
    federation = made(OPTIMIZERS[kind], tmp_path, quorum=4)
    committed(federation, 0, "abcd")
    before = states(federation, 1, "abcd")[0]
    assert before.moments.steps == 1
    committed(federation, 1, "abcd", "c", LIES[what])
    after = states(federation, 2, "abcd", federation.copy("a"))
    alike(after)
    assert after[0].moments is before.moments or after[0].moments.steps == 1
    np.testing.assert_array_equal(after[0].model, before.model)


@every_kind
def test_versions_that_bring_nothing_leave_momentum_as_it_was(kind: str, tmp_path: Path) -> None:
    """One that is empty, and one of updates that only score."""
    federation = made(OPTIMIZERS[kind], tmp_path)
    committed(federation, 0, "abc")
    before = states(federation, 1, "abc")[0]
    federation.commit(2, [federation.answer(name, np.zeros(LAYOUT.size, np.float32)) for name in "abc"])
    federation.aggregator._pause()
    after = newest(federation, 3)
    assert after.moments.steps == before.moments.steps == 1
    np.testing.assert_array_equal(after.model, before.model)


def test_control_variates_know_no_stale_update_and_whose_counted_last(tmp_path: Path) -> None:
    """A server that commits one has what was corrected by an older mean change it: the whole sum brings nothing."""
    federation = made(OPTIMIZERS["scaffold"], tmp_path, normalised=True)
    federation.begin_all("abc", 0)
    federation.commit(1, federation.answer_all("ab"))
    before = states(federation, 1, "ab")[0]
    assert before.counted == {"a": 1, "b": 1} and before.moments.powers == (2.0,)
    stale = federation.answer("c", change(3))
    federation.begin("a", 1)
    federation.commit(2, [federation.answer("a", change(4)), stale])
    after = states(federation, 2, "abc", federation.copy("d"))
    alike(after)
    np.testing.assert_array_equal(after[0].model, before.model)
    assert after[0].counted == before.counted and after[0].moments.steps == 1
    committed(federation, 2, "abc")
    last = states(federation, 3, "abc")
    alike(last)
    assert last[0].counted == {name: federation.serials[name] - 1 for name in "abc"}, "each has begun another since"
    assert last[0].moments.powers == (3.0,)
    other = {**last[0].counted, "c": 1}
    assert replace(last[0], counted=other).digest != last[0].digest
    whole = b"".join(last[0].whole)
    read = ReplicaState.from_bytes(whole, LAYOUT.size, federation.plan.header, optimizer=OPTIMIZERS["scaffold"])
    assert read.counted == last[0].counted and read.digest == last[0].digest


def test_nothing_is_taken_back(tmp_path: Path) -> None:
    """A server that wants it lies: strategies that go back are refused with an optimizer."""
    federation = made(OPTIMIZERS["fedavgm"], tmp_path)
    committed(federation, 0, "abc")
    states(federation, 1, "abc")
    for links in ([undo(entry_of(federation, 1))], [Link(EMPTY), undo(entry_of(federation, 1))]):
        with refused(federation.silos["a"], "undo"):
            federation.silos["a"].receive(to(1, *links), 1 + len(links))


# Liars.


@pytest.mark.slow
@every_kind
def test_no_header_makes_a_moment_that_is_no_number(kind: str, tmp_path: Path) -> None:
    """One silo claims an endless progress in each version, so that sums come to 2^64 and are spoiled, or to less."""
    optimizer = OPTIMIZERS[kind]
    federation = made(optimizer, tmp_path, normalised=True)
    for version, limb in enumerate([7, 8, 8, 9, 8, 8]):
        committed(federation, version, "abc", "c", _put(limb, 2**40 if limb < 9 else 2**46))
        found = states(federation, version + 1, "abc")
        alike(found)
        optimizer.check(found[0].moments)
        assert np.isfinite(found[0].model).all() and np.abs(found[0].model).max() <= (version + 1) * LARGEST * 1.01
    if kind != "scaffold":  # which divides by progress
        assert max(np.abs(each).max() for each in found[0].moments.vectors) > 1e6, "the lie came through: poisoning"
    committed(federation, 6, "abc")
    alike(states(federation, 7, "abc", federation.copy("d")))


def lied(federation: Federation, state: ReplicaState, moments: Moments) -> CatchUp:
    """A snapshot by b, and all links that follow it."""
    lie = with_a_history(federation, replace(state, moments=moments))
    sealed = replica_state.seal_snapshot(open_ring(federation.keys.silos["b"]), federation.plan, lie)
    whole = catch_up.decode(federation.aggregator.outgoing("d"))
    return CatchUp(Start.SNAPSHOT, state.version, whole.version, whole.links[state.version :], sealed)


@pytest.mark.parametrize(
    ("value", "check"),
    [(-1.0, "snapshot"), (np.nan, "snapshot"), (np.inf, "snapshot"), (2.0**127, "snapshot"), (0.5, "chain")],
)
def test_a_snapshot_with_other_moments_is_refused(value: float, check: str, tmp_path: Path) -> None:
    """A root of -1 would be NaN. A number that might be one is refused for what others built on the true ones."""
    federation = made(OPTIMIZERS["fedadam"], tmp_path)
    follow(federation, ["abc", "abc", "abc"])
    silo = federation.copy("d")
    silo.receive(federation.up_to("d", 2), 2)
    moments = silo._state.moments
    second: Vector = moments.vectors[1].copy()
    second[7] = value
    sent = lied(federation, silo._state, replace(moments, vectors=(moments.vectors[0], second)))
    with pytest.raises((ProtocolError, SpoiledSum)) as caught:
        federation.copy("d").receive(sent.encode(), 3)
    assert caught.value.check == check


@pytest.mark.slow
@every_kind
def test_all_snapshots_of_a_run_have_one_length(kind: str, tmp_path: Path) -> None:
    """Before the first step, and later, when numbers have more digits."""
    federation = made(OPTIMIZERS[kind], tmp_path)
    ring, lengths = open_ring(federation.keys.silos["b"]), set()
    follow(federation, WHO)
    for version in (0, 1, 6):
        silo = federation.copy("d")
        silo.receive(federation.up_to("d", version), version)
        assert sum(map(len, silo._state.whole)) < ReplicaState.most_bytes(federation.plan, ring.group.members)
        lengths.add(len(replica_state.seal_snapshot(ring, federation.plan, silo._state)))
    assert len(lengths) == 1


def test_a_file_with_moments_is_as_good_as_none_where_they_are_cut_or_of_another_plan(tmp_path: Path) -> None:
    federation = made(OPTIMIZERS["fedavgm"], tmp_path)
    file = tmp_path / "copy.bin"
    silo = federation.copy("d", file)
    follow(federation, ["abc"])
    federation.aggregator.holds("d", -1)
    silo.receive(federation.aggregator.outgoing("d"), 1)
    assert federation.copy("d", file, plan=replace(federation.plan, optimizer=None)).holds == -1
    file.write_bytes(file.read_bytes()[: -4 * 3])
    assert federation.copy("d", file).holds == -1
