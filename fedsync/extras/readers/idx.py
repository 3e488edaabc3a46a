"""Reader of IDX files: MNIST, Fashion-MNIST, EMNIST and similar data sets, plain or .gz."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.samples import DataShape, Samples, Source
from fedsync.policies.schema import Count, Several, register
from fedsync.tasks.readers.user_files import check_cells, check_classes, find, optional, read_at_most

_UNSIGNED_BYTE = 0x08


@register("idx")
@dataclass(frozen=True, slots=True)
class IdxSource(Source):
    """MNIST, Fashion-MNIST or EMNIST: a folder with IDX files, plain or .gz, under their usual names.

    Grey images are uint8 [n, 1, height, width]. Names contain ``train-images`` and ``train-labels``. Optional test
    files contain ``t10k-images`` or ``test-images``, and the matching labels.
    """

    folder: str
    """Folder with the IDX files."""

    classes: Several = 10
    """Number of classes."""

    first_class: Count = 0
    """Label of the first class in the files; 1 for EMNIST's letters."""

    def shape(self) -> DataShape:
        return DataShape(_image_shape(find(self.folder, "*train-images*")), self.classes)

    def read(self) -> tuple[Samples, Samples | None]:
        known = find(self.folder, "*train-images*")
        train = self._pair(known, find(self.folder, "*train-labels*"))
        images = optional(self.folder, "*t10k-images*", "*test-images*")
        if images is None:
            return train, None
        if (found := _image_shape(images)) != (wanted := _image_shape(known)):
            problem = f"the shape of an image is {found}, those of {known.name} have {wanted}"
            raise ConfigError(str(images), problem, "Take both from one data set")
        return train, self._pair(images, find(self.folder, "*t10k-labels*", "*test-labels*"))

    def _pair(self, images: Path, labels: Path) -> Samples:
        pixels, classes = read_idx(images, 3), read_idx(labels, 1).astype(np.int64) - self.first_class
        if len(pixels) != len(classes):
            problem = f"{len(classes)} labels for the {len(pixels)} images of {images.name}"
            raise ConfigError(str(labels), problem, "Copy both again")
        check_classes(labels, classes, self.classes)
        return Samples(pixels[:, None], classes)


def read_idx(path: Path, axes: int) -> NDArray[np.uint8]:
    """Read an array of bytes with ``axes`` axes.

    Raises `ConfigError` if the file is not IDX, has other content, or its length differs from the header.
    """
    start = 4 + 4 * axes
    shape = _header(path, read_at_most(path, start), axes)
    content = read_at_most(path, start + prod(shape) + 1)
    if len(content) != start + prod(shape):
        found = "more" if len(content) > start + prod(shape) else "fewer"
        raise ConfigError(str(path), f"there are {found} bytes than the header promises", "Copy it again")
    return np.frombuffer(content, dtype=np.uint8, offset=start).reshape(shape)


def _image_shape(path: Path) -> tuple[int, ...]:
    """Shape (1, height, width) of one image, from the header."""
    return (1, *_header(path, read_at_most(path, 16), 3)[1:])


def _header(path: Path, head: bytes, axes: int) -> tuple[int, ...]:
    """Shape of the array, from the first bytes of a file."""
    if len(head) < 4 + 4 * axes or head[:2] != b"\0\0":
        raise ConfigError(f"{path}, byte 0", "this is not an IDX file", "Name one, unpacked or as .gz")
    if head[2] != _UNSIGNED_BYTE or head[3] != axes:
        problem = f"the file does not have the expected type, 0x08 (bytes) with {axes} axes"
        raise ConfigError(f"{path}, byte 2", problem, "Check that images and labels are not exchanged")
    shape = tuple(int(size) for size in np.frombuffer(head, dtype=">u4", count=axes, offset=4))
    if 0 in shape:
        raise ConfigError(f"{path}, byte 4", "the header describes an empty array", "Copy the file again")
    check_cells(f"{path}, byte 4", prod(shape))
    return shape
