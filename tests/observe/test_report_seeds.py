"""Runs of several seeds in one report."""

from dataclasses import replace

import pytest

from fedsync.observe.report import seeds
from fedsync.observe.report.data import RunData, read_run
from fedsync.observe.report.page_results import over_seeds
from tests.observe.runs import two_silos
from tests.observe.test_report_page import Reader

ACCURACIES = {"one": [0.5, 0.6, 0.7], "two": [0.6, 0.8, 1.0]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    """Two strategies with the seeds 7, 8 and 9; the second is better by 0.1, 0.2 and 0.3."""
    folder = tmp_path_factory.mktemp("runs")
    found = []
    for strategy, barrier in (("one", "bsp"), ("two", "asp")):
        for at, accuracy in enumerate(ACCURACIES[strategy]):
            out = folder / f"{strategy}-{7 + at}"
            two_silos(out, seed=7 + at, name=strategy, barrier={"kind": barrier})
            run = read_run(out)
            found.append(replace(run, summary={**run.summary, "accuracy": accuracy}))
    return found


def test_runs_that_differ_in_their_seeds_alone_belong_together(runs: list[RunData]) -> None:
    found = seeds.groups(runs)
    assert [(group.label, sorted(group.runs)) for group in found] == [("one", [7, 8, 9]), ("two", [7, 8, 9])]
    assert seeds.groups(runs[:1]) == seeds.groups([runs[0], runs[3]]) == [], "one seed each"
    assert seeds.groups([runs[0], runs[0], runs[1]]) == [], "one seed twice"


def test_the_page_has_means_and_tests(runs: list[RunData]) -> None:
    """By hand: 0.1, 0.2, 0.3 have the mean 0.2 and the interval 0.2 +- 4.303 x 0.1 / sqrt(3); t = 2 sqrt(3)."""
    words = " ".join(" ".join(Reader(over_seeds(runs)).words).split())
    assert "one 3 0.600 [0.352, 0.848] two 3 0.800 [0.303, 1.297]" in words
    assert "two 3 0.200 [-0.048, 0.448] 0.0742 0.0742 0.25" in words
    assert "A p-value says how often" in words


def test_two_pairs_are_not_tested(runs: list[RunData]) -> None:
    words = " ".join(" ".join(Reader(over_seeds([*runs[:2], *runs[3:5]])).words).split())
    assert "not tested: 2 pairs; a test needs 3" in words


def test_runs_of_one_seed_have_no_such_section(runs: list[RunData]) -> None:
    assert over_seeds([runs[0], runs[3]]) == ""


def test_times_to_a_target_that_a_run_missed_are_not_compared(runs: list[RunData]) -> None:
    reached = [replace(run, summary={**run.summary, "seconds_to_target": 4.0}) for run in runs]
    missed = [replace(run, summary={**run.summary, "seconds_to_target": None}) for run in runs[:1]]
    first, second = seeds.groups([*missed, *reached[1:]])
    assert first.values(seeds.TO_TARGET) == {}
    assert len(second.values(seeds.TO_TARGET)) == 3
