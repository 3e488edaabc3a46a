"""Sums of one evaluation, collected batch by batch.

Small batches are joined before they are summed: for a few hundred samples, the calls take longer than the computation.
Memory is limited to the sums, `_KEPT` outputs with targets, and a few numbers per sample for pair metrics and
per-sample results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.gain import JudgedSamples
from fedsync.evaluation.metrics.metric_types import AnyMetric, Statistic, statistics_of
from fedsync.evaluation.metrics.moments import BLOCKS, PairCounts
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from fedsync.tasks.metrics.batch_statistics import cells_of, measure_of

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
    """Sums of a batch by statistic key.

    Args:
        sums: [size] each; for pair statistics, one row per sample.
        each: per-sample results, [n, 2 + k]: sample number, true label and entries of the sums.
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


class _Together(Protocol):
    """Processes that evaluate one silo together; see `fedsync.train.processes.rank.Rank`."""

    @property
    def size(self) -> int: ...

    def total(self, values: Iterable[float]) -> list[float]: ...


class Measuring:
    """Measurement of metrics on one device; raises `ConfigError` for a metric that cannot be measured."""

    def __init__(self, metrics: Sequence[AnyMetric], device: torch.device) -> None:
        self._metrics = metrics
        self._statistics = statistics_of(metrics)
        self._measures = {metric.statistic.key: measure_of(metric) for metric in metrics}
        self._device = device

    def __bool__(self) -> bool:
        return bool(self._measures)

    def of(self, outputs: Tensor, targets: Tensor, rows: Tensor, each: bool = False) -> Found:
        """Contribution of a batch; stateless, so that a batch may be repeated.

        ``rows``, int64 [n], are sample numbers within the split. With ``each``, per-sample results are kept; see
        `Measured.judged`.
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
        broken = outputs.isnan().any()
        found = {key: measure(outputs, targets, rows) for key, measure in self._measures.items()}
        sums = {key: torch.where(broken, torch.nan, sums) for key, sums in found.items()}
        return Summed(sums, self._each(outputs, targets, rows) if each else {})

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

    def sums(self, samples: int, together: _Together | None = None) -> SumsByKey:
        """All sums in the form that travels; NaN if an output was NaN, so that nobody takes the result for valid.

        ``samples`` is the size of the split; the processes ``together`` each evaluated a part of it. Raises
        `ConfigError` if the batches do not fit the metrics.
        """
        self._sum_up()
        found = {key: sums.tolist() for key, sums in self._totals.items()}
        if together is not None:
            found = {key: together.total(sums) for key, sums in found.items()}
        pairs = {key: _pairs(_gathered(parts, 3, samples, together)).tolist() for key, parts in self._pairs.items()}
        return {key: tuple(sums) for key, sums in {**found, **pairs}.items()}

    def judged(self, sums: SumsByKey, samples: int, together: _Together | None = None) -> JudgedSamples:
        """Per-sample results of statistics that have them for all samples; call `sums` first."""
        labels, cells = {}, {}
        for key, parts in self._each.items():
            count = float(sum(map(len, parts)))
            if (count if together is None else together.total([count])[0]) == samples:
                table = _gathered(parts, 1 + self._statistics[key].places, samples, together).long().numpy()
                labels[key], cells[key] = table[:, 0], table[:, 1:]
        return JudgedSamples(self._metrics, {key: np.array(each) for key, each in sums.items()}, labels, cells)


def _gathered(parts: list[Tensor], columns: int, samples: int, together: _Together | None) -> Tensor:
    """Rows of all samples from all processes, [samples, columns], ordered by sample number."""
    table = torch.zeros(samples, columns, dtype=torch.float64)
    for part in parts:
        rows = part.cpu().double()
        place = rows[:, 0]
        table[place.nan_to_num().long()] = rows[:, 1:]
    if together is None:
        return table
    return torch.tensor(together.total(table.flatten().tolist()), dtype=torch.float64).reshape(samples, columns)


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
