"""With sealed metrics no figure of a single silo leaves it: virtual time, real keys, and all files are searched."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Attested
from fedsync.core.orders import Evaluation, PooledFigures, Score, WorkReport
from fedsync.observe.replay import replay
from fedsync.simulation.run import run_virtual
from fedsync.train.loop import Trainer
from tests.simulation.sealed import NAMES, SILOS, actions

QUICK = ["local.steps=3", "local.batch_size=16", "stop.rounds=4"]


def config(cipher: str = "{kind: pad}", *overrides: str, name: str = "lb-bsp") -> StrategyConfig:
    return StrategyConfig.load(name, [*QUICK, f"cipher={cipher}", *overrides])


@pytest.fixture
def own(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Every figure that a silo finds itself, as it would be written."""
    found: set[str] = set()
    train, evaluate = Trainer.run, Trainer.evaluate

    def trained(self, *arguments, **more):  # type: ignore[no-untyped-def]
        outcome = train(self, *arguments, **more)
        evaluation = outcome.report.evaluation
        if evaluation is not None:  # else it only measures how large an update is
            assert evaluation.samples > 0
            found.update((repr(outcome.report.loss), repr(evaluation.loss), f'"examples":{self.examples}'))
        return replace(outcome, report=replace(outcome.report, metrics={"own_figure": 1.0}))

    def evaluated(self, *arguments):  # type: ignore[no-untyped-def]
        evaluation = evaluate(self, *arguments)
        found.add(repr(evaluation.loss))
        return evaluation

    monkeypatch.setattr(Trainer, "run", trained)
    monkeypatch.setattr(Trainer, "evaluate", evaluated)
    return found


def written(folder: Path) -> str:
    return "".join(file.read_text() for file in sorted(folder.iterdir()) if file.suffix in (".jsonl", ".json", ".csv"))


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["{kind: pad}", "{kind: masked}"])
def test_no_figure_of_a_silo_is_in_what_the_server_has(cipher: str, tmp_path: Path, own: set[str]) -> None:
    summary = run_virtual(config(cipher, "export={csv: true}"), SILOS, tmp_path)
    text = written(tmp_path)
    assert len(own) > 24, "20 losses in training, evaluations, and numbers of samples"
    assert [figure for figure in own if figure in text] == []
    assert "own_figure" not in text and '"evaluate"' not in text
    assert summary["accuracy"] is not None and summary["scored_round"] == 4


def test_in_the_clear_all_of_them_are(tmp_path: Path, own: set[str]) -> None:
    summary = run_virtual(config("{kind: pad, metrics: plain}"), SILOS, tmp_path)
    text = written(tmp_path)
    assert [figure for figure in own if figure not in text] == []
    assert "own_figure" in text and summary["scored_round"] == 4


