"""One silo that lies, with all keys that it has and code of its own; the server and the others are honest.

It is after the others' model and the run itself. The gain is how far it moves the model, in units of the most that an
honest silo could, or how many rounds it costs.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
from fedsync.core.orders import WorkReport
from tests.attacks.conftest import Make
from tests.attacks.forgery import give, sent

LIAR, HONEST = "silo-a", "silo-b"


def test_one_vote_does_not_set_the_grid(make: Make) -> None:
    """A vote of 23 made the others round to multiples of 256."""
    federation = make()
    liar = federation.silos[LIAR].replica
    honest = liar._needed
    liar._needed = lambda *a: tuple(23 for _ in honest(*a))  # type: ignore[method-assign]
    for _ in range(2):
        federation.round()
    federation.follow()
    steps = federation.plan.grid(federation.silos[HONEST].exponents).steps
    assert max(steps) < 2**-10


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


@contextmanager
def _sends(monkeypatch: pytest.MonkeyPatch, value: int) -> Iterator[None]:
    """Whoever seals meanwhile seals this integer for each value."""
    honest = quantization.round_fixed

    def lie(*given: Any) -> tuple[Any, int]:
        integers, clipped = honest(*given)
        return np.where(integers != 0, value, 0).astype(np.int32), clipped

    with monkeypatch.context() as patch:
        patch.setattr(quantization, "round_fixed", lie)
        yield


@pytest.mark.parametrize("times", [1, 4, 100])
def test_one_update_moves_the_model_by_no_more_than_the_largest_honest_one(
    times: int, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lanes have room for 200 updates, and one silo filled them alone."""
    federation = make()
    federation.round()
    federation.follow()
    before = federation.silos[HONEST].model
    peak = federation.plan.packing.peak
    with _sends(monkeypatch, peak * times):
        ids = [federation.collect(LIAR)]
    ids += [federation.collect(name) for name in federation.names[1:]]
    with _sends(monkeypatch, peak):
        largest = federation.plan.grid(federation.silos[HONEST].exponents)
    federation.commit(ids)
    federation.bring([HONEST])
    found = np.abs(federation.silos[HONEST].model - before).max()
    most = peak * max(largest.steps) * federation.plan.cap / federation.count
    weights = [federation.silos[name].session._trainer.facts.examples for name in federation.names]
    if federation.plan.cap > 1:
        most = peak * max(largest.steps) * federation.plan.cap / sum(weights)
    assert found <= 3.01 * most, f"{found / most:.1f} times what clipping allows one silo"


LIES: dict[str, Callable[[Any], Any]] = {
    "no numbers": lambda state: replace(state, model=np.full_like(state.model, np.nan)),
    "another model": lambda state: replace(state, model=state.model + np.float32(1)),
    "another grid": lambda state: replace(state, scales=replace(state.scales, exponents=((9, 9),))),
    "nothing was added": lambda state: replace(state, added={}),
}


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
def test_a_joiner_does_not_take_one_silo_s_word_for_the_model(lie: str, make: Make) -> None:
    federation = make()
    for _ in range(2):
        federation.round()
    federation.follow()
    liar, joiner = federation.silos[LIAR], federation.silo("silo-c")
    state = LIES[lie](liar.replica._state)
    sealed = seal_snapshot(liar.replica._ring, federation.plan, state)
    for links in ((), sent(federation)[:0]):
        give(joiner, CatchUp(Start.SNAPSHOT, 2, 2, tuple(links), sealed).encode(), 2)
        assert joiner.replica.holds == -1, "models taken over from the liar"
    # Two more rounds, with honest silos that built on what they really have.
    federation.round()
    give(joiner, CatchUp(Start.SNAPSHOT, 2, 3, sent(federation)[2:], sealed).encode(), 3)
    assert joiner.replica.holds == -1


def test_a_grid_of_one_s_own_does_not_keep_the_others_out(make: Make) -> None:
    """The first that came was the one: honest silos were refused."""
    federation = make()
    federation.aggregator.outgoing(LIAR)
    silo = federation.silos[LIAR]
    give(silo, federation.aggregator.outgoing(LIAR), 0)
    order = federation.order(LIAR)
    federation.aggregator.begin(order.update_id)
    honest = silo.replica._state
    silo.replica._state = replace(honest, scales=replace(honest.scales, exponents=((9, 9),)))
    nothing = np.zeros(len(honest.model), dtype=np.float32)
    update = silo.replica.send(nothing, order, WorkReport(0, 2, 8, compute_s=1.0, loss=1.0))
    federation.aggregator.put(LIAR, order.update_id, update)
    ids = [federation.collect(name) for name in federation.names[1:]]
    federation.commit([order.update_id, *ids])
    federation.follow([HONEST])
    moved = np.linalg.norm(federation.silos[HONEST].model - federation.first_model)
    assert moved > 0.1 * federation.honest_step(HONEST), "the honest ones count"


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


@pytest.mark.parametrize("cipher", ["{kind: pad, members: 2}", "{kind: masked}"])
def test_a_spoiled_update_costs_one_version_and_no_run(
    cipher: str, make: Make, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is authentic, for the liar has the key, and what is in it no silo may send. All refused it for ever."""
    federation = make(cipher=cipher, owner={"seal": {"masks": "masked" in cipher}})

    def bring() -> None:
        for name in federation.names:
            assert not give(federation.silos[name], federation.aggregator.outgoing(name), federation.version).refused
            federation.aggregator.holds(name, federation.version)
        assert len({federation.silos[name].replica._state.digest for name in federation.names}) == 1

    with _sends(monkeypatch, 2**22):
        ids = [federation.collect(LIAR)]
    federation.commit([*ids, *(federation.collect(name) for name in federation.names[1:])])
    bring()
    np.testing.assert_array_equal(federation.silos[HONEST].model, federation.first_model)
    assert f"{LIAR}/1, silo-b/1, silo-c/1 is ignored" in caplog.text, "owners see whose updates it had"
    federation.round()
    bring()
    moved = np.linalg.norm(federation.silos[HONEST].model - federation.first_model)
    assert moved > 0.1 * federation.honest_step(HONEST), "the run goes on"
