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
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.encoding.tally import Contribution
from tests.attacks.conftest import Make

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
