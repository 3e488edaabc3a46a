"""The model card: it tells what is known, and nothing of what is sealed."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync import __version__
from fedsync.config.sections.evaluation import UNASKED
from fedsync.extras.report.card import model_card
from fedsync.extras.report.data import read_run
from fedsync.extras.report.report_page import page
from tests.commands.call import call
from tests.extras.report.make import change_header, told
from tests.observe.evaluations import add_results
from tests.observe.runs import two_silos

EVIL = "<script>x</script>|a`b*c_d$e&f%g#h{i}~^\\input{x}\n| y |"


def test_a_card_has_what_is_known_of_a_run(tmp_path: Path) -> None:
    age = {"column": "age", "kind": "number", "known": None, "missing": "<5", "mean": 54.3, "deviation": 9.1}
    statistics = {"rows": 120, "classes": [80, "<5"], "least": 5, "columns": [age]}
    (tmp_path / "statistics.json").write_text(json.dumps(statistics))
    card = model_card(told(tmp_path, ["a", "b", "c"]))
    for said in (
        "Best version: 9 (best accuracy over all silos).",
        "b5" * 32,
        "| a | 10,000 |",
        "0: 80, 1: &lt;5",
        "| age | number | not told | &lt;5 | 54.3 | 9.1 |",
        "Updates were not encrypted",
        "| all silos | 0.870 \\[0.860, 0.880\\] |",
        "c: the number or its interval is not estimable for auroc, accuracy, f1",
        "2 silos hold out no validation split",
        "c, local: it failed to train: training diverged",
        "barrier: kind bsp",
        "| auroc | 0.800 (a) | 0.850 (b) | 0.050 |",
        f"- This card: FedSync {__version__}",
    ):
        assert said in card, said


@pytest.mark.usefixtures("undrawn")
@pytest.mark.parametrize(("metrics", "noted"), [(None, True), ([], False), (["f1"], False)])
def test_a_run_whose_metrics_nobody_can_ask_for_says_it(tmp_path: Path, metrics: list[str] | None, noted: bool) -> None:
    two_silos(tmp_path)
    evaluation = {"metrics": metrics, "classes": 2}
    change_header(tmp_path, lambda header: header["config"].update(evaluation=evaluation))
    run = read_run(tmp_path)
    assert (UNASKED in run.summary["notes"]) == noted
    assert (UNASKED in model_card(run)) == noted
    assert (UNASKED in page([run])) == noted


@pytest.mark.slow
@pytest.mark.parametrize("noise", [None, 5.0])
def test_scores_with_noise_are_called_so_beside_the_scores(tmp_path: Path, noise: float | None) -> None:
    privacy = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 2.0, "score_noise": noise}
    two_silos(tmp_path, privacy=privacy)
    add_results(tmp_path, ["a", "b", "c"])
    run = read_run(tmp_path)
    results = model_card(run).partition("## Results")[2].partition("## Limits")[0]
    note = "Scores have noise, with a deviation of 5 right predictions at each silo"
    for text in (results, page([run])):
        assert (note in text) == (noise is not None)


SEALED = {"kind": "bfv", "members": 3, "metrics": "sealed"}


def settled(folder: Path, **sections: object) -> str:
    """The card of a run with these sections in its strategy."""
    two_silos(folder)
    change_header(folder, lambda header: header["config"].update(sections))
    (folder / "config.yaml").write_text(json.dumps(sections))
    return model_card(read_run(folder))


@pytest.mark.parametrize("cipher", [SEALED, {"kind": "masked", "inner": SEALED}], ids=["bfv", "masked"])
def test_a_card_of_a_sealed_run_tells_no_silo_s_size(cipher: dict[str, object], tmp_path: Path) -> None:
    card = settled(tmp_path, cipher=cipher)
    assert "10,000" not in card
    assert "Losses, scores and numbers of samples of single silos were sealed from the server, too." in card
    assert "only if 3 updates at least" in card


def test_a_card_says_that_the_barrier_set_the_least_number_of_updates(tmp_path: Path) -> None:
    card = settled(tmp_path, cipher={**SEALED, "members": None})
    assert "only if as many updates are in it as the barrier commits at least" in card and "None" not in card


@pytest.mark.parametrize("cipher", [{"kind": "plain"}, {**SEALED, "metrics": "plain"}], ids=["clear", "sealed"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [("dp-sgd", "trained by DP-SGD"), ("silo-noise", "clipped their updates and added noise to them")],
)
def test_a_card_says_what_noise_protects_what(kind: str, words: str, cipher: dict[str, object], tmp_path: Path) -> None:
    """Single silos' losses and scores did not go to the server as they were."""
    card = settled(tmp_path, cipher=cipher, privacy={"kind": kind, "clip": 1.0, "noise_multiplier": 2.0})
    assert f"- Silos {words} (clip 1, noise 2). Each silo's ledger has what was spent." in card
    assert "losses" not in card.partition("## Privacy")[2].partition("## Results")[0]


