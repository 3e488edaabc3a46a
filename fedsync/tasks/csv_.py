"""Tables: one CSV file a silo, for organisations that hold records of the same kind."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from fedsync.core.errors import ConfigError
from fedsync.core.metrics.base import AnyMetric
from fedsync.core.metrics.named import classification
from fedsync.core.survey.findings import ColumnScale
from fedsync.core.survey.sums import Columns
from fedsync.tasks.features import encode, is_text, numbers_of, width
from fedsync.tasks.protocol import SiloData, SiloSlot, Task
from fedsync.tasks.readers.tabular import MISSING, Table, check_column, number, read_header, read_table
from fedsync.tasks.samples import check_shares, held_out, stratified


@dataclass(frozen=True, slots=True)
class _Rows:
    """One silo's file, read: which columns are learned from, which of them are text, and the rows of each split."""

    table: Table
    columns: tuple[str, ...]
    text: frozenset[str]
    labels: NDArray[np.int64]
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    validation: NDArray[np.int64] | None


class CsvTask(Task):
    """Classify the rows of a table.

    A column is text if it is named in ``text`` or has a cell that is neither missing nor a finite
    number; else it is numeric. A number becomes one feature, imputed with the median and standardised
    with the mean and deviation of the silo's own training rows, or with ``scales`` that all silos share, where a
    missing cell is the mean. A text becomes 8, one-hot by the hash of the cell, so that silos need no common
    vocabulary. Missing cells are empty, ``?``, ``NA`` or ``nan``.

    Training rows are those of neither the test nor the validation split.

    A silo reads its own file and, where they are on the same machine, the first file (for the columns'
    types) and the first line of the others (to compare headers).

    Args:
        files: one a silo, in the order of silos.
        target: column to predict.
        positive_above: if given, there are two classes and a target above this number is class 1;
            if not, targets are the integers ``0 .. classes - 1``.
        model: ``logistic`` regression, or an ``mlp`` with one hidden layer.
        hidden: width of the hidden layer.
        test_share: share of each class that goes into the silo's own test split, between 0 and 1.
        validation: share of the other rows that the silo validates on; see `held_out`.
        ignore: columns to leave out.
        classes: number of classes.
        text: columns to treat as text though some silo's cells all look like numbers.
        scales: what each numeric column is standardised by; None for the silo's own.

    Raises:
        ConfigError: here, an option is out of range; in `model` and `data`, something is wrong in a
            file, which the message names, with its line or column.
    """

    def __init__(
        self,
        files: tuple[str, ...],
        target: str,
        positive_above: float | None = None,
        model: Literal["logistic", "mlp"] = "logistic",
        hidden: int = 16,
        test_share: float = 0.25,
        validation: float | None = None,
        ignore: tuple[str, ...] = (),
        classes: int = 2,
        text: tuple[str, ...] = (),
        scales: Mapping[str, ColumnScale] | None = None,
    ) -> None:
        if not files:
            raise ConfigError("task.files", "no files are given", "Name one a silo")
        if model not in ("logistic", "mlp"):
            raise ConfigError("task.model", f"{model!r} is unknown", "Write logistic or mlp")
        if hidden < 1:
            raise ConfigError("task.hidden", f"{hidden} is below 1", "Write 1 or more")
        check_shares(test_share, validation)
        if classes < 2 or (positive_above is not None and classes != 2):
            raise ConfigError("task.classes", f"{classes} classes", "Write 2 or more, with positive_above exactly 2")
        self._files = tuple(files)
        self._target = target
        self._positive_above = positive_above
        self._model = model
        self._hidden = hidden
        self._test_share = test_share
        self._validation = validation
        self._ignore = frozenset(ignore)
        self._classes = classes
        self._text = frozenset(text)
        self._scales = scales

    def model(self) -> nn.Module:
        """One linear layer, or two with a ReLU between. Wants at least one of the files."""
        first = self._first_file()
        table = read_table(first)
        for file in self._files:
            if file != first and Path(file).exists():
                _check_header(file, read_header(file), first, table.columns)
        columns = self._features(table)
        inputs = width(columns, self._text_columns(table, columns))
        if self._model == "logistic":
            return nn.Linear(inputs, self._classes)
        return nn.Sequential(nn.Linear(inputs, self._hidden), nn.ReLU(), nn.Linear(self._hidden, self._classes))

    def metrics(self) -> tuple[AnyMetric, ...]:
        return classification(self._classes)

    def data(self, slot: SiloSlot) -> SiloData:
        """Features float32 [n, width] and labels int64 [n] of the file ``files[slot.index]``."""
        rows = self._rows(slot)
        if self._scales is not None:
            for name in rows.columns:
                if name not in rows.text and name not in self._scales:
                    problem = f"{rows.table.file} has a column of numbers {name!r}, and there is no scale for it"
                    raise ConfigError("task.standardise", problem, "Give all silos the same columns")
        features = encode(rows.table, rows.columns, rows.text, rows.train, self._scales)
        validation = None if rows.validation is None else _select(features, rows.labels, rows.validation)
        train, test = (_select(features, rows.labels, split) for split in (rows.train, rows.test))
        return SiloData(train, test, validation)

    def columns(self, slot: SiloSlot) -> Columns:
        """Cells of the training rows; of others nothing is told."""
        rows = self._rows(slot)
        table, train = rows.table, rows.train
        numbers = {name: numbers_of(table.column(name))[train] for name in rows.columns if name not in rows.text}
        texts = {}
        for name in rows.columns:
            if name in rows.text:
                cells = table.column(name)
                texts[name] = sum(cells[row] not in MISSING for row in train)
        classes = np.bincount(rows.labels[train], minlength=self._classes).tolist()
        return Columns(table.file, classes, numbers, texts, rows.columns)

    def _rows(self, slot: SiloSlot) -> _Rows:
        if slot.count != len(self._files):
            raise ConfigError(
                "task.files", f"{len(self._files)} files for {slot.count} silos", "Name exactly one file a silo"
            )
        table = read_table(self._files[slot.index])
        columns = self._features(table)
        text = self._text_columns(table, columns)
        self._check_like_first(table, columns, text)
        labels = np.array([self._label(table, row) for row in range(len(table.rows))], dtype=np.int64)
        rest, test = stratified(labels, self._test_share, slot.seed, slot.name)
        train, validation = held_out(labels[rest], self._validation, slot)
        held = None if validation is None else rest[validation]
        return _Rows(table, columns, text, labels, rest[train], test, held)

    def _first_file(self) -> str:
        """The first file that is on this machine; if none is, the first, for the reader to complain about."""
        return next((file for file in self._files if Path(file).exists()), self._files[0])

    def _features(self, table: Table) -> tuple[str, ...]:
        """The columns that are not the target and not ignored, in the file's order."""
        check_column("task.target", self._target, table.columns, table.file)
        for name in sorted(self._ignore):
            check_column("task.ignore", name, table.columns, table.file)
        for name in sorted(self._text):
            check_column("task.text", name, table.columns, table.file)
        columns = tuple(name for name in table.columns if name != self._target and name not in self._ignore)
        if not columns:
            raise ConfigError("task.ignore", f"{table.file} has no column left to learn from", "Ignore fewer")
        return columns

    def _text_columns(self, table: Table, columns: Sequence[str]) -> frozenset[str]:
        return frozenset(name for name in columns if name in self._text or is_text(table.column(name)))

    def _check_like_first(self, table: Table, columns: tuple[str, ...], text: frozenset[str]) -> None:
        """Silos whose columns differ would build models of different shapes: say so before they do."""
        first = self._first_file()
        if first == table.file:
            return
        other = read_table(first)
        _check_header(table.file, table.columns, first, other.columns)
        for name in sorted(text ^ self._text_columns(other, columns)):
            kinds = ("text", "numbers") if name in text else ("numbers", "text")
            raise ConfigError(
                f"{table.file}, column {table.columns.index(name) + 1}",
                f"the column holds {kinds[0]} here and {kinds[1]} in {first}",
                "Mend the file, or add the column to task.text",
            )

    def _label(self, table: Table, row: int) -> int:
        cell = table.rows[row][table.columns.index(self._target)]
        value = number(cell)
        place = f"{table.file}, line {table.lines[row]}, column {self._target!r}"
        if value is None:
            raise ConfigError(place, "the target is not a number", "Mend or remove the row")
        if self._positive_above is not None:
            return int(value > self._positive_above)
        if value not in range(self._classes):
            raise ConfigError(
                place,
                f"the target is not one of the classes 0 to {self._classes - 1}",
                "Mend the row, raise task.classes, or set task.positive_above",
            )
        return int(value)


def _check_header(file: str, columns: Sequence[str], first: str, expected: Sequence[str]) -> None:
    for place, (name, wanted) in enumerate(zip_longest(columns, expected), start=1):
        if name != wanted:
            how = "missing" if name is None else "one too many" if wanted is None else "called otherwise"
            remedy = "Give all silos the same columns in the same order"
            raise ConfigError(f"{file}, line 1", f"column {place} is {how} beside {first}", remedy)


def _select(features: NDArray[np.float32], labels: NDArray[np.int64], rows: NDArray[np.int64]) -> TensorDataset:
    return TensorDataset(torch.from_numpy(features[rows]), torch.from_numpy(labels[rows]))
