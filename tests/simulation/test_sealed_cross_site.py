"""What silos train for themselves in sealed runs: pooled figures are those of a run in the clear, and no others."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import Subset

from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Commit, Dispatch, Evaluate
from fedsync.core.orders import Evaluation, Split, Subject, WorkOrder
from fedsync.extras.cross_site.own_models import OwnOrders
from fedsync.observe.replay import replay
from fedsync.silo.session.session import SiloSession
from fedsync.simulation.run import run_virtual
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.train.loop import Trainer
from tests.simulation.sealed import NAMES, SILOS, SUITES, actions, change_data

RUN = (
    *("local.steps=3", "local.batch_size=16", "stop.rounds=3", "local.learning_rate=0.05"),
    "evaluation={cross_site: {local: true, fine_tune: 4}}",
)


@pytest.fixture(autouse=True)
def held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every silo keeps half of its test split for validation, and no two have the same samples."""

    def halved(whole: SiloData, slot: SiloSlot) -> SiloData:
        places = range(slot.index, len(whole.test), len(NAMES))
        half = len(places) // 2
        return SiloData(whole.train, Subset(whole.test, places[:half]), Subset(whole.test, places[half:]))

    change_data(monkeypatch, halved)


def run(out: Path, cipher: str, *more: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's summary and what it compares."""
    summary = run_virtual(StrategyConfig.load("lb-bsp", [*RUN, f"cipher={cipher}", *more]), SILOS, out)
    compared = out / "cross_site.json"
    return summary, json.loads(compared.read_text()) if compared.exists() else {}


@pytest.fixture(scope="module")
def figures() -> dict[str, dict[str, Any]]:
    """Of the run in the clear, made once."""
    return {}


@pytest.mark.slow
@pytest.mark.parametrize("cipher", SUITES)
def test_pooled_figures_are_those_in_the_clear(
    cipher: str, tmp_path: Path, figures: dict[str, dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """To four digits of the local models, which encryption does not touch; updates of the others are rounded.

    Tuning goes on in a silo's data where its last order was, which here was one that scored: so by what silos found.
    """
    found: dict[Subject, list[Evaluation]] = {}
    honest = Trainer.run

    def trained(self, order, *rest, **options):  # type: ignore[no-untyped-def]
        outcome = honest(self, order, *rest, **options)
        if order.split is Split.TEST:
            found.setdefault(order.subject, []).append(outcome.report.evaluation)
        return outcome

    if not figures:
        figures.update(run(tmp_path / "plain", "{kind: plain}")[1]["metrics"])
    monkeypatch.setattr(Trainer, "run", trained)
    summary, document = run(tmp_path / "sealed", cipher)
    assert [(each["subject"], each["silo"]) for each in document["models"]] == [(each, None) for each in Subject]
    assert not document["missing"] and document["silos"] == [] and summary["stopped_by"] == "3 rounds done"
    assert document["metrics"].keys() == figures.keys()
    for name, metric in document["metrics"].items():
        assert (metric["matrix"], metric["gain"]) == ([], {})
        values = {subject: cell["value"] for subject, cell in metric["pooled"].items()}
        for subject in ("last", "best"):
            assert values[subject] == pytest.approx(figures[name]["pooled"][subject]["value"], rel=2e-2)
        assert values["local"] == float(f"{figures[name]['pooled']['local']['value']:.3e}")
        sign = 1 if metric["higher_is_better"] else -1
        for subject in ("last", "best", "tuned"):
            gain = metric["pooled_gain"][subject]["value"]
            assert gain == pytest.approx(sign * (values[subject] - values["local"]))
    for subject, each in found.items():
        share = sum(one.correct or 0.0 for one in each) / sum(one.samples for one in each)
        assert len(each) == len(NAMES)
        assert document["metrics"]["accuracy"]["pooled"][subject]["value"] == float(f"{share:.3e}")
    told = summary["evaluation"]["cross_site"]["metrics"]["accuracy"]
    assert told.keys() == {"pooled", "gain", "pooled_gain"}
    text = "".join(file.read_text() for file in (tmp_path / "sealed").iterdir() if file.suffix in (".json", ".jsonl"))
    assert len(found) >= 3 and not any(repr(one.loss) in text for each in found.values() for one in each)


@pytest.mark.slow
def test_what_silos_train_apart_is_no_version_and_does_not_travel(tmp_path: Path) -> None:
    run(tmp_path, "{kind: pad}")
    apart = {given.order.update_id for given in actions(tmp_path, Dispatch) if given.order.apart}
    assert len(apart) == len(NAMES) * (3 + 1)
    assert not any(apart & set(commit.weights) for commit in actions(tmp_path, Commit))
    entries = replay(tmp_path / "journal.jsonl")
    sent = [event.meta.nbytes for entry in entries for event in entry.events if hasattr(event, "meta")
            and event.meta.update_id in apart]  # fmt: skip
    assert sent == [0] * len(apart)
    asked = [(question.subject, question.split) for question in actions(tmp_path, Evaluate)]
    assert asked == [(Subject.LAST, Split.VALIDATION), *((each, Split.TEST) for each in asked_of(tmp_path))]


def asked_of(folder: Path) -> list[Subject]:
    """Silos are asked once for a version that is both last and best."""
    best = json.loads((folder / "summary.json").read_text())["best"]["version"]
    return [each for each in Subject if each is not Subject.BEST or best != 3]


@pytest.mark.slow
def test_the_model_that_silos_tune_is_the_best_that_they_keep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[Any] = []
    real = OwnOrders._first

    def noted(self: OwnOrders, order: WorkOrder, received: Any) -> Any:
        model = real(self, order, received)
        begun.append((order.subject, model.copy(), self._session.replica.best_model))
        return model

    monkeypatch.setattr(OwnOrders, "_first", noted)
    run(tmp_path, "{kind: pad}")
    tuned = [(model, best) for subject, model, best in begun if subject is Subject.TUNED]
    assert len(tuned) == len(NAMES) and all(np.array_equal(*pair) for pair in tuned)


@pytest.mark.slow
def test_a_silo_that_keeps_another_best_version_tunes_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that has missed the newest sums: its figures would be of another model than the others'."""
    real, late = SiloSession.train, "b"

    def behind(self: SiloSession, order: WorkOrder, *rest: Any) -> Any:
        if self.name == late and order.subject is Subject.TUNED and order.apart:
            state = self.replica._state  # type: ignore[attr-defined]
            older = replace(state.best, version=order.base_version - 1)
            self.replica._state = replace(state, best=older)  # type: ignore[attr-defined]
        return real(self, order, *rest)

    monkeypatch.setattr(SiloSession, "train", behind)
    summary, document = run(tmp_path, "{kind: pad}")
    assert summary["stopped_by"] == "3 rounds done"
    (missing,) = document["missing"]
    assert (missing["subject"], missing["silo"]) == ("tuned", late)
    assert "the best model here is version 2, not 3" in missing["reason"], missing
    assert document["metrics"]["accuracy"]["pooled"].keys() == {"last", "best", "local"}


@pytest.mark.slow
def test_where_a_silo_has_no_own_model_nothing_is_told_of_any(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the others' answer, beside one of all, would tell of that one."""
    real = SiloSession.train

    def broken(self: SiloSession, order: WorkOrder, *rest: Any) -> Any:
        if self.name == "b" and order.subject is Subject.LOCAL:
            raise ConfigError("memory", "it ran out", "Have more")
        return real(self, order, *rest)

    monkeypatch.setattr(SiloSession, "train", broken)
    summary, document = run(tmp_path, "{kind: pad}")
    assert summary["stopped_by"] == "3 rounds done"
    (missing,) = document["missing"]
    assert (missing["subject"], missing["silo"]) == ("local", "b") and "ran out" in missing["reason"]
    assert "local" not in document["metrics"]["accuracy"]["pooled"] and not document["metrics"]["accuracy"]["gain"]


def test_without_validation_nothing_is_trained_apart_and_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    change_data(monkeypatch, lambda whole, slot: whole if slot.index else SiloData(whole.train, whole.test))
    summary, document = run(tmp_path, "{kind: pad}")
    assert document == {} and ["validation split" in note for note in summary["notes"]] == [True]
