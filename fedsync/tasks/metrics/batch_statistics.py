"""Sums of a batch from a model's outputs, computed by torch on the outputs' device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.moments import BLOCKS, ERRORS, LIKELIHOOD, OVERLAP, BlockSums, OwnMetric, PairCounts
from fedsync.evaluation.metrics.score_histograms import ScoreCounts, edges

IGNORED = -100
"""Label for an unknown class, as in PyTorch's cross-entropy; other negative labels mean the same."""

Measure = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Maps outputs, targets and sample numbers [n] to sums, float64 [size]; for pairs, to one row per sample."""


def measure_of(metric: AnyMetric) -> Measure:
    """Return the function that measures a metric's statistic; raises `ConfigError` for an unknown statistic."""
    statistic = metric.statistic
    if isinstance(metric, OwnMetric):
        return _own(metric)
    match statistic:
        case ClassCounts() | ScoreCounts():
            return lambda outputs, targets, _: _counted(statistic, outputs, targets)
        case PairCounts():
            return _samples
        case BlockSums() if statistic in _NUMBERS:
            numbers = _NUMBERS[statistic]
            return lambda outputs, targets, rows: _blocks(numbers(outputs, targets), rows)
        case _:
            problem = f"nobody knows how to measure {statistic.key}"
            raise ConfigError(metric.name, problem, "Make it with fedsync.tasks.metrics.own")


def labels_of(outputs: Tensor) -> Tensor:
    """Predicted classes: the largest of logits [n, classes, ...], or whether a single output is above 0."""
    if outputs.ndim > 1 and outputs.shape[1] > 1:
        # Equal to argmax for two classes, and ten times as fast.
        return outputs[:, 1] > outputs[:, 0] if outputs.shape[1] == 2 else outputs.argmax(dim=1)
    return (outputs if outputs.ndim == 1 else outputs[:, 0]) > 0


def _known(targets: Tensor, labels: Tensor) -> Tensor:
    """Targets as flat int64, of the labels' shape or with one more channel."""
    if targets.numel() != labels.numel():
        problem = f"outputs say {tuple(labels.shape)} classes, and targets are {tuple(targets.shape)}"
        raise ConfigError("Task.predict", problem, "Return one logit a class, or one for two, and the labels")
    return targets.flatten().long()


