"""Masks: the server and one silo together see no single update, and who is lost meanwhile costs nothing."""

import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.masking.annex import Annex
from fedsync.cipher.masking.mask_log import mask_context
from fedsync.cipher.masking.mask_round import Survivors
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.common.errors import ProtocolError
from fedsync.model.transfer import OtherVersion
from tests.cipher.make import INITIAL, Federation, change, close, mean_of, order, plan

FOUR = {"a": 10, "b": 10, "c": 10, "d": 10}
FIVE = {**FOUR, "e": 10}


def test_too_many_lost_before_they_reveal_cost_the_round_and_not_the_run(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    one = federation.run_round(0, "abcd")
    federation.run_round(1, "abcd", silent="cd")
    federation.silos["c"] = federation.copy("c")
    federation.aggregator.holds("c", -1)
    after = federation.begin("a", 2)
    close(after, INITIAL + np.mean(one, axis=0))
    three = federation.run_round(2, "abcd")
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
        federation.begin_all(FIVE, version)
        federation.commit(version + 1, federation.answer_all(FIVE, version))
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
        expected = expected + np.mean([change(100 * version + ord(name)) for name in FIVE], axis=0)
    models = [federation.begin(name, 10) for name in FIVE]
    close(models[0], expected, 10)
    for model in models[1:]:
        np.testing.assert_array_equal(model, models[0])


def test_a_round_whose_masks_do_not_come_off_is_in_the_notes(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    federation.run_round(0, "abcd")
    assert federation.aggregator.notes() == []
    federation.run_round(1, "abcd", silent="bcd")
    (note,) = federation.aggregator.notes()
    assert note.startswith("commits that did not change the model, but count as rounds: 1;")
    assert "masks could not be removed" in note
    federation.run_round(2, "abcd")
    assert federation.aggregator.notes() == [note]
    state = federation.aggregator.state()
    federation.aggregator._chain.paused = 0
    federation.aggregator.restore(state)
    assert federation.aggregator.notes() == [note], "also after the server died"


def test_updates_beyond_the_ratio_are_in_the_notes(tmp_path: Path) -> None:
    federation = Federation(replace(plan("masked"), work_ratio=4.0), tmp_path, FOUR)
    federation.begin_all("abcd", 0)
    federation.commit(1, [federation.answer(name, change(1), 21 if name == "d" else 5) for name in "abcd"])
    note = "updates that did not count: d 1 times; each is more than 4 times more or less work than most"
    assert federation.aggregator.notes() == [f"{note} (cipher.work_ratio)"]
    other = EncryptedAggregator(federation.plan, federation.keys.server)
    other.restore(pickle.loads(pickle.dumps(federation.aggregator.state())))
    assert other.notes()[1:] == federation.aggregator.notes(), "also after the server died"


def test_who_comes_late_is_in_the_next_round(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(plan("masked", quorum=4), tmp_path, FIVE)
    federation.aggregator.leave("e")
    federation.begin_all("abcd", 0)
    federation.aggregator.greet("e", -1, federation.silos["e"].greeting())
    federation.begin("e", 0)
    federation.commit(1, federation.answer_all(FIVE))
    assert "e/1 has masks" in caplog.text
    federation.unmask()
    after = federation.begin("a", 1)
    close(after, INITIAL + mean_of(FOUR))
    updates = federation.run_round(1, "abcde")
    close(federation.begin("e", 2), after + np.mean(updates, axis=0), 2)


def test_a_silo_without_its_book_announces_another_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    federation.run_round(0, "abcd")
    folder = open_ring(federation.keys.silos["b"]).folder
    assert folder is not None
    for file in (folder / "masks").iterdir():
        file.unlink()
    federation.silos["b"] = federation.copy("b")
    with pytest.raises(OtherVersion, match="another key of this silo for masks"):
        federation.silos["b"].receive(federation.aggregator.outgoing("b"), 1)
    federation.run_round(1, "abcd")
    assert "b/2 has masks of another" in caplog.text, "the round's roster had gone out"
    after = federation.begin("a", 2)
    federation.serials["a"] -= 1
    updates = federation.run_round(2, "abcd")
    close(federation.begin("b", 3), after + np.mean(updates, axis=0))


def test_a_sum_of_two_stays_closed(tmp_path: Path) -> None:
    federation = Federation(plan("masked", quorum=2), tmp_path, FOUR)
    federation.run_round(0, "ab")
    assert not federation.aggregator.blocked
    np.testing.assert_array_equal(federation.begin("a", 1), INITIAL)


def test_masks_stay_on_a_sum_of_fewer_silos_than_the_run_demands(tmp_path: Path) -> None:
    """The server chooses the roster. Sums of a+b, a+d and b+d, with one silo on its side, gave each update alone."""
    federation = Federation(plan("masked", members=5, quorum=5), tmp_path, FIVE)
    federation.aggregator._plan = replace(federation.plan, members=1)
    for name in "de":
        federation.aggregator.leave(name)
    federation.begin_all("abc", 0)
    federation.commit(1, federation.answer_all("abc"))
    with pytest.raises(ProtocolError, match="3 silos; their sum would disclose too much"):
        federation.unmask()


def test_masks_of_an_update_are_of_its_order_the_silo_s_past_and_its_roster(tmp_path: Path) -> None:
    federation = Federation(plan("masked"), tmp_path, FOUR)
    federation.begin("a", 0)
    federation.answer("a", change(1))
    silo, head = federation.silos["a"], federation.envelope("a/1").head
    (member,), annex = head.members, Annex.unpack(head.annex, "a", "server")
    assert silo._roster is not None and member.chain == silo._state.history.chain(0) != silo._masked_run
    assert annex.context == mask_context(silo._masked_run, order("a/1", 0), member.chain, 0, silo._roster)


def test_a_silo_answers_no_question_about_another_run_and_no_nonsense(tmp_path: Path) -> None:
    silo = Federation(plan("masked"), tmp_path, FOUR).silos["a"]
    with pytest.raises(ProtocolError, match="no masks of this context"):
        silo.answer(Survivors(bytes(32), {}).encode())
    for nonsense in (b"", b"[]", b"{}", bytes(40)):
        with pytest.raises(ProtocolError):
            silo.answer(np.frombuffer(nonsense, dtype=np.uint8))


@pytest.mark.slow
@pytest.mark.parametrize("restarted", [False, True], ids=["same server", "restarted server"])
def test_a_rollback_right_behind_a_masked_sum_follows_the_sum(tmp_path: Path, restarted: bool) -> None:
    """A barrier commits and goes back in one decision, while the sum still waits for its seeds."""
    federation = Federation(plan("masked", quorum=4), tmp_path, FOUR)
    federation.run_round(0)
    federation.begin_all("abcd", 1)
    before = federation.silos["a"].model.copy()
    federation.commit(2, federation.answer_all("abcd"))
    federation.aggregator.savepoint()  # of version 2
    if restarted:
        saved = pickle.loads(pickle.dumps(federation.aggregator.state()))
        federation.aggregator = EncryptedAggregator(federation.plan, federation.keys.server)
        federation.aggregator.restore(saved)
    federation.unmask()
    kept = federation.begin("a", 2).copy()
    assert np.array_equal(kept, before) == restarted, "nobody can open the sum of a server that is gone"
    federation.begin_all("bcd", 2)
    federation.commit(3, [federation.answer(name, change(9 + ord(name))) for name in "abcd"])
    federation.aggregator.rollback()
    federation.unmask()
    for name in "abcd":
        np.testing.assert_allclose(federation.begin(name, 4), kept, atol=1e-6)
