"""Tables over runs of several seeds."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.extras.papers import seeds
from fedsync.extras.papers.paper import files_beside
from fedsync.extras.report.data import RunData, read_run
from fedsync.extras.report.results import Estimate, Findings, Results
from fedsync.observe.terminal import Terminal
from tests.extras.papers.test_paper import check_latex
from tests.observe.evaluations import METRICS, add_results
from tests.observe.runs import two_silos

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
            found.append(replace(run, results=Results(), summary={**run.summary, "accuracy": accuracy}))
    return found


def test_runs_that_differ_in_their_seeds_alone_belong_together(runs: list[RunData]) -> None:
    found = seeds.groups(runs)
    assert [(group.label, sorted(group.runs)) for group in found] == [("one", [7, 8, 9]), ("two", [7, 8, 9])]
    assert seeds.groups(runs[:1]) == seeds.groups([runs[0], runs[3]]) == [], "one seed each"
    assert seeds.groups([runs[0], runs[0], runs[1]]) == [], "one seed twice"


def test_the_terminal_has_the_tests_of_accuracy_and_of_times(runs: list[RunData]) -> None:
    """By hand: 0.1, 0.2, 0.3 have the mean 0.2 and the interval 0.2 +- 4.303 x 0.1 / sqrt(3); t = 2 sqrt(3).

    The second takes a second less; where one run missed the target, there is no test.
    """
    timed = [replace(run, summary={**run.summary, "seconds_to_target": 4.0 - at // 3}) for at, run in enumerate(runs)]
    lines = {}
    for given in (timed, [replace(timed[0], summary=runs[0].summary), *timed[1:]]):
        console = Terminal(width=200)
        with console.capture() as capture:
            console.print(seeds.seed_table(seeds.groups(given)))
        lines[len(lines)] = [" ".join(line.split()) for line in capture.get().splitlines()]
    assert lines[0][0] == "Differences to one, seed by seed; metrics: last version that was scored"
    assert "accuracy two 3 0.200 [-0.048, 0.448] 0.0742 0.0742 0.25" in lines[0]
    assert "seconds to target two 3 -1.000 [-1.000, -1.000] not tested: all differences are the same - -" in lines[0]
    assert "seconds to target two 0 - not tested: 0 pairs; a test needs 3 - -" in lines[1]


def test_every_metric_has_a_mean(tmp_path: Path) -> None:
    """By hand: pooled AUROC is the base less 0.03, so 0.84 and 0.86."""
    for seed, base in ((7, 0.87), (8, 0.89)):
        two_silos(tmp_path / str(seed), seed=seed)
        add_results(tmp_path / str(seed), ["a", "b"], base=base)
    (group,) = groups = seeds.groups([read_run(tmp_path / seed) for seed in "78"])
    assert seeds.figures(groups) == ["accuracy", "seconds", *(name for name in METRICS if name != "accuracy")]
    assert seeds.mean_of(group, "auroc").startswith("0.850 [")


def test_tables_over_seeds_are_beside_the_page(runs: list[RunData]) -> None:
    """By hand, as above; the CSV has every run."""
    files = files_beside(runs)
    assert files.keys() == {"seeds.tex", "seeds.md", "seeds.csv"}
    assert "| one | 3 | 0.600 \\[0.352, 0.848\\] |" in files["seeds.md"]
    assert "| accuracy | two | 3 | 0.200 \\[-0.048, 0.448\\] | 0.0742 | 0.0742 | 0.25 |" in files["seeds.md"]
    assert "last version that was scored" in files["seeds.md"]
    rows = list(csv.DictReader(files["seeds.csv"].splitlines()))
    assert [(row["strategy"], row["seed"], float(row["accuracy"])) for row in rows][:2] == [
        ("one", "7", 0.5),
        ("one", "8", 0.6),
    ]
    assert len(rows) == 6
    check_latex(files["seeds.tex"])
    assert files_beside([runs[0], runs[3]]) == {}, "one seed each"


def test_metrics_are_those_of_the_test_split_where_it_was_asked(runs: list[RunData]) -> None:
    """What the summary calls accuracy is of the split that rounds are evaluated on."""
    found = Results((Findings("best", "test", 3, {"accuracy": Estimate(0.9)}, {}),))
    groups = seeds.groups([replace(run, results=found) for run in runs[:2]])
    assert groups[0].values("accuracy") == {7: 0.9, 8: 0.9}
    assert seeds.judged(groups) == "best version, test split"
