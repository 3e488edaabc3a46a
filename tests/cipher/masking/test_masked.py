"""Masks: the server and one silo together see no single update, and who is lost meanwhile costs nothing."""

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.fields import annex_stub
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.masking.annex import Annex
from fedsync.cipher.masking.mask_log import mask_context
from fedsync.cipher.masking.mask_round import (
    RevealAnswer,
    RevealQuestion,
    Survivors,
    masked,
    read_answer,
    read_question,
)
from fedsync.cipher.suites import open_suite
from fedsync.common.errors import ProtocolError
from fedsync.core.orders import WorkOrder
from fedsync.model.layout import Vector
from fedsync.model.transfer import OtherVersion, Payload
from tests.cipher.make import INITIAL, Federation, change, close, order, plan, report
from tests.cipher.masking.test_masks import looks_uniform

FOUR = {"a": 10, "b": 10, "c": 10, "d": 10}
FIVE = {**FOUR, "e": 10}


def opened(federation: Federation, silent: Collection[str] = "") -> None:
    """Carry questions and answers until the last commit counts; ``silent`` silos are lost."""
    while federation.aggregator.blocked:
        for name, question in federation.aggregator.questions().items():
            if name in silent:
                federation.aggregator.give_up(name)
            else:
                federation.aggregator.answer(name, federation.silos[name].answer(question))


def masked_round(federation: Federation, version: int, names: str, silent: Collection[str] = "") -> list[Vector]:
    updates, ids = [], []
    for name in names:
        federation.begin(name, version)
    for name in names:
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


