"""Reader of CIFAR-10 and CIFAR-100 in the Python version: pickles, read without running their code."""

from __future__ import annotations

import io
import pickle
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.samples import DataShape, Samples, Source
from fedsync.policies.schema import register
from fedsync.tasks.readers.user_files import check_classes, find, optional, read_at_most

_PIXELS = 3 * 32 * 32
_MAX_BYTES = 1 << 29


@register("cifar")
@dataclass(frozen=True, slots=True)
class CifarSource(Source):
    """CIFAR-10 or CIFAR-100: a folder with the files of the Python version.

    Colour images are uint8 [n, 3, 32, 32]. CIFAR-10 files are ``data_batch_1`` to ``data_batch_5`` and ``test_batch``;
    CIFAR-100 files are ``train`` and ``test``, with fine labels. At least one training file must exist; other files may
    be missing.
    """

    folder: str
    """Folder with the files."""

    classes: Literal[10, 100] = 10
    """Number of classes: 10 for CIFAR-10, 100 for CIFAR-100."""

    def shape(self) -> DataShape:
        return DataShape((3, 32, 32), self.classes)

    def read(self) -> tuple[Samples, Samples | None]:
        if self.classes == 100:
            batches, test = [find(self.folder, "train")], optional(self.folder, "test")
        else:
            first = find(self.folder, *(f"data_batch_{number}" for number in range(1, 6)))
            batches, test = sorted(first.parent.glob("data_batch_[1-5]")), optional(self.folder, "test_batch")
        parts = [self._batch(path) for path in batches]
        train = Samples(
            np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])
        )
        return train, None if test is None else Samples(*self._batch(test))

    def _batch(self, path: Path) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
        content = read_pickle(path)
        key = b"fine_labels" if self.classes == 100 else b"labels"
        fields = content if isinstance(content, dict) else {}
        data, labels = fields.get(b"data", fields.get("data")), fields.get(key, fields.get(key.decode()))
        if not isinstance(data, RawArray) or not isinstance(labels, list):
            problem = f"no array `data` and list `{key.decode()}` in the file"
            raise ConfigError(str(path), problem, "Use the Python version of the data set, and fix task.data.classes")
        if not all(type(label) is int and 0 <= label < self.classes for label in labels):
            check_classes(path, np.array([_number(label) for label in labels], dtype=np.int64), self.classes)
        images = data.bytes_of(path)
        if images.shape != (len(labels), _PIXELS):
            problem = f"the images are {images.shape}, expected {(len(labels), _PIXELS)}"
            raise ConfigError(str(path), problem, "Copy the file again")
        return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _number(label: object) -> int:
    """Return a valid label, or -1."""
    return label if type(label) is int and 0 <= label < 2**31 else -1


class RawArray:
    """Array in a pickle as raw shape, type and bytes; NumPy gets it only after checks."""

    def __init__(self, *_: object) -> None:
        self.state: tuple[Any, ...] = ()

    def __setstate__(self, state: object) -> None:
        self.state = state if isinstance(state, tuple) else ()

    def bytes_of(self, path: Path) -> NDArray[np.uint8]:
        """Return the array; raises `ConfigError` if it is not of unsigned bytes, or shape and bytes do not match."""
        match self.state:
            case (int(), tuple(shape), RawType(code="u1"), bool(column_major), bytes(raw)) if all(
                type(size) is int and size >= 0 for size in shape
            ):
                if prod(shape) == len(raw):
                    return np.frombuffer(raw, dtype=np.uint8).reshape(shape, order="F" if column_major else "C")
        raise ConfigError(str(path), "the array `data` is not one of whole bytes", "Copy the file again")


class RawType:
    """Type of an array in a pickle: its code, for example ``u1``."""

    def __init__(self, code: object = None, *_: object) -> None:
        self.code = code

    def __setstate__(self, state: object) -> None:
        """Ignore byte order and flags, which have no meaning for bytes."""


def _encode(text: object, encoding: object = "latin1") -> bytes:
    """Decode bytes in the way Python 3 writes them for Python 2."""
    if not isinstance(text, str) or encoding != "latin1":
        raise pickle.UnpicklingError("only text in latin1 becomes bytes")
    return text.encode("latin1")


_ARRAY_MODULES = ("numpy.core.multiarray", "numpy._core.multiarray")
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): RawArray,
    ("numpy", "dtype"): RawType,
    ("_codecs", "encode"): _encode,
    **{(module, "_reconstruct"): RawArray for module in _ARRAY_MODULES},
}


# The unpickler in Python: in the C version, a few bytes of input can allocate gigabytes.
class _Unpickler(pickle._Unpickler):
    """Unpickler for bytes, text, numbers, lists, dicts and byte arrays; it runs no code of the file."""

    def find_class(self, module: str, name: str, /) -> Any:
        """Return a stand-in for the names that arrays need; all other names are an error."""
        try:
            return _ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError("the file contains an object that is no array") from None


def read_pickle(path: Path) -> object:
    """Read a pickle, with `RawArray` in place of arrays; runs no code of the file.

    Raises `ConfigError` for a damaged file, over 512 MiB, or with more than arrays of bytes.
    """
    content = read_at_most(path, _MAX_BYTES + 1)
    if len(content) > _MAX_BYTES:
        raise ConfigError(str(path), "the file is larger than 512 MiB", "Name a batch of CIFAR")
    try:
        return _Unpickler(io.BytesIO(content), encoding="bytes").load()
    except Exception as error:
        # A damaged pickle can raise any exception.
        raise ConfigError(str(path), "not a data set in a pickle", "Copy the file again") from error
