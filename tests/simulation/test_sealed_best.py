"""What came of a sealed run: the best version, kept by all silos, and the test split, asked once; as in the clear."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Attested, Commit, Evaluate, KeepBest
from fedsync.core.orders import PooledFigures, Score, Split, Subject
from fedsync.model.layout import as_bytes
from fedsync.silo.session.session import SiloSession
from fedsync.simulation.run import run_virtual
from fedsync.tasks.task_protocol import SiloData, SiloSlot
from fedsync.train.loop import Trainer
from tests.simulation.sealed import NAMES, SILOS, SUITES, actions, change_data

QUICK = ["local.steps=3", "local.batch_size=16", "stop.rounds=4", "local.learning_rate=0.05"]
VALIDATED = 180
"""Samples that all silos hold out for validation."""


def config(cipher: str, *overrides: str, name: str = "lb-bsp") -> StrategyConfig:
    return StrategyConfig.load(name, [*QUICK, f"cipher={cipher}", *overrides])


@pytest.fixture
def held_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every silo keeps half of its test split for validation."""

    def halved(whole: SiloData, slot: SiloSlot) -> SiloData:
        half = len(whole.test) // 2
        return SiloData(whole.train, Subset(whole.test, range(half)), Subset(whole.test, range(half, len(whole.test))))

    change_data(monkeypatch, halved)


@pytest.fixture
def evaluated(monkeypatch: pytest.MonkeyPatch) -> Counter[tuple[str, Split, bytes]]:
    """How often each silo evaluated a model on a split, in orders and questions."""
    found: Counter[tuple[str, Split, bytes]] = Counter()
    honest = Trainer._evaluate

    def evaluate(self, split):  # type: ignore[no-untyped-def]
        found[self._slot.name, split, self._weights.read().tobytes()] += 1
        return honest(self, split)

    monkeypatch.setattr(Trainer, "_evaluate", evaluate)
    return found


@pytest.fixture
def replicas(monkeypatch: pytest.MonkeyPatch) -> dict[str, EncryptedReplica]:
    """Those of a run, as they are in the end."""
    made: dict[str, EncryptedReplica] = {}
    honest = EncryptedReplica.__init__

    def begin(self, plan, ring, *more, **options):  # type: ignore[no-untyped-def]
        honest(self, plan, ring, *more, **options)
        made[ring.own.name] = self

    monkeypatch.setattr(EncryptedReplica, "__init__", begin)
    return made


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "rounds.jsonl").read_text().splitlines()]


def attested(folder: Path) -> list[PooledFigures]:
    return [action.figures for action in actions(folder, Attested)]


def kept(folder: Path) -> list[Score]:
    """Scores of the versions that became the best, in order."""
    return [action.score for action in actions(folder, KeepBest)]


@pytest.mark.slow
@pytest.mark.parametrize("cipher", SUITES)
def test_the_best_version_is_that_of_a_run_in_the_clear(
    cipher: str, tmp_path: Path, held_out: None, replicas: dict[str, EncryptedReplica]
) -> None:
    run_virtual(config("{kind: plain}"), SILOS, tmp_path / "plain")
    run_virtual(config(cipher), SILOS, tmp_path / "sealed")
    plain, sealed = kept(tmp_path / "plain"), kept(tmp_path / "sealed")
    # Updates are rounded before they are sealed, so models differ in the last digits.
    assert [score.version for score in sealed] == [score.version for score in plain] != []
    for one, other in zip(plain, sealed, strict=True):
        assert other.accuracy == pytest.approx(one.accuracy, abs=1.1 / VALIDATED), "one sample is judged otherwise"
    found = {name: each.best for name, each in replicas.items()}
    assert found.keys() == set(NAMES)
    assert {each and (each.version, each.digest, each.score) for each in found.values()} == {
        (sealed[-1].version, next(each.digest for each in found.values() if each), sealed[-1])
    }
    summary = json.loads((tmp_path / "sealed" / "summary.json").read_text())
    assert summary["evaluation"]["test"].keys() == {"last", "best"}
    file = tmp_path / "sealed" / "best.pt"
    tensors = torch.load(file, weights_only=True).values()
    np.testing.assert_array_equal(np.concatenate([each.numpy().ravel() for each in tensors]), replicas["a"].best_model)
    accuracies = [row["accuracy"] for row in rows(tmp_path / "sealed")]
    assert accuracies == [figures.score and figures.score.accuracy for figures in attested(tmp_path / "sealed")][1:5]
    for each in found.values():
        assert each is not None and hashlib.sha256(as_bytes(each.model).data).hexdigest() == each.digest


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["{kind: plain}", "{kind: pad}"])
def test_where_the_last_version_is_the_best_one_test_is_of_both(cipher: str, tmp_path: Path, held_out: None) -> None:
    """Silos are asked once, and the books say it twice, sealed as in the clear."""
    summary = run_virtual(config(cipher, "stop.rounds=2"), SILOS, tmp_path)
    assert summary["best"]["version"] == summary["last"]["version"] == 2
    assert summary["best"]["test"] == summary["last"]["test"] != {}
    for split in ("validation", "test"):
        models = summary["evaluation"][split]
        assert models["best"] == models["last"] and models["best"]["version"] == 2


