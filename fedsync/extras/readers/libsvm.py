"""Reader of libsvm's text format: one sample per line, ``label column:value column:value ...``."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedsync.common.errors import ConfigError, not_installed
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.extras.readers.samples import DataShape, Pairs, Samples, Source
from fedsync.policies.schema import Count, PositiveInt, register
from fedsync.tasks.readers.user_files import check_cells, check_classes, check_finite, reading


@register("libsvm")
@dataclass(frozen=True, slots=True)
class LibsvmSource(Source):
    """A file in the format of libsvm.

    Columns count from 1 and ascend within a row. Classes are numbered from 0; two classes may also be -1 and 1, which
    become 0 and 1. Text after ``#`` is a comment.
    """

    file: str
    """File with the training samples."""

    features: PositiveInt
    """Number of columns; all silos must use the same number, whatever their own rows need."""

    classes: Count = 2
    """Number of classes; 0 for numeric targets."""

    test_file: str | None = None
    """File with the test samples; left out, the task holds out a share of the training samples."""

    def shape(self) -> DataShape:
        return DataShape((self.features,), self.classes, sparse=True)

    def read(self) -> tuple[Samples, Samples | None]:
        return self._samples(self.file), None if self.test_file is None else self._samples(self.test_file)

    def _samples(self, file: str) -> Samples:
        try:
            from sklearn.datasets import load_svmlight_file
        except ImportError as error:
            raise not_installed("task.data.kind", "scikit-learn, which reads the format of libsvm,", "sim") from error
        try:
            with reading(file), open_data(file) as stream:
                rows, targets = load_svmlight_file(stream, n_features=self.features, zero_based=False)
        except (ValueError, OverflowError) as error:
            problem = f"not in the format of libsvm with {self.features} columns"
            raise ConfigError(file, problem, "Correct the file, or task.data.features") from error
        if not len(targets):
            raise ConfigError(file, "the file has no samples", "Give the silo data, or leave it out")
        lengths = np.diff(rows.indptr)
        shape = (len(targets), max(1, int(lengths.max())))
        check_cells(file, shape[0] * shape[1])
        pairs = Pairs(np.zeros(shape, dtype=np.int64), np.zeros(shape, dtype=np.float32), self.features)
        filled = np.arange(shape[1]) < lengths[:, None]
        with np.errstate(over="ignore", invalid="ignore"):  # values that do not fit are reported just below
            pairs.columns[filled], pairs.values[filled] = rows.indices, rows.data
            numbers, labels = targets.astype(np.float32), targets.astype(np.int64)
        check_finite(file, np.column_stack([numbers, pairs.values]))
        if not self.classes:
            return Samples(pairs, numbers)
        if self.classes == 2:
            labels[targets == -1] = 0
            targets[targets == -1] = 0
        check_classes(file, np.where(labels == targets, labels, -1), self.classes)
        return Samples(pairs, labels)