def test_too_many_lost_before_they_reveal_cost_the_round_and_not_the_run(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    one = masked_round(federation, 0, "abcd")
    masked_round(federation, 1, "abcd", silent="cd")
    federation.silos["c"] = federation.copy("c")
    federation.aggregator.holds("c", -1)
    after = federation.begin("a", 2)
    close(after, INITIAL + np.mean(one, axis=0))
    three = masked_round(federation, 2, "abcd")
    close(federation.begin("c", 3), after + np.mean(three, axis=0), 2)


@pytest.mark.slow
def test_one_of_five_killed_between_upload_and_reveal_in_each_of_ten_rounds_costs_no_round(tmp_path: Path) -> None:
    """Before it signs, or after; it comes back as another process, which has its files and none of its seeds."""
    federation = Federation(plan("masked", quorum=5), tmp_path, FIVE)
    for name in FIVE:
        federation.silos[name] = federation.copy(name, tmp_path / name)
    expected = INITIAL
    for version in range(10):
        victim = "abcde"[version % 5]
        ids, updates = [], []
        for name in FIVE:
            federation.begin(name, version)
        for name in FIVE:
            updates.append(change(100 * version + ord(name)))
            ids.append(federation.answer(name, updates[-1]))
        federation.commit(version + 1, ids)
        asked, killed = 0, False
        while federation.aggregator.blocked:
            for name, question in federation.aggregator.questions().items():
                asked += 1
                if not killed and name == victim and (version % 2 == 0 or asked > 5 or victim == "e"):
                    federation.silos[victim] = federation.copy(victim, tmp_path / victim)
                    killed = True
                try:
                    federation.aggregator.answer(name, federation.silos[name].answer(question))
                except ProtocolError:  # no masks of this context are known here
                    assert name == victim and killed
                    federation.aggregator.give_up(name)
        assert killed
        expected = expected + np.mean(updates, axis=0)
    models = [federation.begin(name, 10) for name in FIVE]
    close(models[0], expected, 10)
    for model in models[1:]:
        np.testing.assert_array_equal(model, models[0])


def test_a_round_whose_masks_do_not_come_off_is_in_the_notes(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    masked_round(federation, 0, "abcd")
    assert federation.aggregator.notes() == []
    masked_round(federation, 1, "abcd", silent="bcd")
    (note,) = federation.aggregator.notes()
    assert note.startswith("commits that brought nothing, and count as rounds: 1;") and "masks did not come off" in note
    masked_round(federation, 2, "abcd")
    assert federation.aggregator.notes() == [note]
    state = federation.aggregator.state()
    federation.aggregator._chain.paused = 0
    federation.aggregator.restore(state)
    assert federation.aggregator.notes() == [note], "also after the server died"


def test_who_comes_late_is_in_the_next_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(plan("masked", quorum=4), tmp_path, FIVE)
    federation.aggregator.leave("e")
    for name in "abcd":
        federation.begin(name, 0)
    federation.aggregator.greet("e", -1, federation.silos["e"].greeting())
    federation.begin("e", 0)
    ids = [federation.answer(name, change(ord(name))) for name in FIVE]
    federation.commit(1, ids)
    assert "e/1 has masks" in caplog.text
    opened(federation)
    after = federation.begin("a", 1)
    close(after, INITIAL + np.mean([change(ord(name)) for name in FOUR], axis=0))
    updates = masked_round(federation, 1, "abcde")
    close(federation.begin("e", 2), after + np.mean(updates, axis=0), 2)


def test_a_silo_whose_book_is_gone_announces_another_key_and_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    masked_round(federation, 0, "abcd")
    folder = open_ring(federation.keys.silos["b"]).folder
    assert folder is not None
    for file in (folder / "masks").iterdir():
        file.unlink()
    federation.silos["b"] = federation.copy("b")
    with pytest.raises(OtherVersion, match="another key of this silo for masks"):
        federation.silos["b"].receive(federation.aggregator.outgoing("b"), 1)
    masked_round(federation, 1, "abcd")
    assert "b/2 has masks of another" in caplog.text, "the round's roster had gone out"
    after = federation.begin("a", 2)
    federation.serials["a"] -= 1
    updates = masked_round(federation, 2, "abcd")
    close(federation.begin("b", 3), after + np.mean(updates, axis=0))


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


# The server has others do something that moves nothing, and one silo, d, is on its side.


def _as_told(federation: Federation, name: str, told: WorkOrder, size: float = 0.2) -> Payload:
    """What training at the order's rate comes to."""
    update = (told.learning_rate * change(ord(name), size)).astype(np.float32)
    return federation.silos[name].send(update, told, report(told.base_version))


def _greedy(federation: Federation, orders: dict[str, WorkOrder]) -> tuple[dict[str, Annex], Slots]:
    """The server adds up whatever came, decrypts it with d's key, and takes off all that it can get silos to tell."""
    for name, told in orders.items():
        payload = _as_told(federation, name, told)
        federation.aggregator.put(name, told.update_id, payload)
    envelopes = {u.rpartition("/")[0]: one.envelope for u, one in federation.aggregator._inbox._pending.items()}
    words = envelopes["a"].words.copy()
    for name in "bcd":
        federation.aggregator._adder.add(words, envelopes[name].words)
    ring = open_ring(federation.keys.silos["d"])
    members = [envelope.head.members[0] for envelope in envelopes.values()]
    slots = open_suite("masked", ring.group).open(words, members)
    annexes = {name: Annex.unpack(one.head.annex, name, "server") for name, one in envelopes.items()}
    own = federation.silos["d"]._masking
    assert own is not None
    for context in {annex.context for annex in annexes.values()}:
        stubs = {name: annex_stub(one.head.annex) for name, one in envelopes.items()}
        survivors = Survivors(context, stubs)
        signatures = {"d": survivors.sign(own.pair)}
        for name in "abcd":
            try:
                answer = read_answer(name, federation.silos[name].answer(survivors.encode()))
            except ProtocolError:
                continue
            signatures[name] = answer.signature  # type: ignore[union-attr]
        for name in "abcd":
            question = RevealQuestion(context, signatures, {})
            try:
                told_ = read_answer(name, federation.silos[name].answer(question.encode()))
            except ProtocolError:
                continue
            assert isinstance(told_, RevealAnswer)
            slots = masked(slots, [(told_.seeds.own, False)], 0)
    return annexes, slots


def _orders(**others: float) -> dict[str, WorkOrder]:
    """b is the victim."""
    return {name: replace(order(f"{name}/1", 0), **({} if name == "b" else others)) for name in "abcd"}  # type: ignore[arg-type]


def test_a_server_that_has_all_but_one_train_at_a_rate_of_1e_30_reads_nothing(tmp_path: Path) -> None:
    """Where masks named run, version and attempt only, the sum was the victim's update, to a likeness of 0.99999995."""
    federation = Federation(plan("masked"), tmp_path, FOUR)
    for name in "abcd":
        federation.begin(name, 0)
    annexes, slots = _greedy(federation, _orders(learning_rate=1e-30))
    assert len({annex.context for annex in annexes.values()}) == 2
    assert looks_uniform(slots)


def test_where_all_have_the_same_order_all_of_it_is_told(tmp_path: Path) -> None:
    """The attack above would notice."""
    federation = Federation(plan("masked"), tmp_path, FOUR)
    for name in "abcd":
        federation.begin(name, 0)
    annexes, slots = _greedy(federation, _orders())
    assert len({annex.context for annex in annexes.values()}) == 1
    assert not looks_uniform(slots) and np.abs(slots).max() < 2**44


def test_and_an_honest_server_opens_no_sum_of_unlike_work(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    for name in "abcd":
        federation.begin(name, 0)
    for name, told in _orders(learning_rate=1e-30).items():
        federation.aggregator.put(name, told.update_id, _as_told(federation, name, told))
    federation.commit(1, [f"{name}/1" for name in "abcd"])
    assert "b/1 has masks of another" in caplog.text


@pytest.mark.parametrize(
    "other",
    [
        {"learning_rate": 1e-30},
        {"evaluate": False},
        {"budget_s": 1e-9},
    ],
)
def test_what_differs_between_silos_makes_their_masks_differ(tmp_path: Path, other: dict[str, object]) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    contexts = set()
    for name, changes in (("a", {}), ("b", other)):
        federation.begin(name, 0)
        payload = _as_told(federation, name, replace(order(f"{name}/1", 0), **changes))  # type: ignore[arg-type]
        federation.aggregator.put(name, f"{name}/1", payload)
        contexts.add(_annex(federation, name).context)
    assert len(contexts) == 2


def _annex(federation: Federation, name: str) -> Annex:
    return Annex.unpack(federation.aggregator._inbox._pending[f"{name}/1"].envelope.head.annex, name, "server")


def test_masks_are_bound_to_all_that_is_the_same_for_all_silos(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    federation.begin("a", 0)
    told = order("a/1", 0)
    federation.aggregator.put("a", "a/1", _as_told(federation, "a", told))
    silo, member = federation.silos["a"], federation.aggregator._inbox._pending["a/1"].envelope.head.members[0]
    run, chain, roster = silo._masked_run, member.chain, silo._roster
    assert roster is not None and chain == silo._state.history.chain(0) and run != chain
    assert _annex(federation, "a").context == mask_context(run, told, chain, 0, roster)
    others = [
        mask_context(bytes(32), told, chain, 0, roster),
        mask_context(run, told, bytes(32), 0, roster),
        mask_context(run, told, chain, 1, roster),
        mask_context(run, told, chain, 0, replace(roster, digest=bytes(32))),
        mask_context(run, replace(told, learning_rate=np.nextafter(told.learning_rate, 1)), chain, 0, roster),
        mask_context(run, replace(told, evaluate=False), chain, 0, roster),
        mask_context(run, replace(told, budget_s=1.0), chain, 0, roster),
    ]
    assert len({_annex(federation, "a").context, *others}) == 8


def test_batches_steps_and_budgets_may_differ(tmp_path: Path) -> None:
    """They are how unequal silos finish together; owners bound them."""
    federation = Federation(plan("masked"), tmp_path, FOUR)
    contexts = set()
    works = {"a": (8, 5, 2.5), "b": (64, 1, 0.5)}
    for name, (batch, steps, budget_s) in works.items():
        federation.begin(name, 0)
        told = replace(order(f"{name}/1", 0), batch_size=batch, max_steps=steps, budget_s=budget_s)
        federation.aggregator.put(name, f"{name}/1", _as_told(federation, name, told))
        contexts.add(_annex(federation, name).context)
    assert len(contexts) == 1


def test_silos_that_are_sent_different_rosters_have_different_masks(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FIVE)
    contexts = set()
    federation.begin("a", 0)
    federation.answer("a", change(1))
    contexts.add(_annex(federation, "a").context)
    federation.aggregator.leave("e")
    federation.aggregator._announcements.renew()
    federation.aggregator._made.clear()
    federation.begin("b", 0)
    federation.answer("b", change(1))
    contexts.add(_annex(federation, "b").context)
    assert len(contexts) == 2


def test_silos_of_another_run_have_other_masks_and_keys(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    silo = federation.silos["a"]
    assert silo._masking is not None
    other = type(silo._masking)(open_ring(federation.keys.silos["a"]), bytes(32))
    assert other.pair.exchange != silo._masking.pair.exchange
    assert read_question(Survivors(bytes(32), {}).encode()).context == bytes(32)
    with pytest.raises(ProtocolError, match="no masks of this context"):
        silo.answer(Survivors(bytes(32), {}).encode())
    for nonsense in (b"", b"[]", b"{}", bytes(40)):
        with pytest.raises(ProtocolError):
            silo.answer(np.frombuffer(nonsense, dtype=np.uint8))