@pytest.mark.slow
def test_pooled_figures_are_those_of_a_run_in_the_clear_with_four_digits(tmp_path: Path) -> None:
    for metrics in ("plain", "sealed"):
        run_virtual(config(f"{{kind: pad, metrics: {metrics}}}"), SILOS, tmp_path / metrics)
    plain, sealed = (
        [json.loads(line) for line in (tmp_path / metrics / "rounds.jsonl").read_text().splitlines()]
        for metrics in ("plain", "sealed")
    )
    for one, other in zip(plain, sealed, strict=True):
        assert other["accuracy"] == pytest.approx(one["accuracy"], rel=1e-3)
        assert other["test_loss"] == pytest.approx(one["test_loss"], rel=1e-3)
        assert other["accuracy"] == float(f"{other['accuracy']:.3e}")
    assert len(sealed) == 4 and sealed[-1]["loss"] is not None
    assert len(replay(tmp_path / "sealed" / "journal.jsonl")) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lb-bsp", "stop.rounds=3"),
        ("asp", "stop.rounds=12"),
        ("pssp", "stop.rounds=6"),
        ("fsp", "stop.rounds=3"),
        ("elastic", "stop.rounds=3"),
        ("lb-bsp", "stop={rounds: 30, target_accuracy: 0.15}"),
    ],
)
def test_the_last_score_is_all_silos_own(name: str, more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Judged by the model that silos have in the end, which the version with the scores leaves as it was."""
    models: dict[int, bytes] = {}
    receive = EncryptedReplica.receive

    def received(self, payload, version):  # type: ignore[no-untyped-def]
        model = receive(self, payload, version)
        assert models.setdefault(version, model.tobytes()) == model.tobytes()
        return model

    found: dict[tuple[bytes, int], Evaluation] = {}
    train = Trainer.run

    def trained(self, order, base, *arguments, **options):  # type: ignore[no-untyped-def]
        outcome = train(self, order, base, *arguments, **options)
        if order.scores_only and order.evaluate:
            found[base.tobytes(), self._slot.index] = outcome.report.evaluation
        return outcome

    monkeypatch.setattr(EncryptedReplica, "receive", received)
    monkeypatch.setattr(Trainer, "run", trained)
    summary = run_virtual(config("{kind: pad, examples: 60}", more, name=name), SILOS, tmp_path)
    last = max(models)
    assert summary["scored_round"] == summary["rounds"] and models[last] == models[last - 1]
    assert found.keys() == {(models[last], index) for index in range(len(NAMES))}
    accuracy = sum(one.correct for one in found.values()) / sum(one.samples for one in found.values())
    assert summary["accuracy"] == pytest.approx(accuracy, rel=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) == summary["rounds"] and rows[-1]["accuracy"] == summary["accuracy"]
    assert len(replay(tmp_path / "journal.jsonl")) > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "reason"),
    [
        ("stop={rounds: 8, target_accuracy: 0.15}", "target accuracy 0.15 reached"),
        ("stop={rounds: 8, patience: 1}", "no better accuracy in 1 evaluated"),
    ],
)
def test_stop_rules_go_by_what_silos_attest(rule: str, reason: str, tmp_path: Path) -> None:
    rate = "local.learning_rate=1.0e-9" if "patience" in rule else "local.learning_rate=0.1"
    summary = run_virtual(config("{kind: pad, examples: 48}", rule, rate), SILOS, tmp_path)
    assert reason in summary["stopped_by"] and summary["rounds"] < 8


@pytest.mark.parametrize(
    "interval", ["{kind: binary, interval_s: 2}", "{kind: linear, interval_s: 2}", "{kind: climb}"]
)
def test_intervals_that_go_by_losses_are_refused(interval: str) -> None:
    more = f"barrier={{kind: fsp, interval: {interval}}}"
    with pytest.raises(ConfigError, match=r"loss of each round.*interval: \{kind: fixed\}, or write .*plain"):
        config("{kind: pad, examples: 100}", more, name="fsp")
    config("{kind: pad, metrics: plain}", more, name="fsp")


def test_what_goes_by_passes_needs_a_public_number() -> None:
    barrier = "barrier={kind: fsp, interval: {kind: fixed, interval_s: 1}}"
    with pytest.raises(ConfigError, match=r"counts passes.*[Ww]rite cipher.examples"):
        config("{kind: pad}", barrier)
    config("{kind: pad, examples: 100}", barrier)


def test_weights_of_what_is_not_sealed_cannot_be_secret() -> None:
    with pytest.raises(ConfigError, match="needs the number of each silo's samples"):
        config("{kind: pad, only: ['*.weight']}", "aggregation={kind: fedavg, weight: examples}")
    config("{kind: pad}", "aggregation={kind: fedavg, weight: examples}")


@pytest.mark.slow
def test_one_silo_that_lies_among_five_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It says that the target is reached, in every report; the run goes on, and its books are the honest ones."""
    honest = run_virtual(config(), SILOS, tmp_path / "honest")
    disclosed = EncryptedReplica.disclosed

    def lying(self: EncryptedReplica, report: WorkReport) -> WorkReport:
        told = disclosed(self, report)
        if self._ring.own.name != "e":  # the fastest, whose word comes first
            return told
        return replace(told, pooled=tuple(PooledFigures(one.version, 0.0, Score(0, 1.0, 0.0)) for one in told.pooled))

    monkeypatch.setattr(EncryptedReplica, "disclosed", lying)
    lied = run_virtual(config("{kind: pad}", "stop={rounds: 4, target_accuracy: 1.0}"), SILOS, tmp_path / "lied")
    assert (lied["rounds"], lied["accuracy"], lied["loss"]) == (4, honest["accuracy"], honest["loss"])
    assert [note for note in lied["notes"] if "do not agree" in note] == lied["notes"] != []
    assert len(lied["notes"]) == 1
    assert len(actions(tmp_path / "lied", Attested)) == 5, "one more for the score of the last version"


def test_a_silo_that_tells_its_own_figures_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        EncryptedReplica, "disclosed", lambda self, report: replace(report, loss=1e-7) if self._file is None else report
    )
    with pytest.raises(Exception, match="sends unencrypted metrics, which this run encrypts"):
        run_virtual(config(), SILOS, tmp_path)
    assert "1e-07" not in written(tmp_path)
