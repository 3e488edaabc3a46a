"""Collector of a metric's sums in one evaluation, batch by batch.

Small batches are joined before they are summed: for a few hundred samples, the calls take longer than the computation.
Memory holds the sums, `_KEPT` outputs with targets, and a few numbers per sample for pair metrics and results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.gain import JudgedSamples
from fedsync.evaluation.metrics.metric_types import AnyMetric, Statistic, statistics_of
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
            problem = f"no code measures {statistic.key}"
            raise ConfigError(metric.name, problem, "Make it with fedsync.tasks.metrics.own")


def labels_of(outputs: Tensor) -> Tensor:
    """Predicted classes: the largest of logits [n, classes, ...], or whether a single output is above 0."""
    if outputs.ndim > 1 and outputs.shape[1] > 1:
        # Equal to argmax for two classes, and ten times as fast.
        return outputs[:, 1] > outputs[:, 0] if outputs.shape[1] == 2 else outputs.argmax(dim=1)
    return (outputs if outputs.ndim == 1 else outputs[:, 0]) > 0


def _known(targets: Tensor, labels: Tensor) -> Tensor:
    if targets.numel() != labels.numel():
        problem = f"outputs say {tuple(labels.shape)} classes, and targets are {tuple(targets.shape)}"
        raise ConfigError("Task.predict", problem, "Return one logit per class, or one for two classes, and the labels")
    return targets.flatten().long()


def cells_of(statistic: ClassCounts | ScoreCounts, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Positions in the sums at which a batch's labels count: true labels, int64 [labels], negative if unknown, and
    entries of the sums, int64 [labels, n]: -1 for none, one beyond the last for a NaN output.
    """
    labels = labels_of(outputs)
    truth = _known(targets, labels)
    several = outputs.ndim > 1 and outputs.shape[1] > 1
    told, wanted = (outputs.shape[1] if several else 2), statistic.classes
    if told > wanted or (told < wanted and isinstance(statistic, ScoreCounts)):
        problem = f"the model tells {told} classes apart, not {wanted}"
        raise ConfigError("evaluation.classes", problem, "Correct the number of classes")
    if len(truth) and int(truth.max()) >= wanted:
        problem = f"there is a label that is none of {wanted} classes"
        raise ConfigError("evaluation.classes", problem, "Correct the number of classes, or the labels")
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
    # The deviations of several targets have no common mean, so R2 is undefined for them.
    one = truth[:, 0] if truth.shape[1] == 1 else torch.zeros_like(error[:, 0])
    columns = (torch.ones_like(one), error.abs().mean(dim=1), error.square().mean(dim=1), one, one.square())
    return torch.stack(columns, dim=1)


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
    groups = torch.arange(BLOCKS, device=rows.device)[:, None] == rows % BLOCKS
    return (groups.double() @ numbers).flatten()


def _samples(outputs: Tensor, targets: Tensor, rows: Tensor) -> Tensor:
    """Sample number, risk, time and event of each sample, [n, 4]; targets are [n, 2], time and event."""
    if targets.ndim != 2 or targets.shape[1] != 2 or outputs.numel() != len(targets):
        problem = f"outputs are {tuple(outputs.shape)}, and targets {tuple(targets.shape)}"
        raise ConfigError("Task.predict", problem, "Return a risk for each sample, and targets [n, 2]: time and event")
    columns = [rows.double(), outputs.double().flatten(), *targets.double().unbind(1)]
    return torch.stack(columns, dim=1)


SumsByKey = dict[str, tuple[float, ...]]

Samples = tuple[Tensor, Tensor, Tensor, bool]
"""Outputs, targets, sample numbers, and whether per-sample results are wanted; see `Measuring.of`."""

_KEPT = 2**16
"""Outputs that are summed together; a larger batch is summed alone."""

_PAIRED = 8192
"""Consecutive samples among which pairs are formed; a limit, because time grows with the square."""

_AT_A_TIME = 512


