"""What the page says of how good the models are; how it stands hostile names, odd numbers and many silos."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.named import NAMES
from fedsync.extras.report.card import result_rows
from fedsync.extras.report.data import read_run
from fedsync.extras.report.drawing.draw_results import over_rounds
from fedsync.extras.report.read_results import read_results
from fedsync.extras.report.report_page import MEANINGS, page, section
from fedsync.extras.report.results import Estimate, Findings, RoundNumbers, fairness
from tests.extras.report.make import Reader, change_json, said, told
from tests.observe.evaluations import add_results
from tests.observe.runs import two_silos

EVIL = '</style><script>alert("x")</script><img src=x onerror=y>$mathdefault$&|`'
SECTIONS = {"results", "cross-site", "curves", "learning"}


@pytest.mark.usefixtures("undrawn")
def test_numbers_have_their_intervals_and_what_is_not_estimable_says_so(tmp_path: Path) -> None:
    words = said(page([told(tmp_path, ["a", "b", "c"])]))
    # By hand: pooled AUROC 0.9 - 0.03, a 0.9 - 0.1; of c's 33 samples 2 are of one class.
    assert "auroc 0.870 [0.860, 0.880] 0.850 [0.840, 0.860] 0.860 [0.850, 0.870]" in words
    assert "a 70 (0: 40, 1: 30) 0.800 [0.770, 0.830]" in words
    assert "c 33 (0: 31, 1: 2) not estimable not estimable" in words
    assert "best.pt 9 best accuracy over all silos" in words
    # Of each number: how many samples, of which split, and how its interval was found.
    assert (
        "best version (9), test split" in words and "by a bootstrap within classes, for means by the jackknife" in words
    )
    assert re.search(r"samples \d+ \(0: \d+, 1: \d+\) \d+", words) and "both models judged by the same samples" in words
    assert "b5" * 32 in words
    assert "c, local: it failed to train: training diverged" in words
    assert "a +0.060 [+0.010, +0.110]" in words


def test_fairness_knows_which_end_is_the_worst() -> None:
    """By hand: 0.9, 0.7, 0.8 have the mean 0.8, the variance 0.02 / 3 and the gap 0.2."""
    silos = {"a": 0.9, "b": 0.7, "c": 0.8}
    own = {silo: {"auroc": Estimate(value), "brier": Estimate(value)} for silo, value in silos.items()}
    own["d"] = {"auroc": Estimate(None)}
    more, less = fairness(Findings("best", "test", 9, {"auroc": Estimate(0.8), "brier": Estimate(0.8)}, own), {"brier"})
    assert (more.worst, more.best) == (("b", 0.7), ("a", 0.9))
    assert (less.worst, less.best) == (("a", 0.9), ("b", 0.7))
    assert (more.gap, more.mean, more.variance) == pytest.approx((0.2, 0.8, 0.02 / 3))
    assert (more.silos, more.left_out) == (3, 1)


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_any_of_it_has_the_page_as_before(tmp_path: Path) -> None:
    two_silos(tmp_path)
    # As of a version of FedSync that wrote none.
    change_json(tmp_path / "summary.json", lambda found: [found.pop(name) for name in ("evaluation", "best", "last")])
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    (tmp_path / "rounds.jsonl").write_text("".join(json.dumps({**row, "evaluation": {}}) + "\n" for row in rows))
    assert SECTIONS.isdisjoint(Reader(page([read_run(tmp_path)])).ids)
    add_results(tmp_path, ["a", "b"])
    assert set(Reader(page([read_run(tmp_path)])).ids) >= SECTIONS


@pytest.mark.slow
def test_what_comes_from_a_run_is_escaped(tmp_path: Path) -> None:
    run = told(tmp_path, [EVIL, f"{EVIL}2", f"{EVIL}3"], {EVIL: True, "m" * 200: False, "auroc": True})
    orders = tuple(replace(span, silo=EVIL) for span in run.orders if span.silo == "a")
    silos = [{**silo, "name": EVIL} for silo in run.summary["silos"][:1]]
    summary = {**run.summary, "strategy": EVIL, "stopped_by": EVIL, "notes": [EVIL], "silos": silos}
    bad = replace(run, label=EVIL, config=EVIL, silos=(EVIL,), orders=orders, summary=summary)
    read = Reader(page([bad, run]))
    assert read.of("script") == read.of("img") == []
    assert EVIL in "".join(read.words)
    assert all(named.get("title", "") == "" or "onerror" not in named for _, named in read.attributes)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, pytest.param(200, marks=pytest.mark.full)])
def test_any_number_of_silos_has_a_page(tmp_path: Path, count: int) -> None:
    text = page([told(tmp_path, [f"silo-{number}" for number in range(count)], {"auroc": True})])
    assert set(Reader(text).ids) >= SECTIONS
    assert len(text.encode()) < 5_000_000


@pytest.mark.slow
def test_numbers_that_are_none_are_not_estimable(tmp_path: Path) -> None:
    told(tmp_path, ["a", "b"])
    for name in ("summary.json", "cross_site.json", "rounds.jsonl"):
        text = (tmp_path / name).read_text()
        (tmp_path / name).write_text(text.replace('{"value": 0.8', '{"value": NaN, "x": 0.8').replace("0.1,", "NaN,"))
    words = said(page([read_run(tmp_path)]))
    assert "not estimable" in words
    assert " nan" not in words.lower()


@pytest.mark.slow
@pytest.mark.usefixtures("undrawn")
def test_a_killed_run_shows_the_versions_that_it_wrote(tmp_path: Path) -> None:
    told(tmp_path, ["a", "b"])
    for name in ("summary.json", "evaluation.json", "cross_site.json"):
        (tmp_path / name).unlink()
    text = (tmp_path / "rounds.jsonl").read_text()
    (tmp_path / "rounds.jsonl").write_text(text[: len(text) - 40])
    run = read_run(tmp_path)
    assert [row.round for row in run.results.rounds["auroc"]] == [1, 2]
    assert SECTIONS & set(Reader(page([run])).ids) == {"learning"}


ODD = ('{"metrics": 3, "test": 3, "evaluation": 3}\n', "[1]\n", "{\n", '{"test": {"best": 1}}\n')
WRONG = {
    "evaluation.json": ODD,
    "cross_site.json": ODD,
    "rounds.jsonl": ODD[:3],
    "statistics.json": ('{"columns": 3}',),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_of_another_shape_is_named(tmp_path: Path, name: str) -> None:
    told(tmp_path, ["a", "b"])
    for text in WRONG[name]:
        (tmp_path / name).write_text(text)
        with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
            read_run(tmp_path)
            pytest.fail(text)
    if name == "rounds.jsonl":
        (tmp_path / name).write_text(ODD[3])
        assert read_results(tmp_path, None, {}).rounds == {}


def test_a_wrong_value_is_named_by_its_place(tmp_path: Path) -> None:
    told(tmp_path, ["a", "b"])
    text = (tmp_path / "evaluation.json").read_text()
    (tmp_path / "evaluation.json").write_text(text.replace('"roc": [[0.0, ', '"roc": [["x", ', 1))
    with pytest.raises(ConfigError, match=r"evaluation\.json: not of the shape that a run writes: roc\.0\.0: .*number"):
        read_run(tmp_path)


@pytest.mark.usefixtures("undrawn")
def test_where_there_is_nothing_else_the_kept_versions_have_numbers_without_intervals(tmp_path: Path) -> None:
    told(tmp_path, ["a", "b"])
    change_json(tmp_path / "summary.json", lambda summary: summary.pop("evaluation"))
    assert "auroc 0.870 [no interval] 0.910 [no interval]" in said(page([read_run(tmp_path)]))


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ({}, "best accuracy over all silos"),
        ({"metric": "auroc", "by": "worst"}, "best auroc of the worst silo"),
        ({"metric": "auroc", "by": "rules:mine"}, "best auroc by rules:mine"),
        ("odd", "best accuracy over all silos"),
    ],
)
def test_why_a_version_is_the_best(tmp_path: Path, rule: object, words: str) -> None:
    told(tmp_path, ["a", "b"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    best = read_results(tmp_path, summary, {"evaluation": {"best": rule}}).kept[0]
    assert (best.subject, best.why) == ("best", words)


def test_a_last_model_that_is_newer_than_its_scores_is_told(tmp_path: Path) -> None:
    told(tmp_path, ["a", "b"])
    summary = json.loads((tmp_path / "summary.json").read_text())
    scored = summary["last"]["version"]
    for newest, words in {scored: "newest version with a score", scored + 4: f"version {scored + 4}, without"}.items():
        last = read_results(tmp_path, {**summary, "commits": newest}, {}).kept[-1]
        assert last.subject == "last" and words in last.why
        assert ("without" in last.why) == (newest > scored)


@pytest.mark.usefixtures("undrawn")
def test_a_matrix_of_sealed_runs_has_pooled_numbers_alone(tmp_path: Path) -> None:
    def seal(document: dict[str, Any]) -> None:
        for metric in document["metrics"].values():
            metric.update(matrix=[], gain={})
        document.update(silos=[], models=[], missing=[])

    told(tmp_path, ["a", "b"])
    change_json(tmp_path / "cross_site.json", seal)
    words = said(page([read_run(tmp_path)]))
    assert "Numbers of single silos are sealed, so there is no matrix." in words
    assert "trained by the silo alone 0.800 [0.790, 0.810]" in words


def test_the_best_cell_of_a_matrix_has_the_last_shade(tmp_path: Path) -> None:
    """In the example 0.85 is the best AUROC. If less were better, it would be the worst."""
    run = told(tmp_path, ["a", "b"], {"auroc": True})
    assert 'class="h6" title="0.850' in section("cross-site", [run])
    less = replace(run, results=replace(run.results, lower=frozenset({"auroc"})))
    assert 'class="h0" title="0.850' in section("cross-site", [less])


def test_over_rounds_five_silos_have_lines_and_more_have_bands(tmp_path: Path) -> None:
    """The pooled line beside them; bands are the range and the middle half."""
    run = told(tmp_path, ["a"])
    values = {f"silo-{at}": at / 10 for at in (1, 2, 3, 4, 5, 9)}
    drawn = {}
    for count in (5, 6):
        rows = [RoundNumbers(at, 0.5, dict(list(values.items())[:count])) for at in (1, 2)]
        picture = over_rounds([replace(run, results=replace(run.results, rounds={"auroc": rows}))], "auroc")
        assert picture is not None
        drawn[count] = picture.figure.axes[0]
    assert [(len(axes.lines), len(axes.collections)) for axes in drawn.values()] == [(1 + 5, 0), (1, 2)]
    ends = [band.get_paths()[0].get_extents().intervaly for band in drawn[6].collections]
    np.testing.assert_allclose(ends, [[0.1, 0.9], [0.225, 0.475]])


@pytest.mark.slow
def test_one_shared_test_split_is_shown_once(tmp_path: Path) -> None:
    run = told(tmp_path, ["a", "b", "c"])
    same = {"accuracy": Estimate(0.9, 0.8, 1.0, {"0": 20, "1": 30})}
    main = Findings("best", "test", 9, same, dict.fromkeys("abc", same))
    rows = [RoundNumbers(at, 0.5, dict.fromkeys("abc", 0.5)) for at in (1, 2)]
    results = replace(run.results, findings=(main,), rounds={"auroc": rows})
    words = said(page([replace(run, results=results)]))
    assert words.count("0.900 [0.800, 1.000]") == 1
    assert "All 3 silos were tested on one shared split" in words and "served" not in words
    picture = over_rounds([replace(run, results=results)], "auroc")
    assert picture is not None and len(picture.figure.axes[0].lines) == 1
    assert result_rows(main) == (["silo", "accuracy"], [["all silos, one shared split", "0.900 [0.800, 1.000]"]])
    other = {"accuracy": Estimate(0.8, 0.7, 0.9, {"0": 20, "1": 30})}
    assert not replace(main, silos={"a": same, "b": other}).shared and not replace(main, silos={"a": same}).shared


def test_equal_rounded_numbers_do_not_make_two_splits_one() -> None:
    """Two small silos without an error, each with a split of its own: the pooled numbers are of twice the samples."""
    own = {
        silo: {"accuracy": Estimate(1.0, support={"0": 2, "1": 2}), "loss": Estimate(loss, support={"samples": 4})}
        for silo, loss in (("a", 0.0001), ("b", 0.0004))
    }
    pooled = {"accuracy": Estimate(1.0, support={"0": 4, "1": 4}), "loss": Estimate(0.00025, support={"samples": 8})}
    found = Findings("best", "test", 9, pooled, own)
    assert [row[0] for row in result_rows(found)[1]] == ["all silos", "a", "b"]
    assert [row.metric for row in fairness(found, {"loss"})] == ["accuracy", "loss"]


def test_every_shipped_metric_is_explained() -> None:
    assert set(MEANINGS) == {*NAMES, "loss"}
