"""The books of a run are what really happened, by the cluster's own clock."""

from collections import defaultdict

import pytest

from fedsync.core.actions import Commit, Rollback
from tests.laws.fake_cluster import MEAN_LOSS
from tests.laws.law import law
from tests.laws.watched import Run


@law(least=200)
def work_counted_is_work_done(run: Run) -> int:
    """Samples, steps, orders and seconds of each silo are exactly those of its accepted updates."""
    outcome, summary = run.outcome, run.books.summary()
    done = defaultdict(list)
    for update_id, report in outcome.accepted.items():
        done[outcome.jobs[update_id].silo].append(report)
    for row in summary["silos"]:
        reports = done.pop(row["name"], [])
        assert row["samples"] == sum(report.samples for report in reports)
        assert row["steps"] == sum(report.steps for report in reports)
        assert row["orders"] == len(reports)
        assert row["compute_s"] == pytest.approx(sum(report.compute_s for report in reports), rel=1e-9)
    assert not done, "silos that worked and are not in the books"
    assert summary["samples"] == sum(report.samples for report in outcome.accepted.values())
    return len(outcome.accepted)


@law(least=30)
def busy_and_waiting_seconds_are_all_seconds(run: Run) -> int:
    """A silo is busy from its order to the order's end or to the end of training, and waits all the other time."""
    outcome, ledger = run.outcome, run.books
    first_s = min((job.begin_s for job in outcome.jobs.values()), default=outcome.closing_s)
    assert ledger.seconds == pytest.approx(max(outcome.closing_s - first_s, 0.0), rel=1e-9, abs=1e-9)
    busy: dict[str, float] = defaultdict(float)
    for job in outcome.jobs.values():
        end_s = outcome.closing_s if job.end_s is None else job.end_s
        busy[job.silo] += max(min(outcome.closing_s, end_s) - job.begin_s, 0.0)
    rows = ledger.summary()["silos"]
    for row in rows:
        busy_s = busy[row["name"]]
        assert row["compute_s"] + row["overhead_s"] == pytest.approx(busy_s, rel=1e-9, abs=1e-9)
        assert row["wait_s"] == pytest.approx(ledger.seconds - busy_s, rel=1e-9, abs=1e-9)
        assert row["wait_s"] >= -1e-9
    return len(rows)


@law(least=5)
def shares_of_time_follow_from_the_silos(run: Run) -> int:
    """Utilisation and the waiting share are the silos' training and waiting seconds, divided by all seconds."""
    summary = run.books.summary()
    silo_seconds = summary["seconds"] * len(summary["silos"])
    if silo_seconds == 0:
        return 0
    compute_s = sum(row["compute_s"] for row in summary["silos"])
    wait_s = sum(row["wait_s"] for row in summary["silos"])
    assert summary["utilisation"] == pytest.approx(compute_s / silo_seconds, rel=1e-9, abs=1e-12)
    assert summary["wait_fraction"] == pytest.approx(wait_s / silo_seconds, rel=1e-9, abs=1e-9)
    assert -1e-9 <= summary["wait_fraction"] <= 1
    assert 0 <= summary["utilisation"] <= 1 + 1e-9
    return 1


@law(least=100)
def rounds_follow_each_other(run: Run) -> int:
    """The run's statistics have a row for each commit. The rows' seconds add up to the last commit's time."""
    rounds = run.books.rounds
    assert [row.round for row in rounds] == [commit.version for commit in run.outcome.actions(Commit)]
    assert sum(row.seconds for row in rounds) == pytest.approx(rounds[-1].at_s if rounds else 0)
    assert all(row.seconds >= 0 for row in rounds)
    return len(rounds)


@law(least=3)
def the_last_model_has_a_score(run: Run) -> int:
    """The silos evaluated the last version, and the run's statistics have the pooled score."""
    last = run.books.rounds[-1] if run.books.rounds else None
    if last is None or last.round in {rollback.version - 1 for rollback in run.outcome.actions(Rollback)}:
        return 0  # the last model is an older one again
    if run.scenario.sealed or any(silo.leaves_at_the_end for silo in run.scenario.silos):
        return 0  # silos tell with their next update, or cannot
    assert last.accuracy == pytest.approx(run.scenario.accuracy(last.round))
    assert last.test_loss == pytest.approx(MEAN_LOSS)
    return 1
