"""Machines that crash, return, come late and leave; and the way to them, which takes time."""

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import RunError
from fedsync.common.rng import Stream, generator
from fedsync.core.actions import Commit, Discard, Dispatch
from fedsync.core.events import SiloJoined, SiloLost, UpdateArrived
from fedsync.observe.replay import replay
from fedsync.silo.protocol import Completed
from fedsync.simulation.machine import Outage, outages
from tests.simulation.fake import Result, machines, simulate, strategy

FIXED = strategy(balancer={"kind": "fixed"})  # an order is 640 samples: 6.4 s at 100 a second


def commits(result: Result) -> list[list[str]]:
    """Update ids of each commit."""
    return [list(commit.weights) for _, commit in result.actions(Commit)]


def presence(result: Result) -> list[tuple[float, str, str]]:
    """Who was lost and who joined when, after the beginning."""
    kinds = (SiloJoined, SiloLost)
    events = [event for entry in result.entries for event in entry.events if isinstance(event, kinds)]
    return [(event.at_s, type(event).__name__, event.silo) for event in events if event.at_s > 0]


# The way to the silos and back.


def test_bandwidth_counts_the_model_down_and_the_update_up(tmp_path: Path) -> None:
    """The model has 3 float32 values: 12 bytes each way, 192 bits, at 96 bits a second."""
    silos = machines({"speed": 100.0, "bandwidth_mbps": 96e-6, "latency_s": 0.25})
    result = simulate(tmp_path, silos, FIXED)
    assert result.round_seconds() == pytest.approx([6.4 + 2.0 + 0.5] * 3)
    assert dict(result.events(UpdateArrived)[0].report.overhead_s) == pytest.approx({"order": 0.0, "transfer": 2.5})


def test_training_begins_when_the_model_is_there(tmp_path: Path) -> None:
    """A standstill from 0.5 on catches the order that begins at 0, not the one on the way until 0.5."""
    (tmp_path / "trace.csv").write_text("seconds,factor\n0,1\n0.5,0\n100,1\n")
    near, far = machines(
        {"speed": 640.0, "trace": str(tmp_path / "trace.csv")},
        {"speed": 640.0, "trace": str(tmp_path / "trace.csv"), "latency_s": 0.5},
    )
    config = strategy(balancer={"kind": "fixed"}, stop={"rounds": 1})
    # Each order is 1 s of work. Half of a's is done by 0.5; b has not begun.
    result = simulate(tmp_path / "out", [near, far], config)
    assert {e.meta.silo: e.at_s for e in result.events(UpdateArrived)} == pytest.approx({"a": 100.5, "b": 101.5})


def test_transfer_is_not_speed(tmp_path: Path) -> None:
    """Balanced by computing speed: 300 and 100 get 48 and 16, however slow the line."""
    silos = machines({"speed": 300.0}, {"speed": 100.0, "latency_s": 2.0})
    result = simulate(tmp_path, silos)
    sizes = {given.silo: given.order.batch_size for _, given in result.actions(Dispatch)}
    assert sizes == {"a": 48, "b": 16}
    assert result.round_seconds() == pytest.approx([6.4 + 4, 3.2 + 4, 3.2 + 4])


# Faults by plan.


def test_a_fault_in_mid_order_loses_exactly_that_order(tmp_path: Path) -> None:
    """b is down from 8 to 9, in its second order (6.4 to 12.8). a's is not touched; b is in again at 12.8.

    At 8 b's order is lost; a ends at 6.4 + 3.2 = 9.6 and is alone: version 2 is a's. b joined at 9 and idles
    until then; both go on at 9.6.
    """
    silos = machines({"speed": 200.0}, {"speed": 100.0, "faults": [{"at_s": 8.0, "down_s": 1.0}]})
    result = simulate(tmp_path, silos, FIXED)
    assert commits(result) == [["a/1", "b/1"], ["a/2"], ["a/3", "b/3"]]
    assert result.at()[:6] == pytest.approx([0, 3.2, 6.4, 8, 9, 9.6])
    assert presence(result) == [(8.0, "SiloLost", "b"), (9.0, "SiloJoined", "b")]
    discarded = [discard.update_id for _, discard in result.actions(Discard)]
    assert discarded == ["b/2"]
    assert [event.meta.update_id for event in result.events(UpdateArrived)] == ["a/1", "b/1", "a/2", "a/3", "b/3"]
    assert result.round_seconds() == pytest.approx([6.4, 3.2, 6.4])
    assert result.ledger.silos["b"].failures == 1
    assert replay(tmp_path / "journal.jsonl") == result.entries


