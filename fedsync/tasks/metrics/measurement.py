"""Sums of one evaluation, batch by batch.

Small batches are put together before they are summed: of a few hundred samples, the calls take longer than the work.
So the memory is that of the sums, of `_KEPT` outputs and their targets, and of a few numbers a sample for pairs, and
where each sample is wanted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedsync.evaluation.metrics.classes import ClassCounts
from fedsync.evaluation.metrics.concordance import PairCounts
from fedsync.evaluation.metrics.gain import JudgedSamples
from fedsync.evaluation.metrics.metric_types import AnyMetric, Statistic, statistics_of
from fedsync.evaluation.metrics.moments import BLOCKS
from fedsync.evaluation.metrics.score_histograms import ScoreCounts
from fedsync.tasks.metrics.batch_statistics import cells_of, measure_of

SumsByKey = dict[str, tuple[float, ...]]

Samples = tuple[Tensor, Tensor, Tensor, bool]
"""Outputs, targets and numbers of the samples of a batch, and whether each sample is wanted; see `Measuring.of`."""

_KEPT = 2**16
"""Outputs that are summed together. A batch with more is summed by itself."""

_PAIRED = 8192
"""Samples, one after the other, among which pairs are formed: of more, the time would grow with their square."""

_AT_A_TIME = 512


@dataclass(frozen=True, slots=True)
class Summed:
    """What samples add, by key of the statistic.

    Args:
        sums: [size] each; of pairs, one row a sample.
        each: number, true label and entries of the sums of each sample, [n, 2 + k], where that is wanted.
    """

    sums: Mapping[str, Tensor]
    each: Mapping[str, Tensor] = field(default_factory=dict)


Found = Summed | Samples
"""What one batch adds, summed or yet to be summed."""


def _entries(samples: Samples) -> int:
    return max(samples[0].numel(), samples[1].numel())


def _form(samples: Samples) -> tuple[object, ...]:
    """What batches must have in common to be put together."""
    outputs, targets, _, each = samples
    return outputs.dtype, outputs.shape[1:], targets.dtype, targets.shape[1:], each


class _Together(Protocol):
    """Those that evaluate one silo together; see `fedsync.train.processes.rank.Rank`."""

    @property
    def size(self) -> int: ...

    def total(self, values: Iterable[float]) -> list[float]: ...


class Measuring:
    """Measures what metrics want, on one device.

    Args:
        metrics: what is wanted.
        device: of the model.

    Raises:
        ConfigError: one cannot be measured.
    """

    def __init__(self, metrics: Sequence[AnyMetric], device: torch.device) -> None:
        self._metrics = metrics
        self._statistics = statistics_of(metrics)
        self._measures = {metric.statistic.key: measure_of(metric) for metric in metrics}
        self._device = device

    def __bool__(self) -> bool:
        return bool(self._measures)

    def of(self, outputs: Tensor, targets: Tensor, rows: Tensor, each: bool = False) -> Found:
        """What a batch adds; remembers nothing, so that a batch may be worked off again.

        Args:
            outputs: of the model for the batch.
            targets: what is true.
            rows: numbers of the samples in their split, int64 [n].
            each: whether what is found of each sample is kept, too; see `Measured.judged`.
        """
        if not self:
            return Summed({})
        # What a user's own metric measures may be of other kinds.
        tensors = all(isinstance(part, Tensor) and part.shape[:1] == rows.shape for part in (outputs, targets))
        if not tensors or _entries((outputs, targets, rows, each)) >= _KEPT:
            return self.summed(outputs, targets, rows, each)
        # Whoever gave them may write the next batch into them.
        return outputs.clone(), targets.clone(), rows, each

    def summed(self, outputs: Tensor, targets: Tensor, rows: Tensor, each: bool) -> Summed:
        """What samples add; see `of`."""
        broken = outputs.isnan().any()
        found = {key: measure(outputs, targets, rows) for key, measure in self._measures.items()}
        sums = {key: torch.where(broken, torch.nan, sums) for key, sums in found.items()}
        return Summed(sums, self._each(outputs, targets, rows) if each else {})

    def _each(self, outputs: Tensor, targets: Tensor, rows: Tensor) -> dict[str, Tensor]:
        """Of statistics that count samples of classes, where each sample has one label."""
        found: dict[str, Tensor] = {}
        for key, statistic in self._statistics.items() if targets.numel() == len(targets) else ():
            if isinstance(statistic, ClassCounts | ScoreCounts):
                labels, cells = cells_of(statistic, outputs, targets)
                found[key] = torch.cat([rows[:, None], labels[:, None], cells], dim=1)
        return found

    def begin(self) -> Measured:
        """What an evaluation finds; nothing so far."""
        return Measured(self._metrics, self._statistics, self._device, self.summed)


class Measured:
    """What one evaluation finds; see `Measuring.begin`."""

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
        """Count a batch in."""
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
        """Sum what is kept, all at once."""
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
        """All that was found, as it travels. NaN where an output was none, so that nobody takes it for a result.

        Args:
            samples: of the split.
            together: processes of which each has a part of the batches.

        Raises:
            ConfigError: what was counted in does not fit the metrics.
        """
        self._sum_up()
        found = {key: sums.tolist() for key, sums in self._totals.items()}
        if together is not None:
            found = {key: together.total(sums) for key, sums in found.items()}
        pairs = {key: _pairs(_gathered(parts, 3, samples, together)).tolist() for key, parts in self._pairs.items()}
        return {key: tuple(sums) for key, sums in {**found, **pairs}.items()}

    def judged(self, sums: SumsByKey, samples: int, together: _Together | None = None) -> JudgedSamples:
        """What was found sample by sample, where it was kept of all; see `sums`, which comes first."""
        labels, cells = {}, {}
        for key, parts in self._each.items():
            count = float(sum(map(len, parts)))
            if (count if together is None else together.total([count])[0]) == samples:
                table = _gathered(parts, 1 + self._statistics[key].places, samples, together).long().numpy()
                labels[key], cells[key] = table[:, 0], table[:, 1:]
        return JudgedSamples(self._metrics, {key: np.array(each) for key, each in sums.items()}, labels, cells)


def _gathered(parts: list[Tensor], columns: int, samples: int, together: _Together | None) -> Tensor:
    """Rows of all samples, [samples, columns], whichever process has them; each is there after its sample's number."""
    table = torch.zeros(samples, columns, dtype=torch.float64)
    for part in parts:
        rows = part.cpu().double()
        place = rows[:, 0]
        table[place.nan_to_num().long()] = rows[:, 1:]
    if together is None:
        return table
    return torch.tensor(together.total(table.flatten().tolist()), dtype=torch.float64).reshape(samples, columns)


def _pairs(samples: Tensor) -> Tensor:
    """Sums of `PairCounts`, float64 [size]."""
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
            # A pair counts for the groups of both of its samples, once where they are the same.
            rows, columns = member[:, mine] @ pairs.sum(dim=1), member @ pairs.sum(dim=0)
            same = (member[:, mine] @ pairs * member).sum(dim=1)
            table[0, column] += pairs.sum()
            table[1:, column] += rows + columns - same
