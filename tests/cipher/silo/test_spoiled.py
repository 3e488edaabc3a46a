"""What a silo may seal, and what becomes of a sum in which one sealed something else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding import tally
from fedsync.cipher.encoding.packing import MIN_EXPONENT, Packing, Slots
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.encoding.tally import HeaderForm
from fedsync.cipher.masking.mask_round import MaskRound
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.silo.figure_pool import FigurePool
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.cipher.silo.replica_state import FREE, ReplicaState
from fedsync.core.orders import PooledFigures
from tests.cipher.make import INITIAL, LAYOUT, Federation, change, close, mean_of, plan
from tests.cipher.silo.chains import THREE

Lie = Callable[[pytest.MonkeyPatch], None]
"""Changes what is sealed while it is patched."""


def _header(change_slots: Callable[[Slots], None]) -> Lie:
    def lie(patch: pytest.MonkeyPatch) -> None:
        honest = tally.build

        def build(*given: Any) -> Slots:
            slots = honest(*given)
            change_slots(slots)
            return slots

        patch.setattr(tally, "build", build)

    return lie


def _put(at: int, number: int) -> Lie:
    return _header(lambda slots: slots.__setitem__(at, number))


def _beyond(patch: pytest.MonkeyPatch) -> None:
    """Integers a hundred times as large as clipping allows."""
    pack = Packing.pack
    patch.setattr(Packing, "pack", lambda self, integers: pack(self, integers * np.int32(100)))


def _filled(patch: pytest.MonkeyPatch) -> None:
    """A value behind the last of the model."""
    encode = QuantizationGrid.encode

    def lie(self: QuantizationGrid, *given: Any) -> Iterator[tuple[Slots, int]]:
        for slots, clipped in encode(self, *given):
            slots[-1, -1] += np.int64(1) << (self.packing.width * (self.packing.count - 1))
            yield slots, clipped

    patch.setattr(QuantizationGrid, "encode", lie)


def _other_seeds(patch: pytest.MonkeyPatch) -> None:
    """Masks that nobody committed to."""

    def lie(self: MaskRound, slots: Slots, first: int = 0) -> Slots:
        self._masked += len(slots)
        return np.random.default_rng(first).integers(-(2**46), 2**46, slots.shape)

    patch.setattr(MaskRound, "mask", lie)


LIES: dict[str, Lie] = {
    "values": _beyond,
    "filling": _filled,
    "count": _put(0, 7),
    "no weight": _put(2, -(2**20)),
    "progress": _put(9, -5),
    "evaluations": _put(1, 9),
    "votes": _put(40, -1),
    "too many votes": _put(40, 3),
}


def committed(
    federation: Federation, version: int, names: str, liar: str = "", lie: Lie | None = None, size: float = 0.02
) -> None:
    """A round in which one silo may lie, up to the server's sum."""
    federation.begin_all(names, version)
    ids = []
    for name in names:
        with pytest.MonkeyPatch.context() as patch:
            if lie is not None and name == liar:
                lie(patch)
            ids.append(federation.answer(name, change(100 * version + ord(name), size)))
    federation.commit(version + 1, ids)
    federation.unmask()


def states(federation: Federation, version: int, names: str, *others: EncryptedReplica) -> list[ReplicaState]:
    """Of all silos at this version, and of others that are sent the same as one that has nothing."""
    federation.begin_all(names, version)
    federation.aggregator.holds(names[0], -1)
    whole = federation.aggregator.outgoing(names[0])
    for other in others:
        other.receive(whole, version)
    return [one._state for one in (*(federation.silos[name] for name in names), *others)]


def alike(found: list[ReplicaState]) -> None:
    assert len({one.digest for one in found}) == 1 and len({one.history.chains[-1] for one in found}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("what", "kind"), [*product(LIES, ("bfv", "pad", "masked")), ("other seeds", "masked")])