def test_a_fault_between_orders_loses_nothing(tmp_path: Path) -> None:
    """a is idle from 3.2 to 6.4, and back before the commit."""
    silos = machines({"speed": 200.0, "faults": [{"at_s": 4.0, "down_s": 1.0}]}, {"speed": 100.0})
    assert commits(simulate(tmp_path, silos, FIXED)) == [["a/1", "b/1"], ["a/2", "b/2"], ["a/3", "b/3"]]


def test_an_order_that_ends_as_its_silo_goes_is_lost(tmp_path: Path) -> None:
    """Who is there comes before what arrived."""
    silos = machines({"speed": 128.0, "faults": [{"at_s": 5.0, "down_s": 20.0}]}, {"speed": 100.0})
    assert commits(simulate(tmp_path, silos, FIXED))[0] == ["b/1"]


def test_real_training_goes_on_where_it_was_in_its_data(tmp_path: Path) -> None:
    """The cursor after a crash is that of a silo which was merely not asked."""
    pytest.importorskip("sklearn")
    from fedsync.config.cluster import ClusterConfig
    from fedsync.config.strategy import StrategyConfig
    from fedsync.simulation import run

    seen: dict[str, list[Any]] = {}

    class Watched(run.SiloSession):
        def train(self, *order: Any) -> Completed:
            before = self.cursor
            result = super().train(*order)
            seen.setdefault(self.name, []).append((before, self.cursor))
            return result

    config = StrategyConfig.load("fedavg", ["stop.rounds=3"])
    silos = machines({"speed": 200.0}, {"speed": 100.0, "faults": [{"at_s": 8.0, "down_s": 1.0}]})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "SiloSession", Watched)
        run.run_virtual(config, ClusterConfig(silos=silos), tmp_path)
    assert [len(steps) for steps in seen.values()] == [3, 2]
    for steps in seen.values():
        for (_, after), (before, _) in itertools.pairwise(steps):
            assert after == before


def test_a_fault_seen_late_is_seen_in_order(tmp_path: Path) -> None:
    """With a look every 5 s, going at 8 and coming at 9 are seen together at 10, and the order is lost."""
    silos = machines({"speed": 100.0}, {"speed": 100.0, "faults": [{"at_s": 8.0, "down_s": 1.0}]})
    result = simulate(tmp_path, silos, FIXED, poll_s=5.0)
    (entry,) = [entry for entry in result.entries if entry.at_s == 10.0 and len(entry.events) > 2]
    kinds = [type(event) for event in entry.events]
    assert kinds == [UpdateArrived, UpdateArrived, SiloLost, SiloJoined]


def test_the_run_goes_on_while_everybody_is_away(tmp_path: Path) -> None:
    """Alone, and down from 3 to 5: the order begins anew at 5."""
    silos = machines({"speed": 100.0, "faults": [{"at_s": 3.0, "down_s": 2.0}]})
    result = simulate(tmp_path, silos, FIXED)
    assert commits(result) == [["a/2"], ["a/3"], ["a/4"]]
    assert result.ledger.rounds[0].at_s == pytest.approx(11.4)


# Random crashes.


def test_crashes_come_from_the_generators_that_the_design_names() -> None:
    """Up, down, up, down: exponential with the two means, in blocks of 8 pairs."""
    (silo,) = machines({"speed": 1.0, "crashes": {"mtbf_s": 100.0, "repair_s": 10.0}})
    draws = [generator(7, Stream.CRASHES, "a", block).exponential(size=(8, 2)) for block in (0, 1)]
    edges = np.cumsum(np.concatenate(draws) * [100.0, 10.0])
    found = list(itertools.islice(outages(silo, 7), 16))
    np.testing.assert_allclose([(span.at_s, span.back_s) for span in found], edges.reshape(16, 2), rtol=1e-12)
    assert {span.reason for span in found} == {"crash"}


