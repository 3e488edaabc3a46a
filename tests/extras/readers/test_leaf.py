import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.leaf import LeafSource
from tests.extras.readers.damage import survives


def image(value: float) -> list[float]:
    return [value] * 16


GOOD = {"f02": {"x": [image(0.25), image(0.5)], "y": [3, 61]}, "f01": {"x": [image(1.0)], "y": [0]}}


def write(folder: Path, users: Any, name: str = "all_data_0.json") -> LeafSource:
    folder.mkdir(exist_ok=True)
    content = {"users": list(users), "num_samples": [], "user_data": users}
    (folder / name).write_text(json.dumps(content), encoding="utf-8")
    return LeafSource(str(folder), side=4)


def test_users_become_owners_in_the_order_of_their_names(tmp_path: Path) -> None:
    source = write(tmp_path, GOOD)
    write(tmp_path, {"f01": {"x": [image(0.75)], "y": [1]}}, "all_data_1.json")
    train, test = source.read()
    assert (source.shape().inputs, source.shape().classes, test) == ((1, 4, 4), 62, None)
    np.testing.assert_array_equal(train.owners, [0, 0, 1, 1])
    np.testing.assert_array_equal(train.targets, [0, 1, 3, 61])
    np.testing.assert_array_equal(train.inputs[:, 0, 0, 0], np.array([1, 0.75, 0.25, 0.5], dtype=np.float32))


def test_folders_train_and_test_are_kept_apart(tmp_path: Path) -> None:
    write(tmp_path / "train", GOOD)
    write(tmp_path / "test", {"f09": GOOD["f01"]})
    train, test = LeafSource(str(tmp_path), side=4).read()
    assert len(train.targets) == 3
    assert test is not None
    assert len(test.targets) == 1


@pytest.mark.parametrize(
    ("user", "message"),
    [
        ([], "lists `x` and `y`"),
        ({"x": [image(1)], "y": []}, "lists `x` and `y` of one length"),
        ({"x": [], "y": []}, "lists `x` and `y`"),
        ({"x": [[1, 2]], "y": [1]}, "an image is not a list of 16 numbers"),
        ({"x": [["a"] * 16], "y": [1]}, "a value that is not a number"),
        ({"x": [[[1]] * 16], "y": [1]}, "a value that is not a number"),
        ({"x": [[None] * 16], "y": [1]}, "a value that is not a number|missing"),
        ({"x": [[1e99] * 16], "y": [1]}, "sample 1: a value is missing or not finite"),
        ({"x": [image(1)], "y": [62]}, "sample 1: the label is not"),
        ({"x": [image(1)], "y": [1.0]}, "a class is not a whole number"),
        ({"x": [image(1)], "y": [10**40]}, "a class is not a whole number"),
    ],
)
def test_what_is_wrong_with_a_user_is_named(tmp_path: Path, user: object, message: str) -> None:
    with pytest.raises(ConfigError, match=rf"all_data_0\.json, user 1.*({message})"):
        write(tmp_path, {"f7": user}).read()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("[1]", "the list of users is empty"),
        ('{"user_data": {}}', "the list of users is empty"),
    ],
)
def test_what_is_wrong_with_a_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.json").write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"a\.json.*{message}"):
        LeafSource(str(tmp_path), side=4).read()


def test_missing_and_damaged_files_are_complained_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no file matches \*\.json"):
        LeafSource(str(tmp_path / "no"), side=4).read()
    source = write(tmp_path, GOOD)
    assert survives(tmp_path / "all_data_0.json", source.read) > 30
