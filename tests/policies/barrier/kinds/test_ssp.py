"""SSP and ASP: one view at a time, and whole runs by hand."""

import dataclasses
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.core import coordinator
from fedsync.core.events import SiloLost
from fedsync.core.views import ClusterView, SiloView
from fedsync.policies.barrier.kinds.ssp import Asp, Clocks, Ssp, SspState, Tick, advance
from tests.policies.barrier.make import begins, commits, meta, race, silo, view
from tests.simulation.fake import Result, machines, simulate, spoil, strategy


def ticked(silos: dict[str, SiloView]) -> SspState:
    """Let the orders end one by one, as they do."""
    clocks = Clocks()
    for clock in range(max(s.clock for s in silos.values()) + 1):
        seen = view({name: replace(s, clock=min(s.clock, clock)) for name, s in silos.items()})
        clocks = advance(clocks, seen)
    return SspState(clocks)


@pytest.mark.parametrize("barrier", [Ssp(0), Asp()])
def test_arrivals_are_committed_one_by_one_before_anybody_goes_on(barrier: Ssp | Asp) -> None:
    state, verdict = barrier.decide(
        barrier.init(), view({"a": silo(clock=1), "b": silo(clock=1)}, meta("b"), meta("a"))
    )
    assert (verdict.commit, verdict.release) == (("b/1",), ())
    state, verdict = barrier.decide(state, view({"a": silo(clock=1), "b": silo(clock=1)}, meta("a"), version=1))
    assert (verdict.commit, verdict.release) == (("a/1",), ())
    _, verdict = barrier.decide(state, view({"a": silo(clock=1), "b": silo(clock=1)}, version=2))
    assert (verdict.commit, verdict.release) == ((), ("a", "b"))


def test_a_silo_that_joins_late_counts_from_the_slowest() -> None:
    """By hand: the others have done 7 and 5. The newcomer counts as 5, so with s = 2 the 7 may go on."""
    state = ticked({"a": silo(clock=7), "b": silo(clock=5)})
    silos = {"a": silo(clock=7), "b": silo(clock=5, busy=True), "new": silo()}
    state, verdict = Ssp(2).decide(state, view(silos))
    assert verdict.release == ("a", "new")
    assert [tick.ticks for tick in state.clocks.present.values()] == [7, 5, 5]


def test_a_silo_that_comes_back_counts_from_the_slowest_too() -> None:
    """The coordinator restarts its clock at 0: without that, a would be 7 ahead of it."""
    state = ticked({"a": silo(clock=7), "b": silo(clock=6)})
    state, verdict = Ssp(0).decide(state, view({"a": silo(clock=7), "b": silo(clock=0)}))
    assert state.clocks.present["b"].ticks == 7
    assert verdict.release == ("a", "b")


def test_who_comes_back_after_nobody_was_here_is_not_ahead_of_all() -> None:
    """a has made nothing since it joined last, so its clock does not say that it joined anew."""
    clocks = Clocks({"a": Tick(40, 0, 0), "b": Tick(41, 9, 0)})
    clocks = advance(clocks, view({"b": silo(clock=9)}))
    clocks = advance(clocks, view({}))
    clocks = advance(clocks, view({"b": silo(clock=0)}))
    clocks = advance(clocks, view({"a": silo(clock=0), "b": silo(clock=0)}))
    assert clocks.present["a"].ticks - clocks.slowest <= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "barrier",
    [
        {"kind": "ssp", "staleness": 1},
        {"kind": "sampled", "sample_size": 2},
        {"kind": "sampled", "sample_size": 2, "redraw": False},
        {"kind": "asp"},
    ],
)
def test_the_index_spares_time_and_changes_nothing(
    tmp_path: Path, barrier: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Crashes, failures and a late joiner, once with the index and once with everything looked for."""

    def run(name: str) -> Result:
        silos = [{"speed": speed, "jitter": 0.2} for speed in (300.0, 200.0, 70.0, 130.0)]
        silos[0] |= {"crashes": {"mtbf_s": 5.0, "repair_s": 1.0}}
        silos[1] |= {"joins_at_s": 7.0}
        config = strategy(barrier=barrier, stop={"seconds": 60.0}, local={"steps": 8, "batch_size": 32})
        return simulate(tmp_path / name, machines(*silos), config, {"c": spoil(loss=math.nan)})

    fast = run("fast")
    place = [field.name for field in dataclasses.fields(ClusterView)].index("index")

    def blind(*values: Any) -> ClusterView:
        return ClusterView(*values[:place], None, *values[place + 1 :])

    monkeypatch.setattr(coordinator, "ClusterView", blind)
    assert run("slow").text == fast.text
    assert len(fast.events(SiloLost)) > 3


# Whole runs: orders of 1, 2 and 4 s.

SPEEDS = [256.0, 128.0, 64.0]


def test_ssp_by_hand(tmp_path: Path) -> None:
    """s = 1. At 2 s a has done 2 and c none: a waits until c's first at 4 s, and then for each of c's."""
    result = race(tmp_path, SPEEDS, {"kind": "ssp", "staleness": 1}, stop={"seconds": 15.0})
    assert begins(result) == {"a": [0, 1, 4, 8, 12], "b": [0, 2, 4, 8, 12], "c": [0, 4, 8, 12]}


def test_ssp_without_slack_gives_orders_when_bsp_does(tmp_path: Path) -> None:
    ssp = race(tmp_path / "ssp", SPEEDS, {"kind": "ssp", "staleness": 0})
    bsp = race(tmp_path / "bsp", SPEEDS, {"kind": "bsp"})
    assert begins(ssp) == begins(bsp) == {name: [0, 4, 8, 12, 16] for name in "abc"}
    assert [ids for _, ids in commits(ssp)][:12] == [[update_id] for _, ids in commits(bsp) for update_id in ids]