@pytest.mark.slow
@pytest.mark.parametrize("cipher", SUITES)
def test_the_test_split_is_asked_once_for_each_model_and_for_all_silos_at_once(
    cipher: str, tmp_path: Path, held_out: None, evaluated: Counter[tuple[str, Split, bytes]]
) -> None:
    run_virtual(config(cipher), SILOS, tmp_path)
    tests = [figures for figures in attested(tmp_path) if figures.split is Split.TEST]
    assert [figures.subject for figures in tests] == [Subject.LAST, Subject.BEST]
    assert all(figures.loss is None and figures.score is not None for figures in tests)
    models = {model for _, split, model in evaluated if split is Split.TEST}
    assert len(models) == len(tests)
    assert {(name, model) for name, split, model in evaluated if split is Split.TEST} == {
        (name, model) for name in NAMES for model in models
    }
    assert set(evaluated.values()) == {1}, "nor on the validation split"


@pytest.mark.slow
def test_scores_on_the_test_split_are_of_the_models_that_they_say(
    tmp_path: Path, held_out: None, replicas: dict[str, EncryptedReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last is not the best; found again by the silos' own trainers."""
    sessions: list[SiloSession] = []
    begin = SiloSession.__init__

    def began(self, *arguments, **options):  # type: ignore[no-untyped-def]
        begin(self, *arguments, **options)
        sessions.append(self)

    monkeypatch.setattr(SiloSession, "__init__", began)
    run_virtual(config("{kind: pad}"), SILOS, tmp_path)
    last, best = [figures.score for figures in attested(tmp_path) if figures.split is Split.TEST]
    assert last is not None and best is not None
    assert best.version == kept(tmp_path)[-1].version == 3 < last.version
    for score, model in ((last, replicas["a"].model), (best, replicas["a"].best_model)):
        assert model is not None
        found = [each._trainer._trainer.evaluate(model, None, Split.TEST) for each in sessions]
        accuracy = sum(each.correct for each in found) / sum(each.samples for each in found)
        assert score.accuracy == float(f"{accuracy:.3e}")


@pytest.mark.slow
def test_a_version_that_answers_a_question_changes_nothing(
    tmp_path: Path, held_out: None, replicas: dict[str, EncryptedReplica], monkeypatch: pytest.MonkeyPatch
) -> None:
    models: dict[int, bytes] = {}
    receive = EncryptedReplica.receive

    def received(self, payload, version):  # type: ignore[no-untyped-def]
        models[version] = receive(self, payload, version).tobytes()
        return receive(self, payload, version)

    monkeypatch.setattr(EncryptedReplica, "receive", received)
    run_virtual(config("{kind: pad}"), SILOS, tmp_path)
    assert len(actions(tmp_path, Commit)) == max(models) == 7 and len(actions(tmp_path, Evaluate)) == 3
    assert models[4] == models[5] == models[6] == models[7] != models[3]


@pytest.mark.slow
def test_where_only_some_hold_out_samples_nobody_is_asked_on_the_test_split(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def only_one(whole: SiloData, slot: SiloSlot) -> SiloData:
        half = Subset(whole.test, range(len(whole.test) // 2))
        return SiloData(whole.train, whole.test, half if slot.index == 0 else None)

    change_data(monkeypatch, only_one)
    run_virtual(config("{kind: pad}"), SILOS, tmp_path)
    assert all(figures.split is Split.VALIDATION for figures in attested(tmp_path))
