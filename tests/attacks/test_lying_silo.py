"""One silo that lies, with all keys that it has and code of its own; the server and the others are honest.

It is after the others' model and the run itself. The gain is how far it moves the model, in units of the most that an
honest silo could, or how many rounds it costs.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

import fedsync.cipher.encoding.quantization as quantization
import fedsync.cipher.encoding.tally as tally
from fedsync.cipher.encoding.catch_up import CatchUp, Start
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.tally import Contribution
from fedsync.cipher.silo.replica_state import seal_snapshot
from tests.attacks.conftest import Make
from tests.attacks.forgery import give, sent

LIAR, HONEST = "silo-a", "silo-b"


def test_votes_in_the_name_of_others_do_not_set_the_grid(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three votes for 23, and two less of the others': the tally is a sum. Steps became 256."""
    federation = make()
    build = tally.build
    for _ in range(3):
        cast: list[Slots] = []

        def honest(own: Contribution, cap: int, _: object, cast: list[Slots] = cast) -> Slots:
            cast.append(build(own, cap))
            return cast[-1]

        def lying(own: Contribution, cap: int, _: object, cast: list[Slots] = cast) -> Slots:
            """It is the last, and knows what the others voted."""
            slots = build(replace(own, exponents=(23,) * len(own.exponents)), cap)
            slots[32:] = 3 * slots[32:] - sum(one[32:] for one in cast)
            return slots

        ids = []
        for name, lie in [*((name, honest) for name in federation.names[1:]), (LIAR, lying)]:
            with monkeypatch.context() as patch:
                patch.setattr(tally, "build", lie)
                ids.append(federation.collect(name))
        federation.commit(ids)
        federation.bring([HONEST])
        assert federation.silos[HONEST].replica._state.history.records.counted(federation.version), "it is no nonsense"
        steps = federation.plan.grid(federation.silos[HONEST].exponents).steps
        assert max(steps) < 2**-10


@pytest.mark.parametrize("times", [1, 4, 100])
def test_one_update_moves_the_model_by_no_more_than_the_largest_honest_one(
    times: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes have room for 200 updates, and one silo filled them alone."""
    federation = make()
    federation.round()
    federation.follow()
    before, plan, honest = federation.silos[HONEST].model, federation.plan, quantization.round_fixed
    largest = plan.packing.peak * max(plan.grid(federation.silos[HONEST].exponents).steps)

    def lie(*given: Any) -> tuple[Any, int]:
        integers, clipped = honest(*given)
        return np.where(integers != 0, plan.packing.peak * times, 0).astype(np.int32), clipped

    with monkeypatch.context() as patch:
        patch.setattr(quantization, "round_fixed", lie)
        ids = [federation.collect(LIAR)]
    federation.commit([*ids, *(federation.collect(name) for name in federation.names[1:])])
    federation.bring([HONEST])
    found = np.abs(federation.silos[HONEST].model - before).max()
    weights = [federation.silos[name].session._trainer.facts.examples for name in federation.names]
    most = largest * plan.cap / sum(weights)
    assert plan.cap > 1
    assert found <= 3.01 * most, f"{found / most:.1f} times what clipping allows one silo"


@pytest.mark.slow
def test_a_joiner_does_not_take_one_silo_s_word_for_the_model(make: Make) -> None:
    """Other lies than another model are in `tests.cipher.silo.test_snapshot`."""
    federation = make()
    for _ in range(2):
        federation.round()
    federation.follow()
    liar, joiner = federation.silos[LIAR].replica, federation.silo("silo-c")
    sealed = seal_snapshot(liar._ring, federation.plan, replace(liar._state, model=liar.model + np.float32(1)))
    give(joiner, CatchUp(Start.SNAPSHOT, 2, 2, (), sealed).encode(), 2)
    assert joiner.replica.holds == -1, "a model taken over from the liar"
    # One more round, with honest silos that built on what they really have.
    federation.round()
    give(joiner, CatchUp(Start.SNAPSHOT, 2, 3, sent(federation)[2:], sealed).encode(), 3)
    assert joiner.replica.holds == -1


def test_nobody_seals_in_another_s_name(make: Make) -> None:
    federation = make()
    federation.train(LIAR)
    mine = federation.updates[federation.last]
    for data in (mine, mine.replace(LIAR.encode(), HONEST.encode())):
        assert not federation.takes(HONEST, federation.last.replace(LIAR, HONEST), data)


def test_an_update_counts_once(make: Make) -> None:
    """Sent twice, sent late, and sent as another."""
    federation = make()
    first = federation.collect(LIAR)
    for update_id in (first, f"{LIAR}/7"):
        assert not federation.takes(LIAR, update_id, federation.updates[first])
