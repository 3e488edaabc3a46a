"""A silo that brings nothing is named at once and at the end, and the run fails where the strategy says so."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from fedsync.cli import app
from fedsync.common.errors import ConfigError, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.page.run_view import RunView
from fedsync.extras.report.card import model_card
from fedsync.extras.report.data import read_run
from fedsync.observe.progress import RunProgress
from fedsync.observe.replay import read_ledger
from fedsync.observe.terminal import Terminal
from fedsync.simulation.run import run_virtual
from fedsync.simulation.timing_only import run_timing
from tests.simulation.fake import machines
from tests.simulation.fake import strategy as strategy_of
from tests.simulation.lost import CLIENT_APP, SILO_APP, SILOS, run, strategy

RAISES = {"loss": "if wrong: raise KeyError('age')"}
PLACE = "app.py, line 20: KeyError: 'age'"
ALONE = "no model was evaluated by a"


def told_of(folder: Path, runtime: str) -> list[str]:
    """Notes on the run in this folder, had it been of this runtime."""
    header, *lines = (folder / "journal.jsonl").read_text().splitlines(keepends=True)
    (folder / "journal.jsonl").write_text(json.dumps(json.loads(header) | {"runtime": runtime}) + "\n" + "".join(lines))
    return [str(note) for note in read_ledger(folder / "journal.jsonl").summary()["notes"]]


class News:
    """What a listener is told at once."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def follow(self, ledger: Any) -> None:
        self.lines += ledger.lost.since(len(self.lines))


def test_identical_machines_of_one_entry_are_all_there(tmp_path: Path) -> None:
    """The journal's header has them as one entry with a count, whose name is no silo's."""
    machines = ClusterConfig.model_validate({"silos": [{"name": "site", "count": 2, "speed": 100}]})
    summary = run_virtual(StrategyConfig.load("bsp", ["stop={rounds: 1}"]), machines, tmp_path)
    assert summary["lost"] == []


def test_who_is_missing_is_told_at_once_and_everywhere(tmp_path: Path) -> None:
    news = News()
    summary = run_virtual(strategy(tmp_path, SILO_APP, **RAISES), SILOS, tmp_path / "out", listeners=[news])
    first, *_, last = news.lines
    assert first.startswith("an order of a failed: ") and PLACE in first and "a is missing" in last
    # Orders are 3 steps of 8 samples at 100 samples/s.
    (lost,) = summary["lost"]
    assert (lost["silo"], lost["since_s"]) == ("a", pytest.approx(0.24)) and PLACE in lost["why"]
    (note,) = summary["notes"]
    assert "a is missing since 0.2 s" in note and "no version has its data" in note
    data = read_run(tmp_path / "out")
    assert data.summary["notes"][0] == note
    assert RunView(tmp_path / "out").look()["lost"] == [note]
    assert "a is missing since 0.2 s" in model_card(data)


