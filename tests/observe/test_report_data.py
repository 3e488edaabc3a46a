"""What the report takes from a run's folder."""

import json
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.sections.evaluation import UNASKED
from fedsync.core.journal import FORMAT
from fedsync.observe.report.data import FIGURES, natural, read_run, read_runs
from tests.observe.runs import two_silos
from tests.simulation.fake import machines, simulate, spoil, strategy


def test_orders_have_their_times_and_what_was_trained_in_them(tmp_path: Path) -> None:
    two_silos(tmp_path)
    run = read_run(tmp_path)
    assert run.silos == ("a", "b")
    spans = {(span.silo, span.begin_s, span.end_s, span.compute_s, span.done) for span in run.orders}
    begins = (0.0, 2.5, 5.0)
    assert spans == {("a", at, at + 1.0, 1.0, True) for at in begins} | {
        ("b", at, at + 2.5, 2.0, True) for at in begins
    }
    assert {(span.silo, span.speed) for span in run.orders} == {("a", 100.0), ("b", 50.0)}
    assert [(point.round, point.at_s) for point in run.points] == [(1, 2.5), (2, 5.0), (3, 7.5)]
    assert run.summary["wait_fraction"] == pytest.approx((3 * 1.5) / (2 * 7.5))
    assert run.ended


def test_the_figures_are_those_of_the_summary_file(tmp_path: Path) -> None:
    two_silos(tmp_path)
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written.pop("evaluation")["test"]["last"]["version"] == 3
    # The journal names no metrics, and a page that lacks them says so.
    written["notes"].append(UNASKED)
    assert written == read_run(tmp_path).summary


def test_updates_of_rounds_that_wait_are_fresh(tmp_path: Path) -> None:
    two_silos(tmp_path)
    assert read_run(tmp_path).updates_by_staleness == {0: 6}


def test_staleness_counts_the_versions_between(tmp_path: Path) -> None:
    """ASP: a ends at 1 s (version 1) and 2 s (version 2); b, which began with version 0, at 2.5 s."""
    two_silos(tmp_path, barrier={"kind": "asp"}, stop={"rounds": 3})
    assert [point.staleness for point in read_run(tmp_path).points] == [(0,), (0,), (2,)]


def test_forecasts_are_the_predictors_own(tmp_path: Path) -> None:
    """Nothing is known before the first order; constant speeds are then forecast exactly."""
    two_silos(tmp_path)
    run = read_run(tmp_path)
    forecasts = [span.predicted for span in run.orders if span.silo == "b"]
    assert forecasts[0] is None
    assert forecasts[1:] == pytest.approx([50.0, 50.0])
    assert run.forecasts == ""


def test_a_moving_average_lags_as_it_should(tmp_path: Path) -> None:
    """Speeds 100, then 50: with alpha 0.2 the third order is forecast 0.2 x 50 + 0.8 x 100 = 90."""
    (tmp_path / "load.csv").write_text("seconds,factor\n0,1.0\n1,0.5\n")
    silos = machines({"speed": 100.0, "trace": str(tmp_path / "load.csv")})
    sections = {"local": {"steps": 4, "batch_size": 25}, "balancer": {"kind": "fixed"}}
    simulate(tmp_path / "run", silos, strategy(**sections))
    run = read_run(tmp_path / "run")
    assert [span.speed for span in run.orders] == pytest.approx([100.0, 50.0, 50.0])
    assert [span.predicted for span in run.orders][1:] == pytest.approx([100.0, 90.0])


def test_a_predictor_that_learns_is_not_trained_again(tmp_path: Path) -> None:
    two_silos(tmp_path)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    header = json.loads(lines[0])
    header["config"]["predictor"] = {"kind": "narx"}
    (tmp_path / "journal.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    run = read_run(tmp_path)
    assert "narx" in run.forecasts
    assert {span.predicted for span in run.orders} == {None}


def test_a_refused_report_counts_for_nothing(tmp_path: Path) -> None:
    silos = machines({"speed": 100.0}, {"speed": 100.0})
    sections = {"local": {"steps": 4, "batch_size": 25}, "balancer": {"kind": "fixed"}, "barrier": {"kind": "asp"}}
    simulate(tmp_path, silos, strategy(**sections), twists={"b": spoil(loss=float("nan"))})
    run = read_run(tmp_path)
    assert {span.done for span in run.orders if span.silo == "b"} == {False}
    assert {span.speed for span in run.orders if span.silo == "b"} == {None}


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_went(tmp_path: Path) -> None:
    done = two_silos(tmp_path)
    (tmp_path / "summary.json").unlink()
    second = next(i for i, entry in enumerate(done.entries) if entry.at_s == 5.0)
    kept = done.text.splitlines()[: second + 2]
    (tmp_path / "journal.jsonl").write_text("\n".join(kept) + '\n{"at_s":5')
    run = read_run(tmp_path)
    assert not run.ended
    assert run.summary["strategy"] == "fake"
    assert [point.round for point in run.points] == [1, 2]


def test_a_run_without_a_journal_has_its_summary(tmp_path: Path) -> None:
    two_silos(tmp_path)
    (tmp_path / "journal.jsonl").unlink()
    run = read_run(tmp_path)
    assert run.summary["rounds"] == 3
    assert run.orders == ()


@pytest.mark.parametrize(
    ("silos", "missing"), [({}, "a list of silos"), (["a"], "a list of silos"), ([{"name": "a"}], "'wait_s' of a silo")]
)
def test_a_summary_alone_has_to_be_whole(tmp_path: Path, silos: object, missing: str) -> None:
    summary = {"silos": silos} | dict.fromkeys(FIGURES - {"silos", "seed"}, 0.0)
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    with pytest.raises(ConfigError, match=rf"summary\.json: not a whole summary: 'seed', .*{missing} missing\. Name"):
        read_run(tmp_path)


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        two_silos(tmp_path / parent / "run")
    assert [run.label for run in read_runs([tmp_path / "x/run", tmp_path / "y/run"])] == ["run (1)", "run (2)"]


def test_names_are_sorted_as_people_do() -> None:
    names = ["silo-10", "b", "silo-2", "silo-2a", "1"]
    assert sorted(names, key=natural) == ["1", "b", "silo-2", "silo-2a", "silo-10"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ConfigError, match="not what a run writes"):
        read_run(tmp_path)
    (tmp_path / "journal.jsonl").write_text(f'{{"format":{FORMAT}}}\n')
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match="not begun"):
        read_run(tmp_path)
