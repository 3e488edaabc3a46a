"""The server adds what it cannot read, and every silo ends with the same model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.plan import EncryptionPlan
from fedsync.common.errors import ConfigError, PolicyError, ProtocolError
from fedsync.core.actions import Commit
from fedsync.core.orders import Evaluation, PooledFigures, Score
from fedsync.core.silo_weight import PRECISION_UNIT, Weighting, progress
from tests.cipher.make import INITIAL, LAYOUT, STEP, Federation, change, close, order, plan, report

THREE = {"a": 100, "b": 300, "c": 600}


@pytest.mark.parametrize("kind", ["bfv", "pad"])
@pytest.mark.parametrize(("bits", "tolerance"), [(16, 8), (12, 16), (8, 256)])
def test_rounds_add_the_mean_of_the_updates(kind: str, bits: int, tolerance: int, tmp_path: Path) -> None:
    federation = Federation(plan(kind, bits), tmp_path, THREE)
    expected = INITIAL.copy()
    for version in range(3):
        expected = expected + np.mean(federation.run_round(version), axis=0)
    models = [federation.begin(name, 3) for name in "abc"]
    for model in models:
        np.testing.assert_array_equal(model, models[0])
        np.testing.assert_allclose(model, expected, atol=3 * 2 * STEP * 2**-3 * tolerance)


def test_weights_by_examples_are_exact_and_hidden(tmp_path: Path) -> None:
    federation = Federation(plan(by="examples"), tmp_path, THREE)
    one, two, three = federation.run_round(0)
    close(federation.begin("a", 1), INITIAL + (0.1 * one + 0.3 * two + 0.6 * three))


def test_weights_by_precision_are_what_silos_report(tmp_path: Path) -> None:
    """Silos without it weigh by their examples."""
    federation = Federation(plan(by="precision"), tmp_path, THREE)
    updates = [change(seed) for seed in range(3)]
    ids = []
    for name, update, precision in zip("abc", updates, (100 * PRECISION_UNIT, 10 * PRECISION_UNIT, None), strict=True):
        federation.begin(name, 0)
        update_id = f"{name}/1"
        told = replace(report(0), precision=precision)
        federation.aggregator.put(name, update_id, federation.silos[name].send(update, order(update_id, 0), told))
        federation.aggregator.holds(name, 0)
        ids.append(update_id)
    federation.commit(1, ids)
    wanted = (100 * updates[0] + 10 * updates[1] + 600 * updates[2]) / 710
    close(federation.begin("a", 1), INITIAL + wanted)


def test_unequal_steps_are_normalised_as_by_fednova(tmp_path: Path) -> None:
    """c_i = p_i tau_eff / |a_i| with tau_eff = sum p_i |a_i|; |a| by momentum 0.5 over 2 and 6 steps."""
    federation = Federation(plan(normalised=True, momentum=0.5, quorum=2), tmp_path, {"a": 10, "b": 10})
    one, two = change(1, size=0.005), change(2, size=0.015)
    federation.begin("a", 0), federation.begin("b", 0)
    federation.commit(1, [federation.answer("a", one, steps=2), federation.answer("b", two, steps=6)])
    norms = [progress(2, 0.5, 0.0), progress(6, 0.5, 0.0)]
    effective = sum(norms) / 2
    expected = INITIAL + 0.5 * effective * (one / norms[0] + two / norms[1])
    np.testing.assert_allclose(federation.begin("a", 1), expected, atol=1e-4)


def test_asynchronous_commits_reach_everybody_as_the_same_sums(tmp_path: Path) -> None:
    """Each arrival is a version. A silo that was away adds the same sums in the same order as those that were not, and
    so has the same model to the last bit."""
    federation = Federation(plan(rate=0.25, quorum=3), tmp_path, THREE)
    expected = INITIAL.copy()
    federation.begin_all("abc", 0)
    for version, name in enumerate("ababab"):
        update = change(version)
        federation.commit(version + 1, [federation.answer(name, update)])
        expected = expected + np.float32(0.25) * update
        model = federation.begin(name, version + 1)
        close(model, expected, version + 1)
    assert (federation.aggregator._chain.first, federation.aggregator._chain.newest) == (0, 6)
    late = federation.answer("c", change(77))
    federation.commit(7, [late])
    close(federation.begin("c", 7), expected + np.float32(0.25) * change(77), 7)
    for name in "ab":
        np.testing.assert_array_equal(federation.begin(name, 7), federation.silos["c"].model)


def test_an_update_from_an_older_grid_makes_a_sum_of_its_own(tmp_path: Path) -> None:
    federation = Federation(plan(quorum=2), tmp_path, THREE)
    federation.begin_all("abc", 0)
    federation.commit(1, [federation.answer("a", change(1)), federation.answer("b", change(2))])
    federation.begin("a", 1)
    ids = [federation.answer("a", change(3, size=0.03)), federation.answer("c", change(4))]
    federation.commit(2, ids)
    expected = INITIAL + (change(1) + change(2)) / 2 + (change(3, size=0.03) + change(4)) / 2
    np.testing.assert_allclose(federation.begin("b", 2), expected, atol=1e-3)
    np.testing.assert_array_equal(federation.begin("a", 2), federation.silos["b"].model)


HIDING = EncryptionPlan("bfv", 16, LAYOUT, Weighting(), 2, seal_metrics=True)
FOUND = {"a": Evaluation(3.5, 8, 10), "b": Evaluation(1.25, 30, 40)}


def test_sealed_metrics_tell_the_server_the_mean_over_silos_and_no_more(tmp_path: Path) -> None:
    federation = Federation(HIDING, tmp_path, {"a": 10, "b": 10})
    federation.begin_all("ab", 0)
    ids = [federation.answer(name, change(1), evaluation=FOUND[name]) for name in "ab"]
    federation.commit(1, ids)
    federation.begin("a", 1)
    pooled = (PooledFigures(1, 1.0, Score(0, 0.76, 0.095)),)  # 38 of 50 right, a loss of 4.75; trained at a loss of 1
    assert federation.silos["a"].pooled == pooled
    own = replace(
        report(1, 4, 40), evaluation=FOUND["a"], metrics={"energy_j": 5.0}, overhead_s={"load": 1.0, "e": 2.0}
    )
    sealed = replace(own, loss=None, evaluation=None, metrics={}, overhead_s={}, pooled=pooled)
    assert federation.silos["a"].disclosed(own) == sealed


def test_a_model_that_a_silo_gets_again_is_not_evaluated_for_the_server_again(tmp_path: Path) -> None:
    """Else b's evaluation of one model were the difference between two sums with others."""
    federation = Federation(HIDING, tmp_path, {"a": 10, "b": 10})
    federation.begin_all("ab", 0)
    lost = federation.answer("b", change(1), evaluation=FOUND["b"])
    federation.aggregator.discard(lost)
    federation.begin("b", 0)
    ids = [federation.answer(name, change(1), evaluation=FOUND[name]) for name in "ab"]
    federation.commit(1, ids)
    federation.begin("a", 1)
    assert federation.silos["a"].pooled == (PooledFigures(1, 1.0),), "b was asked twice, so a's is not told either"