def test_times_away_that_touch_are_one() -> None:
    faults = [{"at_s": at_s, "down_s": down_s} for at_s, down_s in [(1, 2), (3, 1), (2, 0.5), (10, 1), (19, 5)]]
    (silo,) = machines({"speed": 1.0, "faults": faults, "leaves_at_s": 20.0})
    assert list(outages(silo, 7)) == [
        Outage(1.0, 4.0, "fault by plan"),
        Outage(10.0, 11.0, "fault by plan"),
        Outage(19.0, math.inf, "fault by plan"),
    ]


def test_a_run_with_crashes_loses_orders_and_ends(tmp_path: Path) -> None:
    silos = machines(*[{"speed": 100.0, "crashes": {"mtbf_s": 20.0, "repair_s": 2.0}}] * 4)
    result = simulate(tmp_path, silos, strategy(stop={"rounds": 10}))
    lost, joined = result.events(SiloLost), result.events(SiloJoined)
    assert len(result.ledger.rounds) == 10
    assert len(lost) > 3
    assert 0 <= len(lost) - (len(joined) - 4) <= 4, "who is lost comes back"
    arrived = {event.meta.update_id for event in result.events(UpdateArrived)}
    discarded = {discard.update_id for _, discard in result.actions(Discard)}
    sent = {given.order.update_id for _, given in result.actions(Dispatch)}
    assert sent == arrived | discarded, "each order came through or was lost with its silo"
    assert not arrived & discarded
    assert replay(tmp_path / "journal.jsonl") == result.entries


# Late joiners and leavers.


def test_a_late_joiner_takes_part_from_its_time_on(tmp_path: Path) -> None:
    """The others begin at 0 without it; it joins at 7 and is in from the round that begins at 12.8."""
    silos = machines({"speed": 100.0}, {"speed": 100.0}, {"speed": 100.0, "joins_at_s": 7.0})
    result = simulate(tmp_path, silos, FIXED)
    assert commits(result) == [["a/1", "b/1"], ["a/2", "b/2"], ["a/3", "b/3", "c/1"]]
    assert presence(result) == [(7.0, "SiloJoined", "c")]
    assert replay(tmp_path / "journal.jsonl") == result.entries


def test_a_run_of_late_joiners_begins_with_the_first(tmp_path: Path) -> None:
    silos = machines({"speed": 100.0, "joins_at_s": 3.0}, {"speed": 100.0, "joins_at_s": 5.0})
    assert commits(simulate(tmp_path, silos, FIXED)) == [["a/1"], ["a/2", "b/1"], ["a/3", "b/2"]]


def test_a_silo_that_leaves_is_gone_for_good(tmp_path: Path) -> None:
    """b leaves in its second order; a goes on alone."""
    silos = machines({"speed": 100.0}, {"speed": 100.0, "leaves_at_s": 10.0})
    result = simulate(tmp_path, silos, FIXED)
    assert commits(result) == [["a/1", "b/1"], ["a/2"], ["a/3"]]
    assert presence(result) == [(10.0, "SiloLost", "b")]
    assert [event.reason for event in result.events(SiloLost)] == ["left"]


def test_when_everybody_has_left_the_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="nothing is left to happen"):
        simulate(tmp_path, machines({"speed": 100.0, "leaves_at_s": 10.0}), FIXED)


@pytest.mark.parametrize(
    ("other", "changes"),
    [
        ({"crashes": {"mtbf_s": 1.0, "repair_s": 1.0}}, {"min_silos": 3}),
        ({"presence": {"for_s": 2.0, "every_s": 100.0}}, {}),
    ],
    ids=["the barrier waits for a third silo", "windows are shorter than an order"],
)
def test_silos_that_come_and_go_without_work_do_not_keep_a_run_alive(
    other: dict[str, Any], changes: dict[str, Any], tmp_path: Path
) -> None:
    silos = machines({"speed": 100.0, **other}, {"speed": 100.0, **other})
    with pytest.raises(RunError, match=r"silos were lost 10\d\d times, and no update arrived"):
        simulate(tmp_path, silos, strategy(**changes))


