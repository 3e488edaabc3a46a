"""Classification of tables: one CSV file per silo, for organisations that hold records of the same kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.evaluation.metrics.metric_types import AnyMetric
from fedsync.evaluation.metrics.named import classification
from fedsync.evaluation.survey.findings import ColumnScale
from fedsync.evaluation.survey.table_sums import Columns
from fedsync.model.table_columns import PLAIN, ColumnForm, ColumnRule, TableForm, described, difference, digest_of
from fedsync.tasks.features import Column, encode, read_column
from fedsync.tasks.readers.tabular import Table, check_column, read_table
from fedsync.tasks.row_split import by_number, held_out, stratified
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task

logger = foreign.logger(__name__)


@dataclass(frozen=True, slots=True)
class TableRows:
    """Contents of one silo's file: feature columns, labels and the rows of each split."""

    table: Table
    columns: tuple[Column, ...]
    form: TableForm
    labels: NDArray[np.int64]
    train: NDArray[np.int64]
    test: NDArray[np.int64]
    validation: NDArray[np.int64] | None


class CsvTask(Task):
    """Classifier of the rows of a table.

    Columns are matched by name, so files may have them in any order. ``columns`` sets the kind of a column; without an
    entry the cells decide between number and text. Features by kind:

    - number: one feature. Gaps get the median; scaling uses mean and deviation of the silo's own training rows. With
      ``scales``, shared by all silos, gaps get the mean instead.
    - category: one feature per declared category.
    - text: 8 features, one-hot by the hash of the cell, so that silos need no common vocabulary.

    `fedsync.model.table_columns` defines gaps. Training rows are the rows in neither the test nor the validation split.
    Without ``positive_above``, targets are the integers ``0 .. classes - 1``, or the declared categories. Arguments not
    listed here are keys of the task in a strategy file.

    Args:
        scales: scaling of each numeric column; None for the silo's own.
        columns: the run's rules for columns, by name.
        everywhere: whether ``files`` has a single name, under which each silo has its own file.
        by_row: read each row independently of the others, for private runs. A column without a rule is a number. An
            invalid cell is a gap, and an invalid target is class 0. The number of a row decides its split. So no cell
            decides the kind of a column, the split of another row, or whether the table is usable.

    Raises `ConfigError` if an option is out of range, a file has an error (`data` names line or column), or `model` is
    called before a file was read.
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
        columns: Mapping[str, ColumnRule] | None = None,
        everywhere: bool = False,
        by_row: bool = False,
    ) -> None:
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
        self._scales = scales
        self._rules = {**dict.fromkeys(text, ColumnRule("text")), **(columns or {})}
        self._declared = {"task.text": text, "task.columns": tuple(columns or ())}
        self._everywhere = everywhere
        self._by_row = by_row
        named = self._rules.get(target, PLAIN).categories
        if named and (positive_above is not None or len(named) != classes):
            problem = f"the target has {len(named)} categories, and classes is {classes}"
            raise ConfigError("task.columns", problem, "Write as many classes, and no positive_above")
        self._read: tuple[SiloSlot, TableForm, int] | None = None
        self.inferred: Mapping[ColumnForm, int] = {}
        """Columns of the last table without a rule in the run, with their number of gaps."""

    def model(self) -> nn.Module:
        if self._read is None:
            problem = "each silo reads its own table alone, and no table was read here"
            raise ConfigError("task.files", problem, "Ask a silo for the model")
        inputs = self._read[2]
        if self._model == "logistic":
            return nn.Linear(inputs, self._outputs())
        return nn.Sequential(nn.Linear(inputs, self._hidden), nn.ReLU(), nn.Linear(self._hidden, self._outputs()))

    def metrics(self) -> tuple[AnyMetric, ...]:
        return classification(self._classes)

    def data(self, slot: SiloSlot) -> SiloData:
        """Features, float32 [n, width], and labels, int64 [n], of the silo's file."""
        rows = self._trained(slot)
        if self._scales is not None:
            for name in [one.name for one in rows.columns if one.kind == "number" and one.name not in self._scales]:
                problem = f"{rows.table.file} has a column of numbers {name!r}, and there is no scale for it"
                remedy = f"Write standardise: {{{name}: [mean, deviation]}}, or ignore: [{name}]; for words write "
                remedy += f"columns: {{{name}: {{kind: text}}}}; under standardise: federated give all silos the same "
                raise ConfigError("task.standardise", problem, remedy + "columns")
        features = encode(rows.table, rows.columns, rows.train, self._scales, by_row=self._by_row)
        targets = self._targets(rows)
        validation = None if rows.validation is None else _select(features, targets, rows.validation)
        train, test = (_select(features, targets, split) for split in (rows.train, rows.test))
        return SiloData(train, test, validation)

    def persons(self, slot: SiloSlot, column: str) -> NDArray[np.int64]:
        """Number of the person of each training row, by the cells of ``column``.

        A gap, by the column's rule, is a person of its own. One person for all gaps would have rows of several people,
        and each of them could change its clipped gradient by twice the clip.
        """
        rows = self._rows(slot)
        check_column("privacy.person_column", column, rows.table.columns, rows.table.file)
        if column in [one.name for one in rows.columns]:
            problem = f"{column!r} names persons, and the run trains on it"
            raise ConfigError("task.ignore", problem, f"Write ignore: [{column}]")
        cells = rows.table.cells[column].to_numpy()[rows.train].astype(str)
        rule = self._rules.get(column, PLAIN)
        named = np.array([f"\0{row}" if rule.is_gap(cell) else cell for row, cell in enumerate(cells)])
        return np.unique(named, return_inverse=True)[1].astype(np.int64)

    def table(self, slot: SiloSlot) -> TableForm:
        return self._read[1] if self._read is not None and self._read[0] == slot else self._rows(slot).form

    def columns(self, slot: SiloSlot) -> Columns:
        rows = self._trained(slot)
        train = rows.train
        numbers = {one.name: one.values[train] for one in rows.columns if one.kind == "number"}
        texts = {one.name: int((~np.isnan(one.values[train])).sum()) for one in rows.columns if one.kind != "number"}
        classes = np.bincount(rows.labels[train], minlength=self._classes).tolist()
        return Columns(rows.table.file, classes, numbers, texts, [one.name for one in rows.columns])

    def _trained(self, slot: SiloSlot) -> TableRows:
        rows = self._rows(slot)
        if not len(rows.train):
            problem = f"silo {slot.name!r} holds no training rows in {rows.table.file}"
            raise ConfigError("task", problem, "Give it data, lower task.test_share, or leave it out")
        return rows

    def _outputs(self) -> int:
        return self._classes

    def _targets(self, rows: TableRows) -> NDArray[np.int64] | NDArray[np.float32]:
        return rows.labels

    def _forms(self, table: Table) -> TableForm:
        """Columns besides target and features, which silos must have alike."""
        return ()

    def _rows(self, slot: SiloSlot) -> TableRows:
        if not self._everywhere and slot.count != len(self._files):
            problem = f"{len(self._files)} files for {slot.count} silos"
            raise ConfigError("task.files", problem, "Name exactly one file per silo")
        table = read_table(self._files[0 if self._everywhere else slot.index])
        columns = tuple(
            read_column(table, name, self._rules.get(name, PLAIN), named=name in self._rules, by_row=self._by_row)
            for name in self._features(table)
        )
        labels = self._labels(table)
        target = ColumnForm.of(self._target, f"target of {self._classes} classes", self._rules.get(self._target, PLAIN))
        form = tuple(sorted([target, *self._forms(table), *(one.form for one in columns)], key=lambda one: one.name))
        inferred = {one.form: one.gaps for one in columns if one.name not in self._rules}
        if self._read is None and inferred:
            logger.info("%s: %s", slot.name, described(inferred))
        self.inferred = inferred
        self._read = slot, form, sum(one.width for one in columns)
        if self._by_row:
            return TableRows(
                table, columns, form, labels, *by_number(len(labels), self._test_share, self._validation, slot)
            )
        rest, test = stratified(labels, self._test_share, slot.seed, slot.name)
        train, validation = held_out(labels[rest], self._validation if len(rest) else None, slot)
        held = None if validation is None else rest[validation]
        return TableRows(table, columns, form, labels, rest[train], test, held)

    def _features(self, table: Table) -> list[str]:
        for place, names in {"task.target": (self._target,), **self._declared}.items():
            for name in names:
                check_column(place, name, table.columns, table.file)
        columns = sorted(name for name in table.columns if name != self._target and name not in self._ignore)
        for name in sorted(self._ignore.difference(table.columns)):
            # A silo may lack an ignored column. But of a misspelt name, training would use the column that it means.
            if get_close_matches(name, columns, cutoff=0.75):
                check_column("task.ignore", name, table.columns, table.file)
            elif self._read is None:
                logger.info("%s has no column %r, which task.ignore names", table.file, name)
        if not columns:
            raise ConfigError("task.ignore", f"{table.file} has no column left to learn from", "Ignore fewer")
        return columns

    def _labels(self, table: Table) -> NDArray[np.int64]:
        rule = self._rules.get(self._target, PLAIN)
        cells = table.cells[self._target]
        labels = cells.map({cell: self._label(rule, cell) for cell in cells.unique()})
        if self._by_row:
            labels = labels.fillna(0)
        if (wrong := np.flatnonzero(labels.isna())).size:
            row = int(wrong[0])
            raise ConfigError(table.place(self._target, row, named=True), *self._complaint(rule, cells.iloc[row]))
        classes: NDArray[np.int64] = labels.to_numpy(dtype=np.int64)
        return classes

    def _label(self, rule: ColumnRule, cell: str) -> int | None:
        if rule.categories:
            return rule.categories.index(cell) if cell in rule.categories else None
        value = None if rule.is_gap(cell) else rule.number(cell)
        if value is None or self._positive_above is not None:
            return None if value is None else int(value > (self._positive_above or 0))
        return int(value) if value in range(self._classes) else None

    def _complaint(self, rule: ColumnRule, cell: str) -> tuple[str, str]:
        if rule.is_gap(cell) and cell not in rule.categories:
            return "the target is not a number: it is missing", "Correct or remove the row"
        if rule.categories:
            return "the target is none of its categories", "Correct or remove the row, or add it to task.columns"
        if rule.number(cell) is None:
            named = f"task.columns: {{{self._target}: {{categories: [...]}}}}"
            remedy = f"Correct or remove the row; or name the classes in their order, in quotes: {named}"
            return "the target is not a number but a text", remedy
        problem = f"the target is not one of the classes 0 to {self._classes - 1}"
        return problem, "Correct the row, raise task.classes, or set task.positive_above"


def look_at(make: Callable[[], CsvTask], silos: Sequence[str], seed: int) -> list[str]:
    """Describe the inferred column kinds of emulated silos in one line for people; `ConfigError`, with silo and column,
    if a table is unreadable or its columns differ from the first silo's.
    """
    first: TableForm = ()
    gaps: Counter[str] = Counter()
    for index, name in enumerate(silos):
        task = make()
        try:
            form = task.table(SiloSlot(name, index, len(silos), seed))
        except ConfigError as error:
            raise ConfigError(f"silo {name!r}, {error.place}", error.problem, error.remedy) from error
        if first and digest_of(form) != digest_of(first):
            remedy = "Give all silos the same columns, or say in task.columns what they hold"
            raise ConfigError(f"silo {name!r}", difference(form, first, silos[0]), remedy)
        first = first or form
        gaps.update({one.name: count for one, count in task.inferred.items()})
    return [described({one: gaps[one.name] for one in first if one.name in gaps})] if gaps else []


def _select(
    features: NDArray[np.float32], targets: NDArray[np.int64] | NDArray[np.float32], rows: NDArray[np.int64]
) -> TensorDataset:
    return TensorDataset(torch.from_numpy(features[rows]), torch.from_numpy(targets[rows]))
