"""Which version is the best and when it is enough, by any metric: what a file may say, and what is nonsense."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fedsync.commands.validate import validate
from fedsync.common.errors import ConfigError
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Score
from fedsync.core.report_checks import MAX_SUMS
from fedsync.core.stopping import Leaders, Scores, Target
from fedsync.evaluation.metrics.score_histograms import Auroc, ScoreCounts
from fedsync.evaluation.version_scores import Selection
from fedsync.tasks.digits import DigitsTask

MEASURED = "evaluation.metrics=[auroc, brier, rmse]"
TWO = "evaluation.classes=2"


def rules(*changes: str) -> Any:
    return StrategyConfig.load("fedavg", [MEASURED, TWO, *changes]).policies()


def test_the_metric_says_whether_more_of_it_is_better() -> None:
    assert rules().selection == Selection("accuracy", higher=True, by="pooled")
    assert rules("evaluation.best={metric: brier, by: worst}").selection == Selection("brier", higher=False, by="worst")
    found = rules("stop.target={metric: auroc, at_least: 0.85}", "stop.patience={metric: brier, versions: 5}").stop
    assert found.target == Target(Selection("auroc"), 0.85)
    assert (found.patience, found.steady) == (5, Selection("brier", higher=False))
    assert rules("stop.target={metric: loss, at_most: 0.1}").stop.target == Target(Selection("loss", False), 0.1)
    assert rules("stop.patience=5").stop.steady is None


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("evaluation.best={metric: auc}", "'auc' is not computed in this run"),
        ("evaluation.best={metric: dice}", "'dice' is not computed in this run"),
        ("stop.patience={metric: f1, versions: 3}", "'f1' is not computed"),
        ("stop.patience={metric: auroc, versions: 0}", "stop.patience"),
        ("stop.target={metric: auroc}", "a target has one bound"),
        ("stop.target={metric: auroc, at_least: 0.5, at_most: 0.9}", "a target has one bound"),
        ("stop.target={metric: auroc, at_most: 0.85}", "larger values of auroc are better"),
        ("stop.target={metric: brier, at_least: 0.1}", "smaller values of brier are better"),
        ("stop.target={metric: auroc, at_least: 1.5}", "auroc lies between 0 and 1"),
        ("stop.target={metric: accuracy, at_least: 90}", "accuracy of this digits task is a share of right answers"),
        ("stop.target={metric: auroc, at_least: 0.0}", "auroc lies between 0 and 1"),
        ("stop.target={metric: brier, at_most: -1}", "brier lies between 0 and 2"),
        ("evaluation.best={by: median}", "'median' is not allowed"),
        ("evaluation.best={by: 'nowhere.at_all:rule'}", "cannot be imported"),
        ("evaluation.best={by: 'math:pi'}", "is no function"),
    ],
)
def test_nonsense_is_refused(change: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        rules(change)
    assert problem in str(caught.value)


@pytest.mark.parametrize("by", ["worst", "'math:fsum'"])
def test_sealed_metrics_leave_nobody_to_ask_for_the_worst_silo(by: str) -> None:
    with pytest.raises(ConfigError, match="sealed metrics hide the metrics of single silos"):
        StrategyConfig.load("fedavg", ["cipher={kind: bfv}", f"evaluation.best={{by: {by}}}"])
    StrategyConfig.load("fedavg", ["cipher={kind: bfv, metrics: plain}", f"evaluation.best={{by: {by}}}"])


def test_a_rule_of_ones_own_is_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "fair_rule.py").write_text("def rule(pooled, silos):\n    return pooled['accuracy'] - len(silos)\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    found = rules("evaluation.best={by: 'fair_rule:rule'}").selection
    assert found.value(Score(1, 0.5, None), {}, ()) == 0.5


def test_a_run_ends_when_a_metric_reaches_its_target_or_stands_still() -> None:
    stop = rules("stop.target={metric: auroc, at_least: 0.85}", "stop.patience={metric: brier, versions: 2}").stop
    leaders, told = Leaders(), []
    for version, (auroc, brier) in enumerate([(0.84, 0.3), (None, 0.2), (0.8, 0.2), (0.7, 0.4), (0.85, 0.1)]):
        numbers = {"brier": brier} if auroc is None else {"brier": brier, "auroc": auroc}
        leaders = leaders.after((None, stop.target.rule, stop.steady), Score(version, 0.9, 1.0, numbers), {}, ())
        told.append(stop.decide(0, 0.0, Scores(), leaders))
    assert told == [None, None, None, "no better brier in 2 evaluated versions",
                    "target reached: auroc at least 0.85, it is 0.8500"]  # fmt: skip


def test_validate_asks_the_task_only_where_a_rule_goes_by_a_metric(tmp_path: Path) -> None:
    file = tmp_path / "strategy.yaml"
    rest = "name: mine\nbalancer: {kind: fixed}\nbarrier: {kind: bsp}\ntask: {kind: digits}\n"
    file.write_text(f"{rest}stop: {{rounds: 3, target: {{metric: f1, at_least: 0.9}}}}")
    validate(str(file))
    file.write_text(f"{rest}stop: {{rounds: 3, target: {{metric: f1, at_most: 0.9}}}}")
    with pytest.raises(ConfigError, match="larger values of f1 are better"):
        validate(str(file))


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("stop.patience={metric: brier, versions: 5, x: 1}", r"patience\.x: unknown key. Allowed: metric, versions"),
        ("evaluation.cross_site.local={round: 3}", r"cross_site\.local\.round: unknown key. Did you mean 'rounds'"),
        ("stop.patience=some", r"stop\.patience: 'some' is not allowed. Write a whole number"),
        ("evaluation.cross_site.local=7", r"cross_site\.local: 7 is not allowed. Write true or false"),
    ],
)
def test_a_mistake_in_a_key_of_two_forms_is_named(given: str, told: str) -> None:
    """A section or a plain value: an unknown key of the section was a KeyError without a place."""
    with pytest.raises(ConfigError, match=told):
        StrategyConfig.load("fedavg", [given])


def test_silos_of_an_encrypted_run_lack_a_given_model_to_train_alone() -> None:
    given = ["initial_model=earlier.pt", "evaluation.cross_site={fine_tune: 20}", "stop.rounds=2"]
    StrategyConfig.load("fedavg", given)
    StrategyConfig.load("fedavg", [*given, "cipher={kind: bfv}", "evaluation.cross_site.local=false"])
    with pytest.raises(ConfigError, match=r"starts from the task's model .*leave initial_model out"):
        StrategyConfig.load("fedavg", [*given, "cipher={kind: bfv}"])


def test_metrics_of_more_sums_than_a_silo_may_report_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every evaluation of the run would be rejected."""

    def of(resolution: int) -> Any:
        own = Auroc("fine_auroc", ScoreCounts(2, resolution))
        monkeypatch.setattr(DigitsTask, "metrics", lambda task: (own,))
        return StrategyConfig.load("fedavg", ["task={kind: digits}", "evaluation.metrics=[fine_auroc]"]).policies()

    of(MAX_SUMS // 4)
    with pytest.raises(ConfigError, match=r"1 statistics of 16416 sums, at most 16 of 16384.*Leave metrics out"):
        of(MAX_SUMS // 4 + 8)
