"""The text format of libsvm: one sample a line, ``label column:value column:value ...``."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedsync.core.errors import ConfigError
from fedsync.tasks.readers.files import check_cells, reading
from fedsync.tasks.samples import DataShape, Pairs, Samples

_LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True, slots=True)
class LibsvmSource:
    """Sparse rows and targets.

    Columns count from 1. Classes may be written as they are, from 0 on; two of them also as -1 and 1, which
    become 0 and 1. What follows a ``#`` is a comment.

    Args:
        file: its name.
        features: number of columns; silos must agree on it, whatever their own rows need.
        classes: how many, or 0 if targets are numbers.
        test_file: of test samples, or None.
    """

    file: str
    features: int
    classes: int = 2
    test_file: str | None = None

    def shape(self) -> DataShape:
        return DataShape((self.features,), self.classes, sparse=True)

    def read(self) -> tuple[Samples, Samples | None]:
        return self._samples(self.file), None if self.test_file is None else self._samples(self.test_file)

    def _samples(self, file: str) -> Samples:
        targets: list[float] = []
        rows: list[tuple[list[int], list[float]]] = []
        for line, text in _lines(file):
            words = text.partition("#")[0].split()
            if words:
                targets.append(self._target(f"{file}, line {line}", words[0]))
                rows.append(self._row(f"{file}, line {line}", words[1:]))
        if not rows:
            raise ConfigError(file, "the file has no samples", "Give the silo data, or leave it out")
        longest = max(1, max(len(columns) for columns, _ in rows))
        check_cells(file, longest * len(rows))
        pairs = Pairs(
            np.zeros((len(rows), longest), dtype=np.int64),
            np.zeros((len(rows), longest), dtype=np.float32),
            self.features,
        )
        for index, (columns, values) in enumerate(rows):
            pairs.columns[index, : len(columns)] = columns
            pairs.values[index, : len(values)] = values
        if self.classes:
            return Samples(pairs, np.array(targets, dtype=np.int64))
        return Samples(pairs, np.array(targets, dtype=np.float32))

    def _target(self, place: str, word: str) -> float:
        value = _finite(place, word)
        if self.classes == 2 and value == -1:
            return 0
        if self.classes and value not in range(self.classes):
            problem = f"the target {word!r} is not one of the classes 0 to {self.classes - 1}"
            raise ConfigError(place, problem, "Mend the line, or task.data.classes")
        return value

    def _row(self, place: str, words: list[str]) -> tuple[list[int], list[float]]:
        columns, values = [], []
        for word in words:
            column, colon, value = word.partition(":")
            if not colon or not (column.isascii() and column.isdecimal()):
                raise ConfigError(place, f"{word[:40]!r} is not of the form column:value", "Mend the line")
            if len(column) > 15 or not 1 <= int(column) <= self.features:
                problem = f"column {column[:20]} is not one of 1 to {self.features}"
                raise ConfigError(place, problem, "Mend the line, or task.data.features")
            columns.append(int(column) - 1)
            values.append(_finite(place, value))
        return columns, values


def _lines(file: str) -> Iterator[tuple[int, str]]:
    try:
        with reading(file), Path(file).open(encoding="utf-8") as stream:
            yield from enumerate(stream, start=1)
    except UnicodeDecodeError as error:
        raise ConfigError(file, f"not a text in UTF-8: {error}", "Name a file in the format of libsvm") from error


def _finite(place: str, word: str) -> float:
    try:
        value = float(word)
    except ValueError:
        value = math.nan
    if not abs(value) <= _LARGEST:
        raise ConfigError(place, f"{word[:40]!r} is not a finite number", "Mend the line")
    return value
