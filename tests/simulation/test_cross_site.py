"""What silos train for themselves and how it compares, from the strategy file to the run's folder, in virtual time."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError, Diverged
from fedsync.common.run_claim import Existing, claim
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Subject, WorkOrder
from fedsync.evaluation.metrics.gain import LocalGains
from fedsync.extras.cross_site.own_models import OwnOrders
from fedsync.observe.replay import replay
from fedsync.silo.session.session import SiloSession
from fedsync.simulation.run import run_virtual

RUN = ("stop={rounds: 2}", "local.steps=3", "task={kind: mlp, data: {kind: blobs, samples: 200}}", "wire={}")
COMPARED = "evaluation={metrics: [accuracy], cross_site: {local: true, fine_tune: 4}}"


def cluster(names: str = "ab") -> ClusterConfig:
    silos = [{"name": name, "speed": speed} for name, speed in zip(names, (100.0, 50.0, 25.0), strict=False)]
    return ClusterConfig.model_validate({"silos": silos})


def run(out: Path, *sets: str, strategy: str = "lb-bsp", names: str = "ab") -> tuple[dict[str, Any], dict[str, Any]]:
    """A run's summary and its matrix."""
    summary = run_virtual(StrategyConfig.load(strategy, [*RUN, COMPARED, *sets]), cluster(names), out)
    return summary, json.loads((out / "cross_site.json").read_text())


def rows(document: dict[str, Any]) -> list[tuple[str, str | None]]:
    return [(each["subject"], each["silo"]) for each in document["models"]]


def there(document: dict[str, Any]) -> list[list[bool]]:
    return [[cell is not None for cell in row] for row in document["metrics"]["accuracy"]["matrix"]]


ALL = [("last", None), ("best", None), ("local", "a"), ("local", "b"), ("tuned", "a"), ("tuned", "b")]
FULL = [[True, True]] * 4 + [[True, False], [False, True]]


@pytest.mark.parametrize("strategy", ["lb-bsp", "asp", "fsp"])
def test_a_run_ends_with_the_whole_matrix(tmp_path: Path, strategy: str) -> None:
    """Emulated silos share their local models; what was decided replays."""
    summary, document = run(tmp_path, strategy=strategy)
    assert rows(document) == ALL and there(document) == FULL and not document["missing"]
    assert summary["evaluation"]["cross_site"]["metrics"]["accuracy"].keys() == {"pooled", "gain"}
    for subject, gains in document["metrics"]["accuracy"]["gain"].items():
        for silo, gain in gains.items():
            assert gain["low"] <= gain["value"] <= gain["high"], (subject, silo)
    processed = {each["name"]: each["samples"] for each in summary["silos"]}
    for each in document["models"][2:4]:
        assert each["samples"] >= processed[each["silo"]], "alone it trains no less than in the run"
    replay(tmp_path / "journal.jsonl")


def test_without_it_nothing_is_written(tmp_path: Path) -> None:
    run(tmp_path)
    run_virtual(StrategyConfig.load("lb-bsp", RUN), cluster(), claim(tmp_path, Existing.OVERWRITE))
    assert not (tmp_path / "cross_site.json").exists()


def test_fewer_bits_on_the_wire_change_nothing_of_it(tmp_path: Path) -> None:
    _, document = run(tmp_path, "wire={up: int8, down: int8}")
    assert rows(document) == ALL and there(document) == FULL


def test_under_encryption_own_models_stay(tmp_path: Path) -> None:
    """With figures in the clear: rows of local models have the owner's cell only."""
    _, document = run(
        tmp_path,
        "cipher={kind: bfv, metrics: plain, members: 2}",
        "evaluation={metrics: [accuracy], cross_site: {local: true}}",
    )
    assert rows(document)[-2:] == [("local", "a"), ("local", "b")] and rows(document)[0] == ("last", None)
    assert there(document)[-2:] == [[True, False], [False, True]]
    gains = document["metrics"]["accuracy"]["gain"]["last"].values()
    assert all(gain["low"] is None for gain in gains), "how two models do together is told in the clear only"


def test_alone_with_the_same_data_and_nobody_else_is_the_run_itself(tmp_path: Path) -> None:
    """One silo in the federation: its local model is the last version, but for how an update is rounded."""
    _, document = run(tmp_path, "min_silos=1", strategy="fedavg", names="a")
    loss = document["metrics"]["loss"]["matrix"]
    place = rows(document).index(("local", "a"))
    assert loss[place][0]["value"] == pytest.approx(loss[0][0]["value"], rel=1e-5)


@pytest.mark.parametrize("failure", ["dies", "diverges"])
def test_a_silo_that_cannot_train_alone_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    real = SiloSession.train

    def broken(self: SiloSession, order: WorkOrder, *rest: Any) -> Any:
        if self.name == "b" and order.subject is Subject.LOCAL:
            if failure == "diverges":
                raise Diverged("local.learning_rate", "training diverged", "Lower it")
            raise ConfigError("memory", "it ran out", "Have more")
        return real(self, order, *rest)

    monkeypatch.setattr(SiloSession, "train", broken)
    summary, document = run(tmp_path)
    assert summary["stopped_by"] == "2 rounds done"
    assert ("local", "b") not in rows(document) and ("tuned", "b") in rows(document)
    (missing,) = document["missing"]
    assert (missing["subject"], missing["silo"]) == ("local", "b")
    assert ("diverged" if failure == "diverges" else "ran out") in missing["reason"]
    gain = document["metrics"]["accuracy"]["gain"]["best"]
    assert gain["b"] is None and gain["a"] is not None


def test_the_model_that_silos_tune_is_the_best(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where later versions were worse."""
    begun: list[Any] = []
    real = OwnOrders._first

    def noted(self: OwnOrders, order: WorkOrder, received: Any) -> Any:
        model = real(self, order, received)
        begun.append((order.subject, np.array(model)))
        return model

    monkeypatch.setattr(OwnOrders, "_first", noted)
    summary, _ = run(tmp_path)
    import torch

    best = torch.load(tmp_path / "best.pt", weights_only=True)
    flat = np.concatenate([tensor.float().numpy().ravel() for tensor in best.values()])
    tuned = [model for subject, model in begun if subject is Subject.TUNED]
    assert len(tuned) == 2 and all(np.array_equal(model, flat) for model in tuned)
    assert summary["stopped_by"] == "2 rounds done"


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        (["cipher={kind: bfv, metrics: plain}"], "fine_tune"),
        (["fraction_evaluate=0"], "fraction_evaluate 0"),
        (["evaluation={cross_site: {local: false}}"], "cross_site trains no model"),
        (["evaluation={cross_site: {local: {rounds: 0}}}"], "rounds"),
    ],
)
def test_what_cannot_be_compared_is_refused(sets: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        StrategyConfig.load("lb-bsp", [*RUN, COMPARED, *sets])


def test_what_a_silo_gains_is_over_its_own_local_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It tests those of others in between, before it tunes one."""
    told: list[Any] = []
    real = LocalGains.told

    def noted(self: LocalGains, subject: str, found: Any, judged: Any) -> Any:
        told.append((subject, judged is not None))
        return real(self, subject, found, judged)

    monkeypatch.setattr(LocalGains, "told", noted)
    run(tmp_path)
    assert [known for subject, known in told if subject == Subject.LOCAL].count(True) == 2
    assert [known for subject, known in told if subject == Subject.LOCAL].count(False) == 2
