"""Cox proportional hazards on tables: the model gives the logarithm of a person's hazard relative to the average."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import shipped
from fedsync.extras.survival.survival_sums import SurvivalRows
from fedsync.model.table_columns import PLAIN, TableForm
from fedsync.tasks.csv_ import CsvTask, TableRows
from fedsync.tasks.features import Column, read_column
from fedsync.tasks.readers.tabular import Table, check_column
from fedsync.tasks.task_protocol import SiloSlot

_ROWS = 1024
"""Rows with events that are compared with all rows at once."""


class CoxTask(CsvTask):
    """Cox model of the rows of a table: the target says whether the event happened, 1, or the row is censored, 0.

    Args:
        time: column of the time of the event, or until which the person was followed; above 0.
        options: arguments of `CsvTask`.

    Raises:
        ConfigError: as in `CsvTask`; also if `data` finds a time that is missing or not above 0.
    """

    def __init__(self, time: str, **options: Any) -> None:
        super().__init__(**{**options, "ignore": (*options.get("ignore", ()), time)})
        self._time = time
        if self._classes != 2:
            raise ConfigError("task.classes", "with task.time, the target is an event", "Leave classes out")
        if time == self._target:
            raise ConfigError("task.time", "it is the target too", "Write the column of events as target")

    def metrics(self) -> tuple[AnyMetric, ...]:
        return (shipped("concordance"),)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Negative partial log-likelihood of the batch, over its rows."""
        inputs, targets = batch
        return partial_loss(model(inputs)[:, 0], targets[:, 0], targets[:, 1]) / len(targets)

    def assess(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Loss of all rows, and as number of correct predictions the rows times the share of concordant pairs."""
        risk, times, events = outputs[:, 0], targets[:, 0], targets[:, 1]
        right = pairs = risk.new_tensor(0.0, dtype=torch.float64)
        for rows in torch.split(torch.nonzero(events > 0)[:, 0], _ROWS):
            later = (times > times[rows, None]) | ((times == times[rows, None]) & (events <= 0))
            mine = risk[rows, None]
            right = right + (later & (mine > risk)).sum() + (later & (mine == risk)).sum() / 2
            pairs = pairs + later.sum()
        share = right / pairs if pairs > 0 else right + 0.5
        return partial_loss(risk, times, events), share * len(targets)

    def survivors(
        self, slot: SiloSlot, group: str | None, covariates: Sequence[tuple[str, int | None]]
    ) -> SurvivalRows:
        """All rows of the silo's file, for survival sums.

        Args:
            group: column of categories that are compared; None for one group.
            covariates: columns, each with the number of a category that is 1 while others are 0; None for numbers.
        """
        rows = self._rows(slot)
        columns = {column.name: column for column in rows.columns}
        for name in [*([] if group is None else [group]), *(name for name, _ in covariates)]:
            check_column("task.survival", name, list(columns), rows.table.file)
        found = [_covariate(columns[name], category) for name, category in covariates]
        groups = np.zeros(len(rows.labels)) if group is None else columns[group].values
        return SurvivalRows(
            self._times(rows.table).values,
            rows.labels == 1,
            np.where(np.isnan(groups), -1, groups).astype(np.int64),
            np.stack(found, axis=1) if found else np.zeros((len(rows.labels), 0)),
        )

    def _outputs(self) -> int:
        return 1

    def _targets(self, rows: TableRows) -> NDArray[np.float32]:
        """Time and event, float32 [n, 2]."""
        return np.stack([self._times(rows.table).values, rows.labels], axis=1).astype(np.float32)

    def _forms(self, table: Table) -> TableForm:
        return (self._times(table).form,)

    def _times(self, table: Table) -> Column:
        check_column("task.time", self._time, table.columns, table.file)
        column = read_column(table, self._time, self._rules.get(self._time, PLAIN), named=self._time in self._rules)
        if column.kind != "number" or not (column.values > 0).all():
            row = int(np.argmin(column.values > 0)) if column.kind == "number" else 0
            problem = "the time is missing, or not a number above 0"
            raise ConfigError(table.place(self._time, row, named=True), problem, "Correct or remove the row")
        return column


def _covariate(column: Column, category: int | None) -> NDArray[np.float64]:
    if category is not None:
        return np.where(np.isnan(column.values), np.nan, column.values == category)
    if column.kind != "number":
        remedy = "Write its categories in task.of.columns"
        raise ConfigError("task.survival.covariates", f"{column.name!r} holds words", remedy)
    return column.values


def partial_loss(risk: Tensor, times: Tensor, events: Tensor) -> Tensor:
    """Negative Cox partial log-likelihood, a scalar, with Efron's treatment of ties; 0 without events.

    With d events at a time, each lowers the sum over the persons at risk by a further 1/d of the sum over the events.

    Args:
        risk: logarithm of each row's hazard, [n].
        times: [n].
        events: 1 for an event, 0 if censored, [n].
    """
    risk = risk.double()  # hazards of one batch may differ by more than float32 can hold
    _, at = torch.unique(times, return_inverse=True)
    cells, happened = int(at.max()) + 1 if len(at) else 0, events > 0
    top = risk.detach().max() if len(risk) else risk.new_tensor(0.0)
    weight = torch.exp(risk - top)
    empty = risk.new_zeros(cells)
    leaving = empty.index_add(0, at, weight)
    died = empty.index_add(0, at[happened], weight[happened])
    at_risk = leaving.flip(0).cumsum(0).flip(0)
    order = torch.argsort(at[happened], stable=True)
    cell = at[happened][order]
    counts = torch.bincount(cell, minlength=cells)
    before = counts.cumsum(0) - counts
    tie = (torch.arange(len(cell), device=risk.device) - before[cell]) / counts[cell]
    return (torch.log(at_risk[cell] - tie * died[cell]) + top).sum() - risk[happened].sum()
