"""What a silo may seal, and what becomes of a sum in which one sealed something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.core.errors import SpoiledSum
from tests.cipher.make import INITIAL, LAYOUT, Federation, change, close, plan
from tests.cipher.silo.chains import THREE, refused


def _beyond(silo: EncryptedReplica, monkeypatch: pytest.MonkeyPatch, times: int) -> None:
    """The silo seals integers so many times as large as clipping allows."""
    packing = type(silo._plan.packing)
    pack = packing.pack
    monkeypatch.setattr(packing, "pack", lambda self, integers: pack(self, integers * np.int32(times)))


def test_values_beyond_the_clipping_range_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(plan("bfv"), tmp_path, THREE)
    for name in "abc":
        federation.begin(name, 0)
    ids = [federation.answer(name, change(ord(name))) for name in "ab"]
    with monkeypatch.context() as patch:
        _beyond(federation.silos["c"], patch, 100)
        ids.append(federation.answer("c", np.full(LAYOUT.size, 3.0, dtype=np.float32)))
    federation.commit(1, ids)
    with refused(federation.silos["a"], "clipping", opened=True, by=SpoiledSum):
        federation.silos["a"].receive(federation.aggregator.outgoing("a"), 1)


def _on_its_own_grid(silo: EncryptedReplica) -> None:
    silo._state = replace(silo._state, scales=replace(silo._state.scales, exponents=((9, 9, 9),)))


@pytest.mark.parametrize("members", [1, 2])
def test_a_silo_with_a_grid_of_its_own_brings_nothing_and_the_run_goes_on(
    members: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With one honest silo beside it the server cannot tell which grid is the liar's."""
    federation = Federation(plan("pad", members=members), tmp_path, THREE)
    for name in "abc":
        federation.begin(name, 0)
    _on_its_own_grid(federation.silos["c"])
    federation.commit(1, [federation.answer(name, change(ord(name))) for name in "ac"])
    models = [federation.begin(name, 1) for name in "ab"]
    np.testing.assert_array_equal(models[0], models[1])
    close(models[0], INITIAL + (change(ord("a")) if members == 1 else 0))
    assert "c sealed on a grid that nobody agreed on" in caplog.text
    federation.commit(2, [federation.answer(name, change(ord(name))) for name in "ab"])
    models += [federation.begin(name, 2) for name in "ab"]
    np.testing.assert_array_equal(models[2], models[3])
    close(models[2], models[0] + (change(ord("a")) + change(ord("b"))) / 2)


@pytest.mark.parametrize(("liars", "colluding", "spoiled"), [(1, 1, False), (2, 1, True), (2, 2, False)])
def test_so_many_bogus_votes_as_silos_may_lie_change_nothing(
    liars: int, colluding: int, spoiled: bool, tmp_path: Path
) -> None:
    five = dict.fromkeys("abcde", 10)
    federation = Federation(replace(plan("pad", quorum=5), colluding=colluding), tmp_path, five)
    for name in five:
        federation.begin(name, 0)
    ids = []
    for index, name in enumerate(five):
        update = change(ord(name)) * np.float32(1e6 if index < liars else 1)
        ids.append(federation.answer(name, update))
    federation.commit(1, ids)
    federation.begin("e", 1)
    (first, second) = federation.silos["e"]._state.scales.exponents
    assert (max(np.subtract(second, first)) > 10) == spoiled


def test_one_liar_does_not_choose_the_first_grid(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    federation.begin("a", 0)
    honest = federation.silos["a"]._state.scales.exponents
    lied = Federation(plan("pad"), tmp_path, THREE)
    lied.silos["b"]._measure = lambda: (np.full(LAYOUT.size, 1e6, dtype=np.float32), 5, 40)
    lied.aggregator.greet("b", -1, lied.silos["b"].greeting())
    lied.begin("a", 0)
    assert lied.silos["a"]._state.scales.exponents == honest