def test_a_sum_that_one_silo_spoiled_brings_nothing_anywhere_and_the_run_goes_on(
    what: str, kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Every silo refused the version for ever, and the run was over."""
    federation = Federation(replace(plan(kind, quorum=4), seal_metrics=True), tmp_path, dict.fromkeys("abcd", 10))
    committed(federation, 0, "abcd", "c", {**LIES, "other seeds": _other_seeds}[what])
    joiner = federation.copy("a") if kind != "masked" else federation.silos["a"]
    after = states(federation, 1, "abcd", *([joiner] if kind != "masked" else []))
    alike(after)
    np.testing.assert_array_equal(after[0].model, INITIAL)
    assert after[0].scales.votes is None and after[0].pool == FigurePool(began=1)
    assert "version 1: the sum of a/1, b/1, c/1, d/1 is ignored, one of them made it invalid" in caplog.text
    assert after[0].added == dict.fromkeys("abcd", (1,)), "nor does it come again"
    assert {federation.silos[name].pooled for name in "abcd"} == {(PooledFigures(1, None, spoiled=tuple("abcd")),)}
    committed(federation, 1, "abd" if kind != "masked" else "abcd")
    alike(states(federation, 2, "abd"))
    assert not np.array_equal(federation.silos["a"].model, INITIAL)


@pytest.mark.parametrize("limb", [9, 8])
def test_a_header_that_claims_an_endless_progress_brings_no_infinity(limb: int, tmp_path: Path) -> None:
    federation = Federation(plan("pad", normalised=True), tmp_path, THREE)
    committed(federation, 0, "abc", "c", _put(limb, 2**46))
    after = states(federation, 1, "abc", federation.copy("a"))
    alike(after)
    assert np.abs(after[0].model).max() <= 2.0**65
    assert ReplicaState.from_bytes(b"".join(after[0].pieces), LAYOUT.size, HeaderForm(3)).digest == after[0].digest


def test_values_in_the_clear_do_not_end_in_infinity(tmp_path: Path) -> None:
    """Nobody clips them."""
    federation = Federation(plan("pad", only=("head.*",)), tmp_path, THREE)
    with pytest.MonkeyPatch.context() as patch:
        divide = EncryptionPlan.divide
        for version in range(3):
            federation.begin_all("abc", version)
            ids = []
            for name in "abc":
                lies = (lambda *of: (divide(*of)[0], np.full_like(divide(*of)[1], 3e38))) if name == "c" else divide
                patch.setattr(EncryptionPlan, "divide", lies)
                ids.append(federation.answer(name, change(ord(name))))
            patch.setattr(EncryptionPlan, "divide", divide)
            federation.commit(version + 1, ids)
    after = states(federation, 3, "abc")
    alike(after)
    np.testing.assert_array_equal(after[0].model, INITIAL)


def test_what_was_spoiled_is_not_taken_back_after_a_restart_or_a_snapshot(tmp_path: Path) -> None:
    """Versions 1 and 3 are honest; in version 2 an honest sum on an older grid counts, and the spoiled one does not."""
    federation = Federation(plan("pad", quorum=3), tmp_path, dict.fromkeys("abcd", 10))
    federation.begin("d", 0)  # it will be late
    committed(federation, 0, "abc", size=0.0005)
    one = states(federation, 1, "abc")[0]
    federation.aggregator.savepoint()
    late = federation.answer("d", change(4))
    with pytest.MonkeyPatch.context() as patch:
        _beyond(patch)
        federation.serials["c"] += 1
        federation.begin("c", 1)
        spoiled = federation.answer("c", change(3))
    federation.commit(2, [late, spoiled])
    two = states(federation, 2, "abc")[0]
    assert federation.silos["a"]._state.history.records.counted(2).bit_count() == 1
    close(two.model, one.model + change(4))
    committed(federation, 2, "abc")
    states(federation, 3, "abc")
    file = tmp_path / "a.bin"
    federation.silos["a"]._state.save(file)
    restarted = federation.copy("a", file)
    joined = federation.copy("b")
    joined._state = ReplicaState.from_bytes(b"".join(federation.silos["a"]._state.pieces), LAYOUT.size, HeaderForm(3))
    federation.aggregator.rollback()
    sent = federation.aggregator.outgoing("a")
    for silo in (restarted, joined):
        silo.receive(sent, 4)
    found = states(federation, 4, "abc", federation.copy("d"))
    alike([*found, restarted._state, joined._state])
    close(found[0].model, one.model, 4)


# Calibration.


@pytest.mark.parametrize("what", ["count", "votes", "another run", "another grid"])
@pytest.mark.parametrize("liar", ["a", "c"])
def test_one_silo_delays_no_beginning(what: str, liar: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Its greeting is authentic, and no calibration. All silos refused to begin, and locked themselves."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    silo = federation.silos[liar]
    with pytest.MonkeyPatch.context() as patch:
        if what == "another run":
            patch.setattr(silo, "_run", bytes(32))
        elif what == "another grid":
            patch.setattr(silo, "_plan", replace(federation.plan, layout=replace(LAYOUT, names=("x", "y", "z"))))
        else:
            LIES[what](patch)
        greeting = silo.greeting()
    federation.aggregator.greet(liar, -1, greeting)
    begun = states(federation, 0, "abc")
    alike(begun)
    assert ("made it invalid" in caplog.text) == (what in ("count", "votes"))
    committed(federation, 0, "abc")
    alike(states(federation, 1, "abc"))
    close(federation.silos["a"].model, INITIAL + mean_of("abc"))
    committed(federation, 1, "abc", size=0.001)
    alike(states(federation, 2, "abc"))
    assert min(federation.silos["a"]._state.scales.exponents[-1]) < 0, "their votes count again"


def test_a_calibration_of_which_one_silo_means_another_run_says_nothing(tmp_path: Path) -> None:
    """With one honest silo beside it the server cannot tell which run is meant."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(federation.silos["c"], "_run", bytes(32))
        federation.aggregator.greet("c", -1, federation.silos["c"].greeting())
    del federation.aggregator._calibrations["b"]
    begun = states(federation, 0, "abc")
    alike(begun)
    assert begun[0].scales.exponents == ((0, 0, 0),)


@pytest.mark.parametrize("members", [1, 2])
def test_a_silo_with_a_grid_of_its_own_brings_nothing_and_the_run_goes_on(
    members: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one honest silo beside it the server cannot tell which grid is the liar's. Nobody is named for what a server
    can bring about: one that has silos seal on a grid or a past of other versions would have them blamed for it."""
    federation = Federation(replace(plan("pad", members=members), seal_metrics=True), tmp_path, THREE)
    federation.begin_all("abc", 0)
    federation.own_grid("c", 9, 9, 9)
    federation.commit(1, federation.answer_all("ac"))
    models = [federation.begin(name, 1) for name in "ab"]
    np.testing.assert_array_equal(models[0], models[1])
    close(models[0], INITIAL + (change(ord("a")) if members == 1 else 0))
    assert "the sum of c/1 is ignored, one of them made it invalid: encrypted on a grid" in caplog.text
    assert not [figures for figures in federation.silos["a"].pooled or () if figures.spoiled]
    federation.commit(2, federation.answer_all("ab"))
    models += [federation.begin(name, 2) for name in "ab"]
    np.testing.assert_array_equal(models[2], models[3])
    close(models[2], models[0] + (change(ord("a")) + change(ord("b"))) / 2)


@pytest.mark.parametrize(("liars", "colluding", "spoiled"), [(1, 1, False), (2, 1, True), (2, 2, False)])
def test_as_many_bogus_votes_as_liars_change_nothing(liars: int, colluding: int, spoiled: bool, tmp_path: Path) -> None:
    five = dict.fromkeys("abcde", 10)
    federation = Federation(replace(plan("pad", quorum=5), colluding=colluding), tmp_path, five)
    federation.begin_all(five, 0)
    ids = []
    for index, name in enumerate(five):
        update = change(ord(name)) * np.float32(1e6 if index < liars else 1)
        ids.append(federation.answer(name, update))
    federation.commit(1, ids)
    federation.begin("e", 1)
    exponents = federation.silos["e"]._state.scales.exponents
    assert (max(np.subtract(exponents[-1], exponents[0])) > 6) == spoiled


def votes_for(counts: dict[int, int]) -> Lie:
    """So many votes for these exponents in the first group, instead of one for what the silo needs."""

    def lie(slots: Slots) -> None:
        slots[32:48] = 0
        for exponent, count in counts.items():
            place = exponent - MIN_EXPONENT
            slots[32 + place // 4] += count << (8 * (place % 4))

    return _header(lie)


def test_votes_that_a_silo_takes_from_others_cost_one_agreement(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    committed(federation, 0, "abc", "c", votes_for({-40: 3, -3: -2}))
    (after, *_) = states(federation, 1, "abc")
    assert after.scales.exponents[-1][0] < -30
    committed(federation, 1, "abc")
    (after, *_) = states(federation, 2, "abc")
    assert -3 <= after.scales.exponents[-1][0] <= 0


def test_a_tensor_that_was_nothing_has_a_range_as_soon_as_it_is_something(tmp_path: Path) -> None:
    """So are gradients behind weights that begin with zeros."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    for silo in federation.silos.values():
        silo._votes, silo._measure = None, lambda: (np.zeros(LAYOUT.size, dtype=np.float32), 5, 40, None)
        federation.aggregator.greet(silo._ring.own.name, -1, silo.greeting())
    for version in range(3):
        committed(federation, version, "abc")
    states(federation, 3, "abc")
    exponents = [one[0] for one in federation.silos["a"]._state.scales.exponents]
    assert exponents[0] < -30 and exponents[1] == FREE and -3 <= exponents[2] <= 0


def test_a_calibration_sets_no_large_steps(tmp_path: Path) -> None:
    """All votes of it can be one silo's, so it may ask for values up to 16 at most."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    with pytest.MonkeyPatch.context() as patch:
        votes_for({23: 3, -4: -2})(patch)
        federation.aggregator.greet("c", -1, federation.silos["c"].greeting())
    (begun, *_) = states(federation, 0, "abc")
    assert begun.scales.exponents[-1][0] == 4


def test_one_liar_does_not_choose_the_first_grid(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    federation.begin("a", 0)
    honest = federation.silos["a"]._state.scales.exponents
    lied = Federation(plan("pad"), tmp_path, THREE)
    liar = lied.silos["b"]
    liar._votes, liar._measure = None, lambda: (np.full(LAYOUT.size, 1e6, dtype=np.float32), 5, 40, None)
    lied.aggregator.greet("b", -1, liar.greeting())
    lied.begin("a", 0)
    assert lied.silos["a"]._state.scales.exponents == honest
