"""Rehearsals, by hand and against runs in virtual time."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.core.actions import Commit
from fedsync.core.curve import Curve
from fedsync.core.journal import read_journal
from fedsync.core.machines import RecordedMachine
from fedsync.core.orders import SiloFacts
from fedsync.core.rehearsal import rehearse
from fedsync.core.state import Policies
from fedsync.core.views import ClusterView, Verdict
from fedsync.sim.timing_only import run_timing
from tests.core.make import policies
from tests.sim.fake import machines, strategy

FACTS = SiloFacts(1000)


def played(policies: Policies, **curves: Curve) -> Any:
    return rehearse(
        policies, {name: RecordedMachine(curve) for name, curve in curves.items()}, dict.fromkeys(curves, FACTS)
    )


def test_a_round_of_bsp_by_hand() -> None:
    """4 steps of 8 samples take a 0.32 s and b 0.64 s, and an order 1 s besides: a commit every 1.64 s."""
    seen = played(policies(), a=Curve(100.0, overhead_s=1.0), b=Curve(50.0, overhead_s=1.0))
    assert (seen.steps, seen.staleness, seen.shares) == (4, 0, {"a": 0.5, "b": 0.5})
    assert seen.seconds == pytest.approx(1.64)


@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"balancer": {"kind": "fixed"}},
        {"balancer": {"kind": "fixed"}, "barrier": {"kind": "a-bsp"}},
        {"balancer": {"kind": "fixed"}, "barrier": {"kind": "fsp", "interval": {"kind": "fixed", "interval_s": 4.0}}},
        {"balancer": {"kind": "fixed"}, "barrier": {"kind": "asp"}},
    ],
    ids=["lb-bsp", "bsp", "a-bsp", "fsp", "asp"],
)
def test_it_takes_as_long_as_a_run_in_virtual_time(sections: dict[str, Any], tmp_path: Path) -> None:
    silos = machines(*({"speed": speed, "overhead_s": 0.5} for speed in (300.0, 200.0, 100.0)))
    config = strategy(stop={"rounds": 7}, fraction_evaluate=0.0, **sections)
    run_timing(config, ClusterConfig(silos=silos), tmp_path)
    entries = read_journal(tmp_path / "journal.jsonl")[1]
    commits = [entry.at_s for entry in entries for action in entry.actions if isinstance(action, Commit)]
    known = {silo.name: RecordedMachine(Curve(silo.speed, overhead_s=0.5)) for silo in silos}
    facts = {silo.name: SiloFacts(silo.examples) for silo in silos}
    seen = rehearse(config.policies(3), known, facts)
    assert seen is not None
    assert seen.seconds == pytest.approx((commits[6] - commits[2]) / 4)


class Never:
    """A barrier that waits for ever."""

    def init(self) -> None: ...

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        return None, Verdict(wake_at_s=view.now_s + 1)


def test_policies_that_come_to_nothing_end() -> None:
    assert played(policies(barrier=Never()), a=Curve(100.0)) is None


def test_a_record_is_gone_through_again_and_again() -> None:
    """1 s at full speed, then 2 s at half: 2 s of work every 3 s. Work of 1 s begun at 2 s ends at 3.5 s."""
    machine = RecordedMachine(Curve(10.0), lengths=(1.0, 2.0), factors=(1.0, 0.5))
    order = _order(steps=5, batch_size=5)
    np.testing.assert_allclose(machine.course(order, 0.0).ends, [0.5, 1.0, 2.0, 3.0, 3.5])
    np.testing.assert_allclose(machine.course(order, 2.0).ends, [3.0, 3.5, 4.0, 5.0, 6.0])
    np.testing.assert_allclose(machine.course(order, 302.0).ends, [303.0, 303.5, 304.0, 305.0, 306.0])


def _order(steps: int, batch_size: int) -> Any:
    from fedsync.core.orders import WorkOrder

    return WorkOrder("a/1", 0, 1, batch_size, steps, 0.1, 7)
