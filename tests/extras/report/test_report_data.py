"""What the report takes from a run's folder."""

import json
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.sections.evaluation import UNASKED
from fedsync.core.journal import FORMAT
from fedsync.extras.report.data import read_run, read_runs
from tests.extras.report.make import change_json
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
    assert [point.at_s for point in run.points] == [2.5, 5.0, 7.5]
    assert run.summary["wait_fraction"] == pytest.approx((3 * 1.5) / (2 * 7.5))
    assert run.ended


def test_the_figures_are_those_of_the_summary_file(tmp_path: Path) -> None:
    two_silos(tmp_path)
    change_json(tmp_path / "summary.json", lambda summary: summary["notes"].append("of the aggregator, in no journal"))
    written = json.loads((tmp_path / "summary.json").read_text())
    assert written.pop("evaluation")["test"]["last"]["version"] == 3
    # The journal names no metrics, and a page that lacks them says so.
    written["notes"].append(UNASKED)
    assert written == read_run(tmp_path).summary


def test_a_refused_report_counts_for_nothing(tmp_path: Path) -> None:
    silos = machines({"speed": 100.0}, {"speed": 100.0})
    sections = {"local": {"steps": 4, "batch_size": 25}, "balancer": {"kind": "fixed"}, "barrier": {"kind": "asp"}}
    simulate(tmp_path, silos, strategy(**sections), twists={"b": spoil(loss=float("nan"))})
    run = read_run(tmp_path)
    assert {span.done for span in run.orders if span.silo == "b"} == {False}
    assert {span.compute_s for span in run.orders if span.silo == "b"} == {0.0}


def test_a_run_that_was_cut_off_is_shown_as_far_as_it_went(tmp_path: Path) -> None:
    done = two_silos(tmp_path)
    (tmp_path / "summary.json").unlink()
    second = next(i for i, entry in enumerate(done.entries) if entry.at_s == 5.0)
    kept = done.text.splitlines()[: second + 2]
    (tmp_path / "journal.jsonl").write_text("\n".join(kept) + '\n{"at_s":5')
    run = read_run(tmp_path)
    assert not run.ended
    assert run.summary["strategy"] == "fake"
    assert len(run.points) == 2


def test_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    for parent in ("x", "y"):
        two_silos(tmp_path / parent / "run")
    assert [run.label for run in read_runs([tmp_path / "x/run", tmp_path / "y/run"])] == ["run (1)", "run (2)"]


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run"):
        read_run(tmp_path)
    (tmp_path / "summary.json").write_text("[]")
    with pytest.raises(ConfigError, match="not what a run writes"):
        read_run(tmp_path)
    two_silos(tmp_path / "bare")
    (tmp_path / "bare" / "journal.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"bare: no run: journal\.jsonl is not there\. Name"):
        read_run(tmp_path / "bare")
    (tmp_path / "journal.jsonl").write_text(f'{{"format":{FORMAT}}}\n')
    (tmp_path / "summary.json").unlink()
    with pytest.raises(ConfigError, match="not begun"):
        read_run(tmp_path)
