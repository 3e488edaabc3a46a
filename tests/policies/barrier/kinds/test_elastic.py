"""ElasticBSP: steps by hand, and whole runs."""

from pathlib import Path
from typing import Any

import pytest

from fedsync.core.orders import LocalWork
from fedsync.core.views import SiloView
from fedsync.policies.barrier.kinds.elastic import Elastic
from tests.policies.barrier.make import begins, commits, deeds, meta, race, silo, steps, view

WORK = LocalWork(steps=4, batch_size=10, learning_rate=0.1)


def orders(barrier: Elastic, **silos: SiloView) -> dict[str, int]:
    state, verdict = barrier.decide(None, view(silos, work=WORK))
    assert state is None
    assert verdict.release == tuple(silos)
    return dict(verdict.steps)


@pytest.mark.parametrize(
    ("lookahead", "floor", "a", "b", "expected"),
    [
        # Steps of 2 and 3 s meet at 6, 12...: the earliest counts.
        (4, 1, (5.0, 0.0), (10 / 3, 0.0), {"a": 3, "b": 2}),
        (8, 4, (5.0, 0.0), (10 / 3, 0.0), {"a": 6, "b": 4}),  # at least 4 steps each: 12 s
        # R = 2: ends 2, 4 and 3, 6. Both {2, 3} and {4, 3} are 1 s apart: the earlier.
        (2, 1, (5.0, 0.0), (10 / 3, 0.0), {"a": 1, "b": 1}),
        # Equal silos meet after every step: once it is as short as may be.
        (None, None, (5.0, 0.0), (5.0, 0.0), {"a": 2, "b": 2}),
        (None, 1, (5.0, 0.0), (5.0, 0.0), {"a": 1, "b": 1}),
        # Four times as fast, 2 to 8 steps: 1 s x 8 and 4 s x 2.
        (None, None, (10.0, 0.0), (2.5, 0.0), {"a": 8, "b": 2}),
        # Out of reach of each other: a's last step and b's first, 4 and 10 s.
        (4, 1, (10.0, 0.0), (1.0, 0.0), {"a": 4, "b": 1}),
        # a's 2 s of overhead: ends 3, 4, 5... and 2, 4, 6...
        (4, 1, (10.0, 2.0), (5.0, 0.0), {"a": 2, "b": 2}),
    ],
)
def test_steps_meet_by_hand(
    lookahead: int | None, floor: int | None, a: tuple[float, float], b: tuple[float, float], expected: dict[str, int]
) -> None:
    """Speeds in samples/s and overheads in s; a step has 10 samples, and 4 steps are configured."""
    silos = {name: silo(clock=1, speed=speed, overhead_s=more) for name, (speed, more) in [("a", a), ("b", b)]}
    assert orders(Elastic(lookahead, floor), **silos) == expected


def test_a_stranger_counts_as_the_median_of_the_others() -> None:
    """Steps of 2, 3 and 4 s, so 3 s: with 2 and 3 and 4 s the first common end is 12 s."""
    known = {name: silo(clock=1, speed=10 / step_s) for name, step_s in [("a", 2), ("b", 3), ("c", 4)]}
    assert orders(Elastic(6, 1), **known, new=silo()) == {"a": 6, "b": 4, "c": 3, "new": 4}


def test_all_are_committed_and_released_together() -> None:
    silos = dict.fromkeys("ab", silo(clock=1, speed=10.0))
    _, verdict = Elastic().decide(None, view(silos, meta("b"), meta("a")))
    assert (verdict.commit, verdict.release) == (("b/1", "a/1"), ("a", "b"))
    assert "meet in" in verdict.reason
    assert Elastic().decide(None, view({}, meta("a")))[1].commit == ()


# Whole runs.


def test_the_second_superstep_is_without_waiting(tmp_path: Path) -> None:
    """8 steps of 1/8, 1/4 and 1/2 s; then, with 4 to 16 steps each, 4 of 1/2 s are 8 of 1/4 and 16 of 1/8 s."""
    result = race(tmp_path, [256.0, 128.0, 64.0], {"kind": "elastic"}, stop={"rounds": 3})
    assert steps(result) == [{"a": 8, "b": 8, "c": 8}, *[{"a": 16, "b": 8, "c": 4}] * 2]
    assert [at_s for at_s, _ in commits(result)] == pytest.approx([4, 6, 8])
    assert begins(result)["a"] == pytest.approx([0, 4, 6])


def test_without_choice_it_is_bsp(tmp_path: Path) -> None:
    """floor = R = the configured 8 steps."""
    more: dict[str, Any] = {"silos": {"jitter": 0.3}, "stop": {"rounds": 10}}
    elastic = race(tmp_path / "elastic", [300.0, 70.0], {"kind": "elastic", "lookahead": 8, "floor": 8}, **more)
    bsp = race(tmp_path / "bsp", [300.0, 70.0], {"kind": "bsp"}, **more)
    assert deeds(elastic) == deeds(bsp)
