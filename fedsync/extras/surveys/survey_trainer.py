"""Trainer that adds a silo's column statistics to a vector; the vector of sums takes the place of the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch

from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.evaluation.survey.findings import edges_of
from fedsync.evaluation.survey.table_sums import Columns, SurveyForm, first_vector, read_sums, second_vector
from fedsync.model.layout import Layout, Vector
from fedsync.model.table_columns import TableForm
from fedsync.train.local_trainer import BeginPace, LocalTrainer, LoopResult
from fedsync.train.options import LocalOptions


class _Sheet:
    rounds = False
    ties: Mapping[str, str] = MappingProxyType({})

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.vector = np.zeros(layout.size, dtype=np.float32)

    def load(self, vector: Vector) -> None:
        self.layout.check(vector)
        self.vector = np.array(vector, dtype=np.float32)

    def read(self) -> Vector:
        return self.vector.copy()

    def state(self) -> Mapping[str, torch.Tensor]:
        return {name: torch.from_numpy(part.copy()) for name, part in self.layout.split(self.vector).items()}


class SheetTrainer(LocalTrainer):
    """Base of trainers that add a silo's sums to an empty model of sums; an order is one step."""

    def __init__(self, name: str, layout: Layout, options: LocalOptions, rows: int, table: TableForm | None) -> None:
        self._sheet, self._rows = _Sheet(layout), rows
        super().__init__(name, self._sheet, torch.device("cpu"), options)
        self.table = table

    @property
    def examples(self) -> int:
        return self._rows

    def initial_model(self) -> Vector:
        return np.zeros(self._sheet.layout.size, dtype=np.float32)

    def _begin(self, order: WorkOrder) -> None: ...

    def _train(self, order: WorkOrder, cursor: Cursor, begin: BeginPace) -> LoopResult:
        pace = begin()
        self._sheet.vector = self._sheet.vector + self._next(self._sheet.vector)
        pace.jump(order.max_steps)
        pace.finish()
        return LoopResult(pace, None, cursor)

    @abstractmethod
    def _next(self, sums: Vector) -> Vector:
        """Return what the silo adds to the sums of earlier rounds, float32 [layout.size]."""

    def _evaluate(self, split: Split) -> Evaluation:
        return Evaluation(0.0, 0.0, 0)


class SurveyTrainer(SheetTrainer):
    """Trainer that adds a silo's sums to an empty model: column sums in the first round, bin counts in the second.

    The model shows which round it is, so a repeated order gives the same update. The silo is at ``place`` among
    ``places``; histograms have ``bins`` bins, 0 for none.
    """

    def __init__(
        self,
        name: str,
        place: int,
        places: int,
        columns: Columns,
        options: LocalOptions,
        ranges: Mapping[str, Sequence[float]],
        bins: int,
        table: TableForm | None = None,
    ) -> None:
        kinds = tuple((column, column in columns.numbers) for column in columns.names)
        self._form = SurveyForm(places, len(columns.classes), kinds, bins)
        self._place, self._columns, self._ranges = place, columns, ranges
        super().__init__(name, self._form.layout, options, columns.rows, table)

    def _next(self, sums: Vector) -> Vector:
        form, read = self._form, read_sums(self._form, sums)
        if read is None:
            return first_vector(form, self._place, self._columns)
        if not form.bins or any(column.bins for column in read.numbers.values()):
            return self.initial_model()
        return second_vector(form, self._place, self._columns, edges_of(read, self._ranges, form.bins))