@pytest.mark.parametrize(
    ("rounds", "overrides"),
    [(4, ["on_lost_silo=fail"]), (2, ["on_lost_silo=fail"]), (4, ["min_silos=2"]), (2, ["min_silos=2"])],
)
def test_the_run_fails_where_the_strategy_says_so(rounds: int, overrides: list[str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"a is missing since 0\.[02] s: .*" + PLACE):
        run(tmp_path, SILO_APP, [f"stop.rounds={rounds}", *overrides], **RAISES)
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    early = rounds == 4 and "fail" in overrides[0]
    assert summary["rounds"] == (3 if early else rounds) and len(summary["lost"]) == 1


def test_a_silo_that_failed_one_order_is_not_lost_and_the_notes_say_it(tmp_path: Path) -> None:
    once = "model.steps = getattr(model, 'steps', 0) + 1; wrong and model.steps == 4 and {}['age']"
    summary = run(tmp_path, SILO_APP, ["stop.rounds=4"], loss=once)
    (note,) = summary["notes"]
    assert summary["lost"] == [] and re.match(r"1 of [45] orders of a failed, the last by: .*KeyError: 'age'", note)


def test_a_silo_that_was_lost_and_came_back_is_in_the_notes(tmp_path: Path) -> None:
    news, silos = News(), machines({"speed": 100, "crashes": {"mtbf_s": 10.0, "repair_s": 2.0}}, {"speed": 100})
    summary = run_timing(strategy_of(stop={"seconds": 200}), ClusterConfig(silos=silos), tmp_path, listeners=[news])
    times = len([line for line in news.lines if line == "a is back"])
    (note,) = [note for note in summary["notes"] if note.startswith("a was")]
    assert times > 1 and re.match(rf"a was lost {times} times, for [0-9.]+ s in all, the last by: ", note)


def test_a_run_of_all_its_silos_says_nothing(tmp_path: Path) -> None:
    summary = run(tmp_path, SILO_APP, ["on_lost_silo=fail", "min_silos=2"])
    assert (summary["notes"], summary["lost"]) == ([], [])


def test_where_the_models_find_no_room_the_summary_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> Any:
        raise ConfigError("last.pt", "cannot be written: no space left on device", "Make room")

    monkeypatch.setattr("fedsync.silo.session.session.SiloSession.save_model", full)
    with pytest.raises(ConfigError, match="no space"):
        run(tmp_path, SILO_APP)
    assert json.loads((tmp_path / "out" / "summary.json").read_text())["rounds"] > 0


@pytest.mark.parametrize(
    ("app", "wrong", "said"),
    [
        (SILO_APP, {"evaluate": "if wrong: return {'loss': (float('nan'), 0), 'accuracy': (float('nan'), 0)}"}, ""),
        (SILO_APP, {"evaluate": "if wrong: raise KeyError('age')"}, "app.py, line 29: KeyError: 'age'"),
        (SILO_APP, {"evaluate": "if wrong: return {'accuracy': (float('nan'), 40)}"}, "which is not finite"),
        (SILO_APP, {"evaluate": "if wrong: return {'accuracy': (0.5, 59.5)}"}, "59.5 is no number of samples"),
        (SILO_APP, {"evaluate": "if wrong: return {'accuracy': (0.5, -5)}"}, "-5 is no number of samples"),
        (SILO_APP, {"evaluate": "if wrong: return {'accuracy': (0.5, 2**70)}"}, f"{2**70} is no number of samples"),
        (SILO_APP, {"evaluate": "if wrong: model.weight.data.fill_(float('nan')); {}['age']"}, "KeyError: 'age'"),
        (CLIENT_APP, {"evaluate": "if wrong: metrics['num-examples'] = 59.5"}, "59.5 is no number of samples"),
        (CLIENT_APP, {"evaluate": "if wrong: metrics['num-examples'] = -5"}, "-5 is no number of samples"),
        (CLIENT_APP, {"evaluate": "if wrong: metrics['num-examples'] = 2.0**70"}, "is no number of samples"),
        (CLIENT_APP, {"evaluate": "if wrong: metrics['eval_loss'] = float('nan')"}, "eval_loss is nan"),
        (CLIENT_APP, {"evaluate": "if wrong: metrics['num-examples'] = 0"}, ""),
    ],
)
def test_an_evaluation_that_fails_costs_no_training(
    app: str, wrong: dict[str, str], said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    summary = run(tmp_path, app, ["stop.rounds=2"], **wrong)
    assert [(silo["orders"], silo["failures"]) for silo in summary["silos"]] == [(2, 0), (2, 0)]
    assert summary["lost"] == [] and any(note.startswith(ALONE) for note in summary["notes"])
    warned = [record.getMessage() for record in caplog.records if "its evaluation failed" in record.getMessage()]
    assert len(warned) == bool(said) and all(said in each for each in warned), "once, and why"


def test_a_run_without_any_evaluation_says_so_even_if_its_orders_report_no_loss(tmp_path: Path) -> None:
    summary = run(tmp_path, CLIENT_APP, train="del metrics['train_loss']", evaluate="{}['age']")
    assert summary["accuracy"] is None
    assert [note.split(";")[0][2:] for note in summary["notes"]] == [f"evaluations of {each} failed" for each in "ab"]


def test_the_reason_of_a_failed_evaluation_is_where_the_note_says_it_is(tmp_path: Path) -> None:
    """An emulated silo has no log of its own; its warnings are those of the run."""
    news = News()
    chosen = strategy(tmp_path, SILO_APP, evaluate="if wrong: raise KeyError('age')")
    notes = run_virtual(chosen, SILOS, tmp_path / "out", listeners=[news])["notes"]
    for lines, what in ((news.lines, "an evaluation of a failed"), (notes, "evaluations of a failed")):
        (line,) = [line for line in lines if what in line]
        assert line.endswith("; a warning of this run says why")
    assert "evaluations of a failed; its own log says why" in " ".join(told_of(tmp_path / "out", "deployment"))


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        ({"setup": "rows = rows * float('nan') if wrong else rows"}, "the inputs hold NaN or infinity"),
        ({"loss": "loss = loss * float('nan') if wrong else loss"}, "the loss is not finite, though inputs"),
        ({"step": "if wrong: model.weight.grad[0, 0] = float('inf')"}, "the gradients are not finite, though"),
        (
            {"loss": "loss = model(train[numbers]).square().sum()", "step": "if wrong: model.weight.grad *= 1e20"},
            "training diverged at learning rate 0.1: not finite were first the loss of step 2",
        ),
    ],
)
def test_what_was_not_finite_first_is_said(wrong: dict[str, str], cause: str, tmp_path: Path) -> None:
    (lost,) = run(tmp_path, SILO_APP, **wrong)["lost"]
    assert cause in lost["why"]