def test_a_card_shows_no_path_of_anybody_s_machine(tmp_path: Path) -> None:
    two_silos(tmp_path)
    run = read_run(tmp_path)
    paths = ["/srv/patients/basel.csv", "data/bern.csv", "C:\\patients\\x.csv", "~/mine.csv"]
    config = f"task: {json.dumps({'kind': 'csv', 'path': paths[0], 'files': paths[1:], 'columns': ['age']})}\n"
    notes = [f"basel failed: '{paths[0]}' is not there; nor is {paths[2]}, {paths[3]}"]
    card = model_card(replace(run, config=config, summary={**run.summary, "notes": notes}))
    assert "task: kind csv, path (a path), files (a path) and (a path) and (a path), columns age" in card
    for part in ("srv", "patients", "bern", "mine"):
        assert part not in card, part
    assert "basel failed: '(a path)' is not there; nor is (a path), (a path)" in card


def test_a_killed_run_has_a_card_that_says_so_and_a_failed_run_says_why(tmp_path: Path) -> None:
    two_silos(tmp_path)
    (tmp_path / "summary.json").unlink()
    text = (tmp_path / "journal.jsonl").read_text().splitlines()
    (tmp_path / "journal.jsonl").write_text("\n".join(text[:-2]) + "\n")
    card = model_card(read_run(tmp_path))
    assert "The run has not ended" in card
    assert "The run does not say which one was the best" in card

    (tmp_path / "error.json").write_text('{"kind": "run", "message": "/srv/runs/x: the disk is full"}')
    card = model_card(read_run(tmp_path))
    assert "Ended: (a path): the disk is full." in card and "has not ended" not in card
    assert "The run has no regular end: (a path): the disk is full" in card


def test_what_comes_from_a_run_is_no_markup(tmp_path: Path) -> None:
    run = told(tmp_path, [EVIL, "b", "c"])
    card = model_card(replace(run, label=EVIL, silos=(EVIL, "z"), examples={EVIL: 3}))
    assert "<script" not in card
    rows = [line for line in card.splitlines() if "input" in line and line.startswith("|")]
    cells = [line.replace("\\|", "").count("|") - 1 for line in rows]
    assert set(cells) == {2, 6, 7}, "sizes, results, fairness: as many cells as their heads"


@pytest.mark.usefixtures("undrawn")
def test_the_command_writes_them_beside_the_page(tmp_path: Path) -> None:
    two_silos(tmp_path / "run")
    names = {"model-card.md", "results.tex", "results.md", "results.csv"}
    add_results(tmp_path / "run", ["a", "b"])
    (tmp_path / "out").mkdir()
    assert "model-card.md, results.tex" in call("report", tmp_path / "run", "--out", tmp_path / "out" / "x.html")
    assert {path.name for path in (tmp_path / "out").iterdir()} == names | {"x.html"}
    assert "report.html" in call("report", tmp_path / "run")
    assert "<title>Run " in (tmp_path / "run" / "report.html").read_text(), "without a name in the folder of its run"
