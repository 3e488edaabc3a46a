"""What no hospital may do, for comparison: all patients' records in one place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset

from fedsync import SiloData, SiloSlot
from fedsync.evaluation.survey.findings import ColumnScale
from fedsync.model.table_columns import TableForm
from fedsync.tasks.csv_ import CsvTask

HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


class PooledTask(CsvTask):
    """Has the training rows of all hospitals, so none of their test patients is among them."""

    def __init__(self, files: Sequence[str], **options: Any) -> None:
        super().__init__(tuple(str(Path(__file__).parent / file) for file in files), **options)

    def data(self, slot: SiloSlot) -> SiloData:
        slots = [SiloSlot(name, index, len(HOSPITALS), slot.seed) for index, name in enumerate(HOSPITALS)]
        tables = [self.columns(each).numbers for each in slots]
        self._scales = {name: scale(np.concatenate([table[name] for table in tables])) for name in tables[0]}
        parts = [super(PooledTask, self).data(each) for each in slots]
        splits = zip(*((part.train, part.test, part.validation) for part in parts), strict=True)
        return SiloData(*map(joined, splits))

    def table(self, slot: SiloSlot) -> TableForm:
        """Of the first hospital: all have the same columns."""
        return super().table(SiloSlot(HOSPITALS[0], 0, len(HOSPITALS), slot.seed))


def scale(cells: NDArray[np.float64]) -> ColumnScale:
    """As hospitals find it out together, missing cells left out."""
    return ColumnScale(float(np.nanmean(cells)), float(np.nanstd(cells)))


def joined(parts: Sequence[TensorDataset]) -> TensorDataset:
    return TensorDataset(*(torch.cat(tensors) for tensors in zip(*(part.tensors for part in parts), strict=True)))