def test_one_long_order_outlasts_the_crashes_of_another_silo(tmp_path: Path) -> None:
    """One order of 640 samples takes 2,560 s, in which the other silo crashes some 1,280 times."""
    silos = machines({"speed": 0.25}, {"speed": 100.0, "crashes": {"mtbf_s": 1.0, "repair_s": 1.0}})
    assert len(commits(simulate(tmp_path, silos, strategy(stop={"rounds": 1})))) == 1


# Reproducibility.

EVERYTHING = machines(
    {"speed": 300.0, "contention": {"kind": "markov", "factor": 0.3, "on_s": 3.0, "off_s": 6.0}},
    {"speed": 200.0, "jitter": 0.2},
    {"speed": 200.0, "crashes": {"mtbf_s": 15.0, "repair_s": 3.0}, "latency_s": 0.1, "bandwidth_mbps": 0.001},
    {"speed": 100.0, "joins_at_s": 5.0, "leaves_at_s": 60.0, "faults": [{"at_s": 20.0, "down_s": 4.0}]},
)


@pytest.mark.parametrize("poll_s", [0.0, 0.5])
def test_the_same_seed_gives_the_same_bytes(tmp_path: Path, poll_s: float) -> None:
    config = strategy(stop={"rounds": 12})
    results = [simulate(tmp_path / name, EVERYTHING, config, poll_s=poll_s) for name in ("one", "two")]
    assert len(results[0].events(SiloLost)) > 2
    for file in ("journal.jsonl", "rounds.jsonl", "summary.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert replay(tmp_path / "one" / "journal.jsonl") == results[0].entries


# Windows of which the run knows.


def test_a_silo_in_windows_gets_no_order_that_it_cannot_answer_and_is_asked_again(tmp_path: Path) -> None:
    """An order takes 6.4 s; b is there for 16 of each 40 s, so it gets two in a window. a's rounds go on without it.

    When they are done at 12.8 s, 3.2 s are left. It gets its third when it is back at 40 s.
    """
    silos = machines({"speed": 200.0}, {"speed": 100.0, "presence": {"for_s": 16.0, "every_s": 40.0}})
    result = simulate(tmp_path, silos, strategy(balancer={"kind": "fixed"}, stop={"rounds": 13}))
    at = {given.order.update_id: at_s for at_s, given in result.actions(Dispatch)}
    assert [at[f"b/{number}"] for number in (1, 2)] == pytest.approx([0.0, 6.4])
    assert at["b/3"] >= 40.0
    assert result.ledger.silos["b"].failures == 0, "nothing that it was given was lost"
    assert result.actions(Discard) == []
    assert any("b gets no order" in entry.reason for entry in result.entries)
    assert [len(each) for each in commits(result)[:3]] == [2, 2, 1]
    assert replay(tmp_path / "journal.jsonl") == result.entries


def test_a_run_goes_on_in_the_next_window_where_all_were_away(tmp_path: Path) -> None:
    silos = machines(*[{"speed": 100.0, "presence": {"for_s": 8.0, "every_s": 86_400.0}}] * 2)
    result = simulate(tmp_path, silos, FIXED)
    assert [len(each) for each in commits(result)] == [2, 2, 2]
    begun = sorted({at_s for at_s, _ in result.actions(Dispatch)})
    assert begun == pytest.approx([0.0, 86_400.0, 2 * 86_400.0])
    assert any("the run waits" in entry.reason for entry in result.entries)
    assert replay(tmp_path / "journal.jsonl") == result.entries


def test_windows_close_before_the_next_one(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="for_s 40 is not below every_s 40"):
        machines({"speed": 1.0, "presence": {"for_s": 40.0, "every_s": 40.0}})


@pytest.mark.parametrize("every_s", [0.1, 7.3, 86_400.0])
def test_a_window_begins_when_the_silo_is_back(every_s: float) -> None:
    """Also where rounding has it a little before."""
    silo = machines({"speed": 1.0, "joins_at_s": 0.7, "presence": {"for_s": every_s / 2, "every_s": every_s}})[0]
    assert silo.presence is not None
    seen = list(itertools.islice(outages(silo, seed=7), 200))
    assert len(seen) == 200, "its window closes again and again"
    for outage in seen:
        said = silo.presence.told(outage.back_s - silo.joins_at_s)
        assert said.sound and said.left_s == pytest.approx(every_s / 2, rel=1e-6)
