"""Masks: the server and one silo together see no single update, and whoever is lost costs a round at most."""

from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.masking.unmask import UnmaskQuestion
from fedsync.core.errors import ProtocolError
from fedsync.core.layout import Vector
from tests.cipher.make import INITIAL, Federation, change, close, plan


def opened(federation: Federation, silent: str = "") -> None:
    """Carry questions and answers until the last commit counts; ``silent`` silos are lost."""
    while federation.aggregator.blocked:
        for name, question in federation.aggregator.questions().items():
            if name in silent:
                federation.aggregator.give_up(name)
                return
            federation.aggregator.answer(name, federation.silos[name].answer(question))


FOUR = {"a": 10, "b": 10, "c": 10, "d": 10}


def masked_round(federation: Federation, version: int, names: str, silent: str = "") -> list[Vector]:
    updates, ids = [], []
    for name in names:
        federation.begin(name, version)
        updates.append(change(100 * version + ord(name)))
        ids.append(federation.answer(name, updates[-1]))
    federation.commit(version + 1, ids)
    opened(federation, silent)
    return updates


def test_masked_updates_add_up_whoever_drops_out(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    expected = INITIAL.copy()
    for version, names in enumerate(("abcd", "abd", "bcd")):
        expected = expected + np.mean(masked_round(federation, version, names), axis=0)
    for name in "abcd":
        close(federation.begin(name, 3), expected, 3)


def test_a_silo_lost_before_it_reveals_costs_the_round_and_not_the_run(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    one = masked_round(federation, 0, "abcd")
    masked_round(federation, 1, "abcd", silent="c")
    federation.silos["c"] = federation.copy("c")
    federation.aggregator.holds("c", -1)
    after = federation.begin("a", 2)
    close(after, INITIAL + np.mean(one, axis=0))
    three = masked_round(federation, 2, "abcd")
    close(federation.begin("c", 3), after + np.mean(three, axis=0), 2)


def test_a_sum_of_two_stays_closed(tmp_path: Path) -> None:
    federation = Federation(plan("masked", quorum=2), tmp_path, FOUR)
    masked_round(federation, 0, "ab")
    assert not federation.aggregator.blocked
    np.testing.assert_array_equal(federation.begin("a", 1), INITIAL)


def _as_the_server_and_a_silo_see_it(federation: Federation, victim: str, spy: str) -> Vector:
    """The attack: take the victim's upload as it is and open it with the key that the spy has."""
    envelope = federation.aggregator._inbox._pending[f"{victim}/1"].envelope
    silo = federation.silos[spy]
    grid = federation.plan.grid(silo._state.scales.exponents[-1])
    slots = silo._sealer.open(envelope.words, envelope.head.members)
    integers = grid.packing.unpack(slots).reshape(grid.packing.count, -1)[:, grid.head :]
    return integers.reshape(-1)[: federation.plan.sealed.size] * np.float32(grid.steps[0])


@pytest.mark.parametrize(("kind", "succeeds"), [("bfv", True), ("masked", False)])
def test_server_and_one_silo_read_another_s_update_unless_it_is_masked(
    tmp_path: Path, kind: str, succeeds: bool
) -> None:
    federation = Federation(plan(kind), tmp_path, FOUR)
    for name in "abcd":
        federation.begin(name, 0)
    secret = change(42)
    federation.answer("b", secret)
    found = _as_the_server_and_a_silo_see_it(federation, "b", "a")
    likeness = float(np.corrcoef(found, secret)[0, 1])
    if succeeds:
        assert likeness > 0.999
        close(found, secret)
    else:
        # Of 6,060 independent pairs a correlation beyond 0.07 has a probability below 1e-7.
        assert abs(likeness) < 0.07


def test_a_silo_signs_one_list_a_round_and_reveals_to_those_who_all_signed_it(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    for name in "abcd":
        federation.begin(name, 0)
        federation.answer(name, change(ord(name)))
    silo = federation.silos["a"]
    signature = silo.answer(UnmaskQuestion(0, 0, ("a", "b", "c", "d")).encode()).tobytes()
    with pytest.raises(ProtocolError, match="second list"):
        silo.answer(UnmaskQuestion(0, 0, ("a", "b", "c")).encode())
    with pytest.raises(ProtocolError, match="did not sign the same list"):
        silo.answer(UnmaskQuestion(0, 0, ("a", "b", "c", "d"), dict.fromkeys("abcd", signature)).encode())
    with pytest.raises(ProtocolError, match="no masks of version 7"):
        silo.answer(UnmaskQuestion(7, 0, ("a", "b", "c")).encode())
    for nonsense in (b"", b"[]", b'{"base": 0}', b'{"base": 0, "attempt": 0, "survivors": 3, "signatures": null}'):
        with pytest.raises(ProtocolError):
            silo.answer(np.frombuffer(nonsense, dtype=np.uint8))