@dataclass(frozen=True, slots=True)
class Summed:
    """Sums of a batch by statistic key, [size] each; for pair statistics, one row per sample. ``each`` has per-sample
    results, [n, 2 + k]: sample number, true label and entries of the sums.
    """

    sums: Mapping[str, Tensor]
    each: Mapping[str, Tensor] = field(default_factory=dict)


Found = Summed | Samples
"""Contribution of one batch, summed or not yet summed."""


def _entries(samples: Samples) -> int:
    return max(samples[0].numel(), samples[1].numel())


def _form(samples: Samples) -> tuple[object, ...]:
    outputs, targets, _, each = samples
    return outputs.dtype, outputs.shape[1:], targets.dtype, targets.shape[1:], each


class Measuring:
    """Measurement of metrics on one device; raises `ConfigError` for a metric that cannot be measured."""

    def __init__(self, metrics: Sequence[AnyMetric], device: torch.device) -> None:
        self._metrics = metrics
        self._statistics = statistics_of(metrics)
        self._measures = {metric.statistic.key: measure_of(metric) for metric in metrics}
        self._device = device
        self._needs_tensors = not all(isinstance(metric, OwnMetric) for metric in metrics)

    def __bool__(self) -> bool:
        return bool(self._measures)

    def of(self, outputs: Tensor, targets: Tensor, rows: Tensor, each: bool = False) -> Found:
        """Contribution of a batch; stateless, so that a batch may be repeated. ``rows``, int64 [n], are sample numbers
        within the split. With ``each``, per-sample results are kept; see `Measured.judged`.
        """
        if not self:
            return Summed({})
        # The outputs of a user's own metric may have other types and shapes.
        tensors = all(isinstance(part, Tensor) and part.shape[:1] == rows.shape for part in (outputs, targets))
        if not tensors or _entries((outputs, targets, rows, each)) >= _KEPT:
            return self.summed(outputs, targets, rows, each)
        # Cloned, because the caller may reuse the tensors for the next batch.
        return outputs.clone(), targets.clone(), rows, each

    def summed(self, outputs: Tensor, targets: Tensor, rows: Tensor, each: bool) -> Summed:
        for name, part in (("outputs", outputs), ("targets", targets)):
            if self._needs_tensors and not isinstance(part, Tensor):
                problem = f"the {name} are a {type(part).__name__}, and the metrics need a tensor"
                raise ConfigError("Task.predict", problem, "Return tensors, such as logits and labels")
        sums = {key: measure(outputs, targets, rows) for key, measure in self._measures.items()}
        if isinstance(outputs, Tensor):  # a user's own metric looks for NaN in other outputs itself
            broken = outputs.isnan().any()
            sums = {key: torch.where(broken, torch.nan, found) for key, found in sums.items()}
        return Summed(sums, self._each(outputs, targets, rows) if each and isinstance(targets, Tensor) else {})

    def _each(self, outputs: Tensor, targets: Tensor, rows: Tensor) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for key, statistic in self._statistics.items() if targets.numel() == len(targets) else ():
            if isinstance(statistic, ClassCounts | ScoreCounts):
                labels, cells = cells_of(statistic, outputs, targets)
                found[key] = torch.cat([rows[:, None], labels[:, None], cells], dim=1)
        return found

    def begin(self) -> Measured:
        return Measured(self._metrics, self._statistics, self._device, self.summed)