def cells_of(statistic: ClassCounts | ScoreCounts, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in the sums at which the labels of a batch count.

    Returns:
        True labels, int64 [labels], negative if unknown. Entries of the sums, int64 [labels, n]: -1 for none, and one
        beyond the last for a NaN output.
    """
    labels = labels_of(outputs)
    truth = _known(targets, labels)
    several = outputs.ndim > 1 and outputs.shape[1] > 1
    told, wanted = (outputs.shape[1] if several else 2), statistic.classes
    if told > wanted or (told < wanted and isinstance(statistic, ScoreCounts)):
        problem = f"the model tells {told} classes apart, not {wanted}"
        raise ConfigError("evaluation.classes", problem, "Mend the number of classes")
    if len(truth) and int(truth.max()) >= wanted:
        problem = f"there is a label that is none of {wanted} classes"
        raise ConfigError("evaluation.classes", problem, "Mend the number of classes, or the labels")
    if isinstance(statistic, ScoreCounts):
        return truth, _by_score(statistic, _scores(outputs, several, wanted), truth)
    said = labels.flatten().long()
    if statistic.full:
        return truth, (truth * wanted + said)[:, None]
    return truth, torch.stack([torch.where(truth == said, truth, -1), wanted + said, 2 * wanted + truth], dim=1)


def _scores(outputs: Tensor, several: bool, classes: int) -> Tensor:
    """Probabilities of class 1, [labels, 1], or of each class, [labels, classes]."""
    if not several:
        return torch.sigmoid(outputs.double()).reshape(-1, 1)
    logits = outputs.double().movedim(1, -1).reshape(-1, classes)
    return torch.sigmoid(logits[:, 1:] - logits[:, :1]) if classes == 2 else torch.softmax(logits, dim=1)


@cache
def _ends(resolution: int, device: torch.device) -> Tensor:
    return torch.from_numpy(edges(resolution)).to(device)


def _by_score(statistic: ScoreCounts, scores: Tensor, truth: Tensor) -> Tensor:
    histograms, _, bins = statistic.shape
    wanted = torch.arange(histograms, device=truth.device) + (statistic.classes == 2)
    # A NaN score falls beyond the last bin.
    places = torch.where(
        scores.isnan(), statistic.size, torch.bucketize(scores, _ends(statistic.resolution, scores.device))
    )
    return places + bins * ((truth[:, None] == wanted) + 2 * torch.arange(histograms, device=truth.device))


def _where(there: Tensor, cells: Tensor) -> Tensor:
    return cells if there.all() else cells[there]


def _counted(statistic: ClassCounts | ScoreCounts, outputs: Tensor, targets: Tensor) -> Tensor:
    truth, cells = cells_of(statistic, outputs, targets)
    cells = _where(truth >= 0, cells).flatten()
    found = torch.bincount(_where(cells >= 0, cells), minlength=statistic.size)
    if len(found) > statistic.size:
        return torch.full((statistic.size,), torch.nan, dtype=torch.float64, device=found.device)
    return found.double()


def _errors(outputs: Tensor, targets: Tensor) -> Tensor:
    if outputs.numel() != targets.numel():
        problem = f"outputs are {tuple(outputs.shape)}, and targets {tuple(targets.shape)}"
        raise ConfigError("Task.predict", problem, "Return a number for each target")
    truth = targets.double().reshape(len(targets), -1)
    error = outputs.double().reshape(len(targets), -1) - truth
    columns = (torch.ones_like(truth), error.abs(), error.square(), truth, truth.square())
    return torch.stack([column.sum(dim=1) for column in columns], dim=1)


def _overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean Dice and IoU per sample, over classes other than 0 that are true or predicted; 1 if there are none."""
    said = labels_of(outputs).long()
    truth = _known(targets, said).reshape(said.shape)
    said = torch.where(truth >= 0, said, IGNORED)
    both, either = [], []
    for label in range(1, max(2, outputs.shape[1] if outputs.ndim > 1 else 2)):
        mine, theirs = (each.reshape(len(said), -1) == label for each in (said, truth))
        both.append((mine & theirs).sum(dim=1).double())
        either.append((mine | theirs).sum(dim=1).double())
    inside, union = torch.stack(both), torch.stack(either)
    there = union > 0
    dice = torch.where(there, 2 * inside / (union + inside).clamp(min=1), 0.0)
    iou = torch.where(there, inside / union.clamp(min=1), 0.0)
    classes = there.sum(dim=0)
    means = [torch.where(classes > 0, each.sum(dim=0) / classes.clamp(min=1), 1.0) for each in (dice, iou)]
    return torch.stack([torch.ones_like(means[0]), *means], dim=1)


def _likelihood(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = cross_entropy(outputs, targets, ignore_index=IGNORED, reduction="none").double()
    tokens = (targets != IGNORED).double()
    flat = [each.reshape(len(targets), -1).sum(dim=1) for each in (tokens, losses)]
    return torch.stack([torch.ones_like(flat[0]), *flat], dim=1)


_NUMBERS: dict[BlockSums, Callable[[Tensor, Tensor], Tensor]] = {
    ERRORS: _errors,
    OVERLAP: _overlap,
    LIKELIHOOD: _likelihood,
}


def _own(metric: OwnMetric) -> Measure:
    columns = metric.statistic.columns - 1

    def measure(outputs: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
        numbers: Any = metric.measure(outputs, targets)
        if not isinstance(numbers, Tensor) or numbers.shape != (len(rows), columns):
            found = tuple(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
            problem = f"its measure returned {found} for {len(rows)} samples"
            raise ConfigError(metric.name, problem, f"Return a tensor [{len(rows)}, {columns}], a row for each sample")
        return _blocks(torch.cat([torch.ones(len(rows), 1).to(numbers), numbers], dim=1).double(), rows)

    return measure


def _blocks(numbers: Tensor, rows: Tensor) -> Tensor:
    """Sum the rows of numbers [n, columns] within each of the sample blocks."""
    groups = torch.arange(BLOCKS, device=rows.device)[:, None] == rows % BLOCKS
    return (groups.double() @ numbers).flatten()


def _samples(outputs: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """Sample number, risk, time and event of each sample, [n, 4]; targets are [n, 2], time and event."""
    if targets.ndim != 2 or targets.shape[1] != 2 or outputs.numel() != len(targets):
        problem = f"outputs are {tuple(outputs.shape)}, and targets {tuple(targets.shape)}"
        raise ConfigError("Task.predict", problem, "Return a risk for each sample, and targets [n, 2]: time and event")
    columns = [rows.double(), outputs.double().flatten(), *targets.double().unbind(1)]
    return torch.stack(columns, dim=1)
