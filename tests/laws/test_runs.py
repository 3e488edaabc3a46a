"""What holds for every run, whatever decides and whatever happens.

Each law looks at a finished run of the fake cluster; the run is cached, so that the laws share it.
"""

import itertools
import pickle
import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from fedsync.core import codec
from fedsync.core.actions import Commit, Discard, Dispatch, Evaluate, Rollback, Stop
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import SiloJoined, SiloLost, UpdateArrived, WorkFailed
from fedsync.core.journal import JournalEntry, replay
from fedsync.observe.ledger import Ledger
from fedsync.policies.aggregate.weighers import WeightedMean
from tests.laws.fake_cluster import FakeCluster, Outcome, Scenario
from tests.laws.kinds import BATCH_SIZE, cases, policies_of

# A round takes about a second: 4 steps x 10 samples at 50 to 200 samples/s, and the overhead.
CALMS_DOWN_S = 7.5
"""The last mishap is under way for so long: lost 2 s into an order, back 5 s later."""

STOPS: list[dict[str, Any]] = [{"seconds": 25.0}, {"rounds": 12, "seconds": 60.0}]
PATIENCE = 16
"""Batches that an idle silo may have to watch, for each silo there is, once all is calm: the others' orders
bring four events each, and nobody is more than four times as fast as another."""

CASES = cases()
NAMES = ["-".join([kind, *map(str, more.values())]) for _, kind, more in CASES]

scenarios = st.builds(
    Scenario,
    seed=st.integers(0, 2**32 - 1),
    silos=st.integers(1, 6),
    chaos=st.sampled_from([0.0, 0.1, 0.4]),
    calm_s=st.sampled_from([6.0, 100.0]),
    poll_s=st.sampled_from([0.0, 0.0, 0.5]),
)


@cache
def run(case: int, stop: int, scenario: Scenario) -> Outcome:
    return FakeCluster(Coordinator(policies_of(CASES[case], STOPS[stop])), scenario).run()


def books(outcome: Outcome) -> Ledger:
    ledger = Ledger(model_bytes=100)
    for entry in outcome.entries:
        ledger.add(entry)
    return ledger


def fresh(case: int, stop: int) -> Coordinator:
    return Coordinator(policies_of(CASES[case], STOPS[stop]))


# The laws. Each takes a case, a stop rule and a scenario.


def the_run_ends_and_a_driver_can_do_what_it_is_told(case: int, stop: int, scenario: Scenario) -> None:
    outcome = run(case, stop, scenario)
    assert outcome.faults == []
    assert isinstance(outcome.entries[-1].actions[-1], Stop)
    assert len(outcome.actions(Stop)) == 1
    assert len(outcome.actions(Evaluate)) <= 1


def a_replay_decides_the_same(case: int, stop: int, scenario: Scenario) -> None:
    entries = run(case, stop, scenario).entries
    for old, new in zip(entries, replay(entries, fresh(case, stop)), strict=True):
        assert new == old


def a_replay_from_json_decides_the_same(case: int, stop: int, scenario: Scenario) -> None:
    entries = run(case, stop, scenario).entries
    texts = [codec.dumps(entry) for entry in entries]
    read = [codec.loads(JournalEntry, text, own=True) for text in texts]
    assert [codec.dumps(entry) for entry in replay(read, fresh(case, stop))] == texts