class Measured:
    """Results of one evaluation; see `Measuring.begin`."""

    def __init__(
        self,
        metrics: Sequence[AnyMetric],
        statistics: Mapping[str, Statistic],
        device: torch.device,
        summed: Callable[[Tensor, Tensor, Tensor, bool], Summed],
    ) -> None:
        self._metrics, self._summed = metrics, summed
        self._kept: list[Samples] = []
        self._form: tuple[object, ...] = ()
        self._entries = 0
        self._totals = {
            key: torch.zeros(each.size, dtype=torch.float64, device=device)
            for key, each in statistics.items()
            if not isinstance(each, PairCounts)
        }
        self._pairs: dict[str, list[Tensor]] = {key: [] for key in statistics if key not in self._totals}
        self._statistics = statistics
        self._each: dict[str, list[Tensor]] = {key: [] for key, each in statistics.items() if each.places}

    def add(self, found: Found) -> None:
        if isinstance(found, Summed):
            self._count(found)
            return
        form = _form(found)
        if form != self._form:
            self._sum_up()
        self._form = form
        self._kept.append(found)
        self._entries += _entries(found)
        if self._entries >= _KEPT:
            self._sum_up()

    def _sum_up(self) -> None:
        if self._kept:
            *samples, each = zip(*self._kept, strict=True)
            self._kept, self._entries = [], 0
            outputs, targets, rows = map(torch.cat, samples)
            self._count(self._summed(outputs, targets, rows, each[0]))

    def _count(self, found: Summed) -> None:
        for key, rows in found.each.items():
            self._each[key].append(rows)
        for key, sums in found.sums.items():
            if key in self._totals:
                self._totals[key] += sums
            else:
                self._pairs[key].append(sums)

    def sums(self, samples: int) -> SumsByKey:
        """All sums in the form that travels; NaN if an output was NaN, so that nobody takes the result for valid.
        ``samples`` is the size of the split. Raises `ConfigError` if the batches do not fit the metrics.
        """
        self._sum_up()
        found = {key: sums.tolist() for key, sums in self._totals.items()}
        pairs = {key: _pairs(_gathered(parts, 3, samples)).tolist() for key, parts in self._pairs.items()}
        return {key: tuple(sums) for key, sums in {**found, **pairs}.items()}

    def judged(self, sums: SumsByKey, samples: int) -> JudgedSamples:
        """Per-sample results of statistics that have them for all samples; call `sums` first."""
        labels, cells = {}, {}
        for key, parts in self._each.items():
            if sum(map(len, parts)) == samples:
                table = _gathered(parts, 1 + self._statistics[key].places, samples).long().numpy()
                labels[key], cells[key] = table[:, 0], table[:, 1:]
        return JudgedSamples(self._metrics, {key: np.array(each) for key, each in sums.items()}, labels, cells)


def _gathered(parts: list[Tensor], columns: int, samples: int) -> Tensor:
    """Rows of all samples, [samples, columns], ordered by sample number."""
    table = torch.zeros(samples, columns, dtype=torch.float64)
    for part in parts:
        rows = part.cpu().double()
        place = rows[:, 0]
        table[place.nan_to_num().long()] = rows[:, 1:]
    return table


def _pairs(samples: Tensor) -> Tensor:
    table = torch.zeros(1 + BLOCKS, 4, dtype=torch.float64)
    if samples.isnan().any():
        return torch.full((table.numel(),), torch.nan, dtype=torch.float64)
    for start in range(0, len(samples), _PAIRED):
        _add_pairs(table, samples[start : start + _PAIRED], start)
    return table.flatten()


def _add_pairs(table: Tensor, samples: Tensor, first: int) -> None:
    risk, time, event = samples.unbind(1)
    group = (torch.arange(len(samples)) + first) % BLOCKS
    member = (torch.arange(BLOCKS)[:, None] == group).double()
    table[0, 0] += len(samples)
    table[1:, 0] += member.sum(dim=1)
    for start in range(0, len(samples), _AT_A_TIME):
        mine = slice(start, start + _AT_A_TIME)
        sooner = (time[mine, None] < time) | ((time[mine, None] == time) & (event == 0))
        comparable = sooner & (event[mine, None] != 0)
        kinds = (comparable, comparable & (risk[mine, None] > risk), comparable & (risk[mine, None] == risk))
        for column, kind in enumerate(kinds, 1):
            pairs = kind.double()
            # A pair counts for the groups of both samples, but only once within the same group.
            rows, columns = member[:, mine] @ pairs.sum(dim=1), member @ pairs.sum(dim=0)
            same = (member[:, mine] @ pairs * member).sum(dim=1)
            table[0, column] += pairs.sum()
            table[1:, column] += rows + columns - same
