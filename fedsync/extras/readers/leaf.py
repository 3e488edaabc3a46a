"""Reader of FEMNIST in LEAF's format: JSON files of users, each with images and classes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from annotated_types import Ge
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.common.sandbox.path_sandbox import open_data
from fedsync.extras.readers.samples import DataShape, Samples, Source
from fedsync.policies.schema import Several, register
from fedsync.tasks.readers.user_files import check_cells, check_classes, check_finite, reading


@register("femnist")
@dataclass(frozen=True, slots=True)
class LeafSource(Source):
    """FEMNIST in the format of LEAF: a folder of JSON files, or of folders ``train`` and ``test``.

    Images are float32 [n, 1, side, side], and users are owners. Reads all ``*.json`` files of LEAF's output folder
    ``train``, and of ``test`` if present. Without ``train``, it reads all files of ``folder`` itself. Users are
    numbered in the order of their names.
    """

    folder: str
    """Folder that LEAF's scripts have filled."""

    classes: Several = 62
    """Number of classes."""

    side: Annotated[int, Ge(4)] = 28
    """Width and height of an image [pixels]."""

    def shape(self) -> DataShape:
        return DataShape((1, self.side, self.side), self.classes)

    def read(self) -> tuple[Samples, Samples | None]:
        root = Path(self.folder)
        apart = (root / "train").is_dir()
        train = self._folder(root / "train" if apart else root)
        return train, self._folder(root / "test") if apart and (root / "test").is_dir() else None

    def _folder(self, folder: Path) -> Samples:
        files = sorted(folder.glob("*.json"))
        if not files:
            raise ConfigError(str(folder), "no file matches *.json", "Correct task.data.folder")
        users: dict[str, list[tuple[NDArray[np.float32], NDArray[np.int64]]]] = {}
        for path in files:
            for place, (name, fields) in enumerate(_users(path).items(), start=1):
                users.setdefault(name, []).append(self._user(f"{path}, user {place}", fields))
        images, labels, owners = [], [], []
        for number, name in enumerate(sorted(users)):
            for pixels, classes in users[name]:
                images.append(pixels)
                labels.append(classes)
                owners.append(np.full(len(classes), number, dtype=np.int64))
        shape = (-1, 1, self.side, self.side)
        return Samples(np.concatenate(images).reshape(shape), np.concatenate(labels), np.concatenate(owners))

    def _user(self, place: str, fields: object) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        x, y = (fields.get("x"), fields.get("y")) if isinstance(fields, Mapping) else (None, None)
        if not isinstance(x, list) or not isinstance(y, list) or len(x) != len(y) or not x:
            raise ConfigError(place, "lists `x` and `y` of one length are wanted", "Write the file again with LEAF")
        if not all(isinstance(image, list) and len(image) == self.side**2 for image in x):
            problem = f"an image is not a list of {self.side**2} numbers"
            raise ConfigError(place, problem, "Correct the file, or task.data.side")
        check_cells(place, len(x) * self.side**2)
        try:
            with np.errstate(over="ignore"):
                images = np.array(x, dtype=np.float32)
        except (ValueError, TypeError, OverflowError) as error:
            raise ConfigError(place, "an image has a value that is not a number", "Correct it") from error
        if images.ndim != 2:
            raise ConfigError(place, "an image has a value that is not a number", "Correct it")
        check_finite(place, images)
        if not all(type(label) is int and abs(label) < 2**31 for label in y):
            raise ConfigError(place, "a class is not a whole number", "Correct the file")
        labels = np.array(y, dtype=np.int64)
        check_classes(place, labels, self.classes)
        return images, labels


def _users(path: Path) -> Mapping[str, Any]:
    try:
        with reading(path), open_data(path) as stream:
            content = json.loads(stream.read())
    except (ValueError, RecursionError) as error:
        line = f", line {error.lineno}" if isinstance(error, json.JSONDecodeError) else ""
        raise ConfigError(f"{path}{line}", "not JSON", "Write the file again with LEAF") from error
    users = content.get("user_data") if isinstance(content, dict) else None
    if not isinstance(users, dict) or not users:
        raise ConfigError(f"{path}, user_data", "the list of users is empty", "Write the file again with LEAF")
    return users
