"""A strategy file with differential privacy: what privacy withholds or cannot hide is refused before a run."""

import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig

STEADY = "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 1.0}"
NOISY = "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 1.0, score_noise: 5.0}"
AIMED = "privacy={kind: dp-sgd, clip: 1.0, target_epsilon: 1.0}"


@pytest.mark.parametrize(
    ("name", "changes", "problem"),
    [
        ("lb-bsp", [AIMED, "stop={seconds: 60}"], r"whole run, whose length is open"),
        ("fsp", [AIMED], "equal numbers of steps"),
        ("lb-bsp", [STEADY, "cipher={kind: bfv}"], "exact figures, which are withheld"),
        ("lb-bsp", [STEADY, "stop={rounds: 9, target_accuracy: 0.9}"], r"goes by scores, which are withheld"),
        ("lb-bsp", [NOISY, "evaluation={best: {metric: loss}}"], "metrics other than accuracy are withheld"),
        ("lb-bsp", [NOISY, "evaluation={cross_site: {}}"], "models without noise"),
        ("lb-bsp", [NOISY, "task={kind: custom, file: mine.py}"], "score_noise has no effect"),
        ("lb-bsp", [STEADY, "local.workers=2"], "local.workers 2"),
        ("lb-bsp", [STEADY, "task={kind: csv, files: [a.csv], target: ill}"], "scales a row by other rows"),
    ],
)
def test_what_privacy_withholds_or_cannot_hide_is_refused(name: str, changes: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=rf"privacy\.kind.*{problem}"):
        StrategyConfig.load(name, changes)


def test_noisy_scores_stop_a_run_and_choose_the_best_version() -> None:
    StrategyConfig.load("lb-bsp", [NOISY, "stop={rounds: 9, target_accuracy: 0.9, patience: 3}"])
    StrategyConfig.load("lb-bsp", [NOISY, "cipher={kind: bfv, metrics: plain}"])


def test_a_linear_model_with_penalties_is_trained_privately() -> None:
    StrategyConfig.load("lb-bsp", [STEADY, "task={kind: linear, l1: 0.1, l2: 0.1, data: {kind: sparse}}"])


def test_a_run_without_privacy_is_the_text_that_it_was() -> None:
    """Its text is its identity: a new key would make each run another one."""
    assert "privacy" not in RunSpec.of(StrategyConfig.load("lb-bsp"), None, 2).dump()
    text = RunSpec.of(StrategyConfig.load("lb-bsp", [STEADY]), None, 2).dump()
    assert RunSpec.parse(text).privacy is not None


@pytest.mark.parametrize("both", ["noise_multiplier: 1.0, target_epsilon: 1.0", ""])
def test_one_noise_is_written(both: str) -> None:
    with pytest.raises(ConfigError, match="noise_multiplier or target_epsilon is needed, and not both"):
        StrategyConfig.load("lb-bsp", [f"privacy={{kind: dp-sgd, clip: 1.0, {both}}}"])
