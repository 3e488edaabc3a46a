"""Sealed equals plain: every shipped metric, by every suite, of sums of several silos that no one but silos can read.

Silos measure as they do in a run, with outputs of their own; their updates are sealed with the real ciphers, added by
the server and opened by each silo. What silos tell is what a run in the clear finds of the same evaluations.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fedsync.core.orders import Evaluation, Score
from fedsync.evaluation.metrics.metric_types import AnyMetric, statistics_of
from fedsync.evaluation.metrics.named import BY_SCORE, NAMES, shipped
from fedsync.evaluation.version_scores import Scores, Selection
from fedsync.tasks.metrics.measurement import Measuring
from tests.cipher.make import Federation, change, plan

SILOS = dict(zip("abc", (23, 40, 31), strict=True))
"""Test samples of each: no two have the same, so a mean of silos' numbers is not the pooled one."""

_NUMBERS = ("mae", "rmse", "r2")
_OF_CLASSES = tuple(name for name in NAMES if name.startswith(("acc", "bal", "f1", "sens", "spec")) or name in BY_SCORE)
SETS: dict[str, tuple[AnyMetric, ...]] = {
    "two classes": tuple(shipped(name, 2) for name in _OF_CLASSES),
    "five classes": tuple(shipped(name, 5) for name in _OF_CLASSES if not name.startswith(("sens", "spec"))),
    "numbers": tuple(shipped(name) for name in _NUMBERS),
    "masks": (shipped("dice"), shipped("iou")),
    "tokens": (shipped("perplexity"),),
    "risks": (shipped("concordance"),),
}
SUITES = ("pad", "bfv", "masked")


def test_every_shipped_metric_is_among_them() -> None:
    assert {metric.name for metrics in SETS.values() for metric in metrics} == set(NAMES)


def samples(kind: str, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and targets, with something to be found in them."""
    match kind:
        case "two classes" | "five classes":
            classes = 2 if kind.startswith("two") else 5
            labels = torch.randint(0, classes, (size,))
            return 2 * torch.randn(size, classes) + torch.nn.functional.one_hot(labels, classes), labels
        case "numbers":
            truth = 30 * torch.randn(size)
            return truth + 20 * torch.randn(size), truth
        case "masks":
            return torch.randn(size, 2, 4, 4), torch.randint(0, 2, (size, 4, 4))
        case "tokens":
            return torch.randn(size, 7, 4), torch.randint(0, 7, (size, 4))
    times = torch.rand(size)
    return -times + torch.randn(size), torch.stack([times, torch.randint(0, 2, (size,)).float()], dim=1)


def evaluations(kind: str) -> dict[str, Evaluation]:
    """What each silo finds."""
    torch.manual_seed(5)
    found, measuring = {}, Measuring(SETS[kind], torch.device("cpu"))
    for name, size in SILOS.items():
        sums = measuring.begin()
        sums.add(measuring.of(*samples(kind, size), torch.arange(size)))
        loss, correct = float(size * torch.rand(1)), float(torch.randint(0, size, (1,)))
        found[name] = Evaluation(loss, correct, size, sums=sums.sums(size))
    return found


def in_the_clear(kind: str, found: dict[str, Evaluation]) -> Score:
    scores = Scores(SETS[kind])
    scores.begin(0, len(found))
    for name, evaluation in found.items():
        scores.end(0, name, evaluation)
    (settled,) = scores.settle()
    return settled.score


def sealed(kind: str, suite: str, found: dict[str, Evaluation], folder: Path) -> list[Score | None]:
    """What each silo tells once it has opened the sum."""
    of = replace(plan(suite, quorum=len(SILOS)), seal_metrics=True, metrics=SETS[kind], selection=Selection())
    made = Federation(of, folder, dict.fromkeys(SILOS, 10))
    made.begin_all(SILOS, 0)
    ids = [made.answer(name, change(index), evaluation=found[name]) for index, name in enumerate(SILOS)]
    made.commit(1, ids)
    made.unmask()
    told = []
    for name in SILOS:
        made.begin(name, 1)
        (figures,) = made.silos[name].pooled or ()
        told.append(figures.score)
    return told


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
@pytest.mark.parametrize("kind", SETS)
def test_what_silos_tell_is_what_the_plain_pool_has(kind: str, suite: str, tmp_path: Path) -> None:
    found = evaluations(kind)
    plain, known = in_the_clear(kind, found), statistics_of(SETS[kind])
    assert plain.metrics.keys() == {metric.name for metric in SETS[kind]}, "else nothing is compared"
    assert all(np.count_nonzero(found["a"].sums[key]) > 2 for key in known)
    expected = {name: float(f"{value:.3e}") for name, value in plain.numbers.items()}
    for score in sealed(kind, suite, found, tmp_path):
        assert score is not None and score.version == 0
        assert score.numbers == expected
    alone = in_the_clear(kind, {"a": found["a"]}).numbers
    assert all(float(f"{alone[name]:.3e}") != value for name, value in expected.items()), "and no silo's own"