def test_metrics_in_the_clear_are_what_the_silo_found(tmp_path: Path) -> None:
    own = replace(report(1, 4, 40), evaluation=Evaluation(1.0, 1, 1), metrics={"energy_j": 5.0})
    assert Federation(plan(), tmp_path, THREE).silos["a"].disclosed(own) is own


def test_a_silo_that_lost_its_copy_gets_a_snapshot_that_the_server_cannot_read(tmp_path: Path) -> None:
    federation = Federation(plan(), tmp_path, THREE)
    for version in range(2):
        federation.run_round(version)
    snapshot = federation.silos["a"].snapshot()
    held = federation.silos["a"].holds
    assert federation.silos["a"].model[:8].tobytes() not in snapshot.tobytes()
    federation.aggregator.put_snapshot("a", held, snapshot)
    federation.run_round(2)
    assert (federation.aggregator._chain.first, federation.aggregator._chain.newest) == (held, 3), (
        "what came before it is forgotten"
    )
    federation.silos["b"] = federation.copy("b")
    federation.aggregator.holds("b", -1)
    np.testing.assert_array_equal(federation.begin("b", 3), federation.begin("a", 3))


def test_only_some_layers_are_sealed(tmp_path: Path) -> None:
    chosen = plan(only=("head.*",))
    assert chosen.sealed.names == ("head.weight",)
    assert (chosen.sealed.size, chosen.layout.size) == (600, LAYOUT.size)
    federation = Federation(chosen, tmp_path, THREE)
    federation.begin("a", 0)
    update = change(5)
    _, payload = federation.seal("a", update)
    body = update[: LAYOUT.size - 600]
    assert payload.tobytes().endswith(body.tobytes()), "what is not sealed travels as it is"
    assert len(payload) < 4 * LAYOUT.size + 70_000
    federation = Federation(chosen, tmp_path / "again", THREE)
    close(federation.begin("a", 0), INITIAL)
    updates = federation.run_round(0)
    close(federation.begin("a", 1), INITIAL + np.mean(updates, axis=0))


def test_a_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"no tensor matches 'tail.\*'.*body.weight"):
        plan(only=("tail.*",))


