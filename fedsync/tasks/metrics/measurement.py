"""Sums of one evaluation, batch by batch; its memory is that of the sums, and of four numbers a sample for pairs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from fedsync.core.metrics.base import AnyMetric, Statistic, statistics_of
from fedsync.core.metrics.classes import ClassCounts
from fedsync.core.metrics.concordance import PairCounts
from fedsync.core.metrics.gain import JudgedSamples
from fedsync.core.metrics.moments import BLOCKS
from fedsync.core.metrics.scores import ScoreCounts
from fedsync.tasks.metrics.statistics import cells_of, measure_of

SumsByKey = dict[str, tuple[float, ...]]

Found = dict[str, Tensor]
"""What one batch adds, by key of the statistic."""

_PAIRED = 8192
"""Samples, one after the other, among which pairs are formed: of more, the time would grow with their square."""

_AT_A_TIME = 512


class _Together(Protocol):
    """Those that evaluate one silo together; see `fedsync.train.rank.Rank`."""

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

    def of(self, outputs: Tensor, targets: Tensor, rows: Tensor) -> Found:
        """What a batch adds; remembers nothing, so that a batch may be worked off again.

        Args:
            outputs: of the model for the batch.
            targets: what is true.
            rows: numbers of the samples in their split, int64 [n].
        """
        if not self:
            return {}
        broken = outputs.isnan().any()
        found = {key: measure(outputs, targets, rows) for key, measure in self._measures.items()}
        return {key: torch.where(broken, torch.nan, sums) for key, sums in found.items()}

    def each(self, outputs: Tensor, targets: Tensor, rows: Tensor) -> Found:
        """Number, true label and entries of the sums of each sample, [n, 2 + k], by key; see `of`.

        Of statistics that count samples of classes, where each sample has one label.
        """
        found: Found = {}
        for key, statistic in self._statistics.items() if targets.numel() == len(targets) else ():
            if isinstance(statistic, ClassCounts | ScoreCounts):
                labels, cells = cells_of(statistic, outputs, targets)
                found[key] = torch.cat([rows[:, None], labels[:, None], cells], dim=1)
        return found

    def begin(self) -> Measured:
        """What an evaluation finds; nothing so far."""
        return Measured(self._metrics, self._statistics, self._device)


class Measured:
    """What one evaluation finds; see `Measuring.begin`."""

    def __init__(self, metrics: Sequence[AnyMetric], statistics: Mapping[str, Statistic], device: torch.device) -> None:
        self._metrics = metrics
        self._totals = {
            key: torch.zeros(each.size, dtype=torch.float64, device=device)
            for key, each in statistics.items()
            if not isinstance(each, PairCounts)
        }
        self._pairs: dict[str, list[Tensor]] = {key: [] for key in statistics if key not in self._totals}
        self._statistics = statistics
        self._each: dict[str, list[Tensor]] = {key: [] for key, each in statistics.items() if each.places}

    def add(self, found: Found, each: Found | None = None) -> None:
        """Count a batch in; ``each`` as `Measuring.each` finds it."""
        for key, rows in (each or {}).items():
            self._each[key].append(rows)
        for key, sums in found.items():
            if key in self._totals:
                self._totals[key] += sums
            else:
                self._pairs[key].append(sums)

    def sums(self, samples: int, together: _Together | None = None) -> SumsByKey:
        """All that was found, as it travels. NaN where an output was none, so that nobody takes it for a result.

        Args:
            samples: of the split.
            together: processes of which each has a part of the batches.
        """
        found = {key: sums.tolist() for key, sums in self._totals.items()}
        if together is not None:
            found = {key: together.total(sums) for key, sums in found.items()}
        pairs = {key: _pairs(_gathered(parts, 3, samples, together)).tolist() for key, parts in self._pairs.items()}
        return {key: tuple(sums) for key, sums in {**found, **pairs}.items()}

    def judged(self, sums: SumsByKey, samples: int, together: _Together | None = None) -> JudgedSamples:
        """What was found sample by sample, where all samples were given with `Measuring.each`; see `sums`."""
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