def another_coordinator_goes_on_from_the_state_at_any_time(case: int, stop: int, scenario: Scenario) -> None:
    entries = run(case, stop, scenario).entries
    coordinator = fresh(case, stop)
    every = max(1, len(entries) // 5)
    for number, entry in enumerate(entries):
        if number % every == 0:
            saved = pickle.dumps(coordinator.state())
            coordinator = fresh(case, stop)
            coordinator.restore(pickle.loads(saved))
        assert coordinator.handle(entry.events, entry.at_s) == entry


def every_update_is_committed_or_discarded_by_name(case: int, stop: int, scenario: Scenario) -> None:
    """A Discard may be repeated, for each copy that arrives; a Commit may not, and nothing has both before."""
    outcome = run(case, stop, scenario)
    fate: dict[str, str] = {}
    for entry in outcome.entries:
        for action in entry.actions:
            if isinstance(action, Commit):
                for update_id in action.weights:
                    assert update_id not in fate, f"{update_id} was {fate[update_id]} before it was committed"
                    fate[update_id] = "committed"
            elif isinstance(action, Discard):
                fate.setdefault(action.update_id, "discarded")
    assert fate.keys() == outcome.jobs.keys()
    assert outcome.payloads == {}, "a driver is left with payloads that nobody named"


def only_good_reports_are_committed(case: int, stop: int, scenario: Scenario) -> None:
    outcome = run(case, stop, scenario)
    assert {update_id for commit in outcome.actions(Commit) for update_id in commit.weights} <= outcome.accepted.keys()


def weights_are_sorted_and_those_of_a_mean_sum_to_one(case: int, stop: int, scenario: Scenario) -> None:
    outcome = run(case, stop, scenario)
    models = [a for entry in outcome.entries for a in entry.actions if isinstance(a, Commit | Rollback)]
    assert [model.version for model in models] == list(range(1, len(models) + 1))
    mean = isinstance(policies_of(CASES[case], STOPS[stop]).weigher, WeightedMean)
    for commit in outcome.actions(Commit):
        assert list(commit.weights) == sorted(commit.weights)
        assert not mean or abs(sum(commit.weights.values()) - 1) < 1e-12
        assert all(weight > 0 for weight in commit.weights.values())


def orders_start_from_the_newest_model_and_count_up(case: int, stop: int, scenario: Scenario) -> None:
    version, rounds, seeds = 0, Counter[str](), set[int]()
    for entry in run(case, stop, scenario).entries:
        for action in entry.actions:
            if isinstance(action, Commit | Rollback):
                version = action.version
            elif isinstance(action, Dispatch):
                rounds[action.silo] += 1
                assert (action.order.base_version, action.order.round) == (version, rounds[action.silo])
                assert action.order.batch_size >= 1
                assert action.order.max_steps >= 1
                seeds.add(action.order.seed)
    assert len(seeds) == rounds.total(), "each order has its own seed"


def no_silo_starves(case: int, stop: int, scenario: Scenario) -> None:
    """Once all is calm, a silo without an order gets one before PATIENCE x silos batches have passed.

    One that failed too often is set aside in so many words, and counts from the end of its rest.
    """
    outcome = run(case, stop, scenario)
    ended = Counter((job.silo, job.end_s) for job in outcome.jobs.values() if not job.void)
    idle_since: dict[str, int] = {}
    rests_until_s: dict[str, float] = {}
    for number, entry in enumerate(outcome.entries):
        for name, rest_s in re.findall(r"(\S+) is set aside for (\S+) s after", entry.reason):
            rests_until_s[name] = entry.at_s + float(rest_s)
        for event in entry.events:
            if isinstance(event, SiloJoined):
                rests_until_s.pop(event.silo, None)
                idle_since[event.silo] = number
            elif isinstance(event, SiloLost):
                idle_since.pop(event.silo, None)
            elif isinstance(event, UpdateArrived | WorkFailed):
                silo = event.meta.silo if isinstance(event, UpdateArrived) else event.silo
                if ended[silo, entry.at_s]:
                    idle_since.setdefault(silo, number)
        for action in entry.actions:
            if isinstance(action, Dispatch):
                idle_since.pop(action.silo)
        if entry.at_s >= outcome.closing_s:
            return
        idle_since.update({name: number for name in idle_since if entry.at_s < rests_until_s.get(name, 0.0)})
        if entry.at_s > scenario.calm_s + CALMS_DOWN_S:
            waiting = {silo: number - since for silo, since in idle_since.items()}
            assert max(waiting.values(), default=0) <= PATIENCE * scenario.silos, f"{waiting} batches, {entry}"


def work_counted_is_work_done(case: int, stop: int, scenario: Scenario) -> None:
    outcome = run(case, stop, scenario)
    summary = books(outcome).summary()
    for row in summary["silos"]:
        done = [report for uid, report in outcome.accepted.items() if outcome.jobs[uid].silo == row["name"]]
        assert row["samples"] == sum(report.samples for report in done)
        assert row["steps"] == sum(report.steps for report in done)
        assert row["orders"] == len(done)
        assert row["compute_s"] == pytest.approx(sum(report.compute_s for report in done), rel=1e-9)
    assert summary["samples"] == sum(report.samples for report in outcome.accepted.values())


def busy_and_waiting_seconds_are_all_seconds(case: int, stop: int, scenario: Scenario) -> None:
    """From the cluster's own clock: a silo is busy from its order to the order's end, or to the end of training."""
    outcome = run(case, stop, scenario)
    ledger = books(outcome)
    begin_s = min((job.begin_s for job in outcome.jobs.values()), default=outcome.closing_s)
    assert ledger.seconds == pytest.approx(max(outcome.closing_s - begin_s, 0.0), rel=1e-9, abs=1e-9)
    for row in ledger.summary()["silos"]:
        jobs = [job for job in outcome.jobs.values() if job.silo == row["name"]]
        ends = [min(outcome.closing_s, job.end_s if job.end_s is not None else outcome.closing_s) for job in jobs]
        busy_s = sum(end_s - job.begin_s for job, end_s in zip(jobs, ends, strict=True))
        assert row["compute_s"] + row["overhead_s"] == pytest.approx(busy_s, rel=1e-9, abs=1e-9)
        assert row["wait_s"] == pytest.approx(ledger.seconds - busy_s, rel=1e-9, abs=1e-9)
        assert row["wait_s"] >= -1e-9


def shares_of_time_follow_from_the_silos(case: int, stop: int, scenario: Scenario) -> None:
    summary = books(run(case, stop, scenario)).summary()
    silo_seconds = summary["seconds"] * len(summary["silos"])
    if silo_seconds == 0:
        return
    compute_s = sum(row["compute_s"] for row in summary["silos"])
    wait_s = sum(row["wait_s"] for row in summary["silos"])
    assert summary["utilisation"] == pytest.approx(compute_s / silo_seconds, rel=1e-9, abs=1e-12)
    assert summary["wait_fraction"] == pytest.approx(wait_s / silo_seconds, rel=1e-9, abs=1e-9)
    assert -1e-9 <= summary["wait_fraction"] <= 1
    assert 0 <= summary["utilisation"] <= 1 + 1e-9


def rounds_follow_each_other(case: int, stop: int, scenario: Scenario) -> None:
    outcome = run(case, stop, scenario)
    ledger = books(outcome)
    assert [row.round for row in ledger.rounds] == [commit.version for commit in outcome.actions(Commit)]
    assert sum(row.seconds for row in ledger.rounds) == pytest.approx(ledger.rounds[-1].at_s if ledger.rounds else 0)
    assert all(row.seconds >= 0 for row in ledger.rounds)


def the_last_model_has_a_score(case: int, stop: int, scenario: Scenario) -> None:
    """All evaluations of the cluster are 25 of 50, mean loss 2; pooled in whatever way, that is what comes out."""
    outcome = run(case, stop, scenario)
    ledger = books(outcome)
    last = ledger.rounds[-1] if ledger.rounds else None
    if last is None or last.round in {rollback.version - 1 for rollback in outcome.actions(Rollback)}:
        return  # the last model is an older one again
    if scenario.chaos == 0 or outcome.closing_s > scenario.calm_s + CALMS_DOWN_S:
        assert (last.accuracy, last.test_loss) == (0.5, 2.0)


LAWS: list[Callable[[int, int, Scenario], None]] = [
    the_run_ends_and_a_driver_can_do_what_it_is_told,
    a_replay_decides_the_same,
    a_replay_from_json_decides_the_same,
    another_coordinator_goes_on_from_the_state_at_any_time,
    every_update_is_committed_or_discarded_by_name,
    only_good_reports_are_committed,
    weights_are_sorted_and_those_of_a_mean_sum_to_one,
    orders_start_from_the_newest_model_and_count_up,
    no_silo_starves,
    work_counted_is_work_done,
    busy_and_waiting_seconds_are_all_seconds,
    shares_of_time_follow_from_the_silos,
    rounds_follow_each_other,
    the_last_model_has_a_score,
]


@pytest.mark.parametrize("case", range(len(CASES)), ids=NAMES)
@settings(max_examples=8, phases=[Phase.explicit, Phase.generate])  # a smaller seed is no simpler
@given(stop=st.integers(0, len(STOPS) - 1), scenario=scenarios)
def test_laws(case: int, stop: int, scenario: Scenario) -> None:
    """All laws that a run breaks are told together, by name."""
    broken: list[Exception] = []
    for law in LAWS:
        try:
            law(case, stop, scenario)
        except Exception as error:  # a crash breaks a law too
            error.add_note(f"broken: {law.__name__}")
            broken.append(error)
    if broken:
        raise ExceptionGroup("laws are broken", broken)


def test_the_laws_see_every_kind_of_mishap() -> None:
    """The net has no hole: the scenarios do bring about what the laws are meant to survive."""
    seen: Counter[str] = Counter()
    for seed in range(15):
        outcome = run(0, 0, Scenario(seed, silos=5, chaos=0.4, calm_s=100.0))
        for entry in outcome.entries:
            seen.update(type(event).__name__ for event in entry.events)
            seen.update(a.reason.split(":")[0] for a in entry.actions if isinstance(a, Discard))
    expected = ["SiloJoined", "SiloLost", "WorkFailed", "UpdateArrived", "Progressed", "Evaluated", "TimerFired"]
    expected += ["disk full", "the silo joined again", "the silo was lost", "the run is over"]
    expected += ["nobody waits for it"]
    assert [name for name in expected if seen[name] < 3] == []
    assert sum(count for reason, count in seen.items() if "failed the check" in reason) >= 5


def test_uncapped_batches_sum_to_the_total() -> None:
    """Every round in which all silos begin together: n x B samples a step, to the sample."""
    rounds = 0
    for case, scenario in itertools.product(range(len(CASES)), [Scenario(seed, silos=5) for seed in range(2)]):
        section, kind, more = CASES[case]
        if (section == "barrier" and kind != "bsp") or more.get("scale") == "steps" or "cap" in more:
            continue
        for entry in run(case, 0, scenario).entries:
            sizes = [action.order.batch_size for action in entry.actions if isinstance(action, Dispatch)]
            if len(sizes) == 5:
                assert sum(sizes) == 5 * BATCH_SIZE
                rounds += 1
    assert rounds > 50
