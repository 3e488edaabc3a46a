"""Reader of NumPy archives: ``np.savez(file, inputs=..., targets=..., test_inputs=..., test_targets=...)``."""

from __future__ import annotations

import zipfile
import zlib
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
from numpy.lib import format as npy
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.extras.readers.samples import DataShape, Inputs, Samples, Source
from fedsync.policies.schema import Count, register
from fedsync.tasks.readers.user_files import check_cells, check_classes, check_finite, reading

_DAMAGE = (ValueError, LookupError, OSError, EOFError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)
_Header = tuple[tuple[int, ...], bool, np.dtype[np.generic]]


@register("npz")
@dataclass(frozen=True, slots=True)
class NpzSource(Source):
    """NumPy file with the arrays ``inputs`` and ``targets``.

    Inputs are uint8 (255 stands for 1) or numbers, which become float32; targets are classes or numbers. The file may
    also hold ``owners``, int64 [n], the owner of each sample. No code in the file is run.
    """

    missing: ClassVar[bool] = False
    """Whether NaN inputs are allowed as unknown values."""

    file: str
    """The ``.npz`` file."""

    classes: Count = 10
    """Number of classes; 0 for numeric targets."""

    def shape(self) -> DataShape:
        with _Archive(self.file) as archive:
            return DataShape(self._sample_shape(archive, ""), self.classes)

    def read(self) -> tuple[Samples, Samples | None]:
        with _Archive(self.file) as archive:
            shape = self._sample_shape(archive, "")
            if "test_inputs" not in archive.names:
                return self._samples(archive, ""), None
            found = self._sample_shape(archive, "test_")
            if found != shape:
                problem = f"the shape of a sample is {found}, the inputs have {shape}"
                raise ConfigError(f"{self.file}, test_inputs", problem, "Save both in one shape")
            return self._samples(archive, ""), self._samples(archive, "test_")

    def _sample_shape(self, archive: _Archive, prefix: str) -> tuple[int, ...]:
        """Shape of one sample, from the header of the inputs."""
        shape = archive.header(f"{prefix}inputs")[0]
        if len(shape) < 2:
            problem = f"the shape is {shape}, with no axis of features"
            raise ConfigError(f"{self.file}, {prefix}inputs", problem, "Save one row a sample: inputs.reshape(-1, 1)")
        return shape[1:]

    def _samples(self, archive: _Archive, prefix: str) -> Samples:
        inputs = self._inputs(archive.array(f"{prefix}inputs"))
        length = len(inputs)
        targets = archive.array(f"{prefix}targets", length)
        if targets.ndim != 1:
            raise ConfigError(f"{self.file}, {prefix}targets", f"the shape is {targets.shape}", "Save one target a row")
        if not self.classes:
            numbers = targets.astype(np.float32)
            check_finite(self.file, numbers)
            return Samples(inputs, numbers, self._owners(archive, prefix, length))
        if not np.issubdtype(targets.dtype, np.integer):
            problem = f"classes are {targets.dtype}"
            raise ConfigError(f"{self.file}, {prefix}targets", problem, "Save whole numbers, or write classes: 0")
        labels = targets.astype(np.int64)
        check_classes(self.file, labels, self.classes)
        return Samples(inputs, labels, self._owners(archive, prefix, length))

    def _inputs(self, array: NDArray[np.generic]) -> Inputs:
        if array.dtype == np.uint8:
            return array.astype(np.uint8, copy=False)
        numbers = array.astype(np.float32)
        known = np.where(np.isnan(numbers), np.float32(0), numbers) if self.missing else numbers
        check_finite(self.file, known)
        return numbers

    def _owners(self, archive: _Archive, prefix: str, length: int) -> NDArray[np.int64] | None:
        if f"{prefix}owners" not in archive.names:
            return None
        return archive.array(f"{prefix}owners", length).astype(np.int64)


class RatingsNpz(NpzSource):
    """NumPy file of ratings, with NaN where a rating is unknown."""

    missing = True


class _Archive:
    """Archive (.npz) whose arrays are checked against their headers before memory is allocated."""

    def __init__(self, file: str) -> None:
        self._file = file
        try:
            with reading(file):
                self._stream = open_data(file)
                self._zip = zipfile.ZipFile(self._stream)
        except (zipfile.BadZipFile, NotImplementedError, ValueError) as error:
            self._stream.close()
            raise ConfigError(file, "not a file of np.savez", "Save it again") from error
        self.names = {name.removesuffix(".npy") for name in self._zip.namelist()}

    def __enter__(self) -> _Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()
        self._stream.close()

    def header(self, name: str) -> _Header:
        """Shape, order and type of an array; raises `ConfigError` if it is invalid or has no row."""
        place = f"{self._file}, {name}"
        if name not in self.names:
            problem = f"there is no such array; the file holds {len(self.names)}"
            raise ConfigError(place, problem, "Save it under this name")
        try:
            with self._zip.open(f"{name}.npy") as stream:
                read = {(1, 0): npy.read_array_header_1_0, (2, 0): npy.read_array_header_2_0}
                version = npy.read_magic(stream)
                shape, column_major, kind = read[version](stream)
        except _DAMAGE as error:
            raise ConfigError(place, "not an array of NumPy", "Save the file again") from error
        if kind.kind not in "biuf":
            raise ConfigError(place, "the array is not one of numbers", "Save numbers")
        if min(shape, default=0) < 1:
            raise ConfigError(place, f"the array is empty: {shape}", "Save at least one row")
        check_cells(place, prod(shape))
        promised = prod(shape) * kind.itemsize
        if promised > self._zip.getinfo(f"{name}.npy").file_size:
            raise ConfigError(place, "the header promises more bytes than there are", "Save the file again")
        return shape, column_major, kind

    def array(self, name: str, length: int | None = None) -> NDArray[np.generic]:
        """Read a whole array; checks the number of rows if ``length`` is given."""
        place = f"{self._file}, {name}"
        shape, _, _ = self.header(name)
        if length is not None and shape[0] != length:
            raise ConfigError(place, f"{shape[0]} rows, the inputs have {length}", "Save as many of both")
        try:
            with self._zip.open(f"{name}.npy") as stream:
                array: NDArray[np.generic] = npy.read_array(stream, allow_pickle=False)
        except _DAMAGE as error:
            raise ConfigError(place, "the array is damaged", "Save the file again") from error
        return array