def test_an_update_is_estimated_for_one_greeting_and_for_none_of_a_silo_that_holds_a_model(tmp_path: Path) -> None:
    """Under a privacy budget each estimate is spent, and a server asks again after every break of a connection."""
    federation = Federation(plan(), tmp_path, {"a": 10, "b": 10, "c": 10})
    silo = federation.silos["a"] = federation.copy("a", tmp_path / "copy.bin")
    first, second = silo.greeting(), silo.greeting()
    assert first.tobytes() != second.tobytes() and federation.measured == [*"abc", "a"]
    federation.aggregator.greet("a", silo.holds, second)
    federation.run_round(0)
    federation.begin("a", 1)
    restarted = federation.copy("a", tmp_path / "copy.bin")
    federation.aggregator.greet("a", restarted.holds, restarted.greeting())
    assert restarted.holds == 1 and federation.measured == [*"abc", "a"]


def test_more_silos_may_greet_than_a_sum_holds(tmp_path: Path) -> None:
    """Of 8 bits 16 updates, and as many greetings; the 17th silo is in no sum of them, and opens it all the same."""
    federation = Federation(plan(bits=8, quorum=2), tmp_path, {f"{number:02}": 100 for number in range(17)})
    for name in ("00", "16"):
        close(federation.begin(name, 0), INITIAL)


def test_more_silos_than_a_sum_can_hold_are_refused_at_the_start() -> None:
    with pytest.raises(ConfigError, match="17 silos, but sums of 8 bits hold 16"):
        plan(bits=8, quorum=17)
    EncryptionPlan("bfv", 8, LAYOUT, plan().weighting, 16)


# Hostile silos, and a hostile server.


def test_the_store_takes_only_what_was_ordered_from_who_was_asked(tmp_path: Path) -> None:
    federation = Federation(plan(), tmp_path, THREE)
    federation.begin_all("ab", 0)
    update_id, payload = federation.seal("a", change(1))
    with pytest.raises(ProtocolError, match="was not ordered"):
        federation.aggregator.put("a", "a/9", payload)
    with pytest.raises(ProtocolError, match="sender"):
        federation.aggregator.put("b", "b/1", payload)
    with pytest.raises(ProtocolError, match="no key"):
        federation.aggregator.begin("x/1")
        federation.aggregator.put("x", "x/1", payload)
    for broken in (payload[:-8], payload[:100], payload[:0], np.concatenate([payload, payload[:8]])):
        with pytest.raises(ProtocolError):
            federation.aggregator.put("a", update_id, broken)
    flipped = payload.copy()
    flipped[len(payload) // 2] ^= 1
    with pytest.raises(ProtocolError, match="signature"):
        federation.aggregator.put("a", update_id, flipped)
    federation.aggregator.put("a", update_id, payload)
    with pytest.raises(ProtocolError, match="here already"):
        federation.aggregator.put("a", update_id, payload)


def test_commits_that_sums_cannot_make_are_our_bug(tmp_path: Path) -> None:
    federation = Federation(plan(), tmp_path, THREE)
    federation.begin("a", 0)
    update_id = federation.answer("a", change(1))
    with pytest.raises(PolicyError, match="towards"):
        federation.aggregator.commit(Commit(1, {update_id: 1.0}, toward=True))


def test_late_updates_that_are_too_few_for_a_sum_of_their_own_are_told(tmp_path: Path) -> None:
    """A late update is on an older grid: silos ignored both sums, and the run said nothing of the lost round."""
    federation = Federation(plan("pad", members=2), tmp_path, THREE)
    federation.begin_all("ab", 0)
    federation.own_grid("a", 3, 3, 3)
    federation.commit(1, federation.answer_all("ab"))
    note, of_updates = federation.aggregator.notes()
    assert note.startswith("commits that did not change the model, but count as rounds: 1; they held")
    assert of_updates.endswith("a 1 times, b 1 times; each came late, in a sum of fewer than 2 silos (cipher.members)")
    np.testing.assert_array_equal(federation.begin("c", 1), INITIAL)


def test_a_late_update_whose_own_sum_stays_closed_is_told(tmp_path: Path) -> None:
    federation = Federation(plan("pad", quorum=2, members=2), tmp_path, THREE)
    federation.begin("c", 0)
    federation.run_round(0, "ab", size=0.001)
    late = federation.answer("c", change(1))
    federation.begin_all("ab", 1)
    federation.commit(2, [late, *federation.answer_all("ab", 1)])
    (note,) = federation.aggregator.notes()
    assert note.endswith("count: c 1 times; each came late, in a sum of fewer than 2 silos (cipher.members)")


def test_a_silo_that_outweighs_all_others_together_is_clipped_until_silos_know_their_usual_weight(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One silo's range is not that of all, for it may lie: the range is that of the second largest update. Its weight
    is not at issue: votes are of updates of the mean weight.
    """
    federation, clipped = Federation(plan("pad", by="examples"), tmp_path, {"a": 10_000, "b": 10, "c": 10}), []
    for version in range(4):
        caplog.clear()
        federation.run_round(version)
        clipped.append("a/" in caplog.text and "larger than agreed: clipped" in caplog.text)
    assert clipped == [True, True, False, False]