@pytest.mark.parametrize(
    ("setup", "problem"),
    [
        ("model.register_buffer('mask', torch.tensor([float('-inf')]))", "model's mask has values that are not finite"),
        ("model = nn.LazyLinear(2)", "weight has no shape before"),
    ],
)
def test_a_model_that_cannot_travel_is_refused_in_a_sentence(setup: str, problem: str, tmp_path: Path) -> None:
    lines = f"model = nn.Linear(3, 2); {setup}; return silo.use(model, rows, labels, wrong=wrong)"
    with pytest.raises(ConfigError, match=problem):
        run(tmp_path, SILO_APP, setup=lines)


@pytest.mark.parametrize("wrong", [RAISES, {"loss": "loss = loss.detach() if wrong else loss"}])
def test_under_encryption_it_is_told_alike(wrong: dict[str, str], tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"1 of 2 silos failed 3 .* encrypted sum needs 2 silos; .*app\.py, line 2"):
        run(tmp_path, SILO_APP, ["cipher={kind: pad}"], **wrong)


def test_the_command_line_says_it_at_once_at_the_end_and_by_its_status(tmp_path: Path) -> None:
    strategy(tmp_path, SILO_APP, **RAISES)
    (tmp_path / "silos.yaml").write_text("silos: [{name: a, speed: 100}, {name: b, speed: 100}]")
    asked = ["run", str(tmp_path / "mine.yaml"), "--silos", str(tmp_path / "silos.yaml"), "--runtime", "virtual"]
    done = CliRunner().invoke(app, [*asked, "--out", str(tmp_path / "out")])
    assert done.exit_code == 0 and f"an order of a failed: {tmp_path}/{PLACE}" in done.output
    assert "failed" in done.output and "a (missing)" in done.output and "Note: a is missing since 0.2 s" in done.output
    failed = CliRunner().invoke(app, [*asked, "--set", "on_lost_silo=fail", "--out", str(tmp_path / "failed")])
    assert isinstance(failed.exception, RunError), "which is exit status 1"


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        ({"train": "metrics.pop('train_loss')", "evaluate": "metrics.pop('eval_acc')"}, "test loss 0.5000"),
        ({}, "loss 0.5000"),
    ],
)
def test_a_loss_that_is_known_is_shown(reply: dict[str, str], shown: str, tmp_path: Path) -> None:
    screen = io.StringIO()
    follower = RunProgress(Terminal(file=screen), "lost", 4)
    run_virtual(strategy(tmp_path, CLIENT_APP, **reply), SILOS, tmp_path / "out", listeners=[follower])
    assert shown in screen.getvalue() and "loss -" not in screen.getvalue().splitlines()[-1]
