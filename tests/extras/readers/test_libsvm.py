from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.libsvm import LibsvmSource
from fedsync.extras.readers.samples import Pairs
from tests.extras.readers.damage import survives

GOOD = "# a set\n+1 1:0.5 3:-2\n\n-1 2:1e1 # the second\n-1\n"


def write(folder: Path, text: str) -> str:
    (folder / "a.txt").write_text(text, encoding="utf-8")
    return str(folder / "a.txt")


def test_rows_become_pairs_and_cells(tmp_path: Path) -> None:
    source = LibsvmSource(write(tmp_path, GOOD), features=4)
    train, test = source.read()
    assert test is None
    assert (source.shape().inputs, source.shape().sparse) == ((4,), True)
    np.testing.assert_array_equal(train.targets, [1, 0, 0])  # -1 and 1 become 0 and 1
    assert isinstance(train.inputs, Pairs)
    np.testing.assert_array_equal(train.inputs.columns, [[0, 2], [1, 0], [0, 0]])
    np.testing.assert_array_equal(train.dense().numpy(), [[0.5, 0, -2, 0], [0, 10, 0, 0], [0, 0, 0, 0]])


def test_targets_may_be_numbers_and_test_samples_a_file_of_their_own(tmp_path: Path) -> None:
    file = write(tmp_path, "-1.5 1:1\n2 1:2\n")
    train, test = LibsvmSource(file, features=1, classes=0, test_file=file).read()
    np.testing.assert_array_equal(train.targets, np.array([-1.5, 2], dtype=np.float32))
    assert test is not None
    assert len(test.targets) == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "1 1:1\nx 1:1\n",
            r"a\.txt: not in the format of libsvm with 4 columns\. Correct the file, or task\.data\.features",
        ),
        ("nan 1:1\n", "sample 1: a value is missing or not finite"),
        ("1 1:1\n2 1:1\n", r"sample 2: the label is not one of the classes 0 to 1\. .*task\.data\.classes"),
        ("0.5 1:1\n", "sample 1: the label is not one of the classes"),
        ("1e300 1:1\n", "sample 1: a value is missing or not finite"),
        ("1 1\n", "not in the format"),
        ("1 0:1\n", "not in the format"),
        ("1 5:1\n", "not in the format"),
        ("1 2:1 1:1\n", "not in the format"),
        (f"1 {'9' * 6000}:1\n", "not in the format"),
        ("1 5000000000:1\n", "not in the format"),
        ("1 ٣:1\n", "not in the format"),
        ("1 1:1\n1 1:inf\n", "sample 2: a value is missing or not finite"),
        ("1 1:1e39\n", "sample 1: a value is missing or not finite"),
        ("# nothing\n", r"a\.txt: the file has no samples"),
        (None, r"no\.txt: cannot read the file: No such file"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, text: str | None, message: str) -> None:
    file = str(tmp_path / "no.txt") if text is None else write(tmp_path, text)
    with pytest.raises(ConfigError, match=message):
        LibsvmSource(file, features=4).read()


def test_rows_that_are_too_many_to_be_written_out_are_not(tmp_path: Path) -> None:
    train, _ = LibsvmSource(write(tmp_path, GOOD), features=2**40).read()
    with pytest.raises(ConfigError, match=r"too many to be written out.*kind: linear"):
        train.dense()


def test_damaged_files_are_complained_of(tmp_path: Path) -> None:
    file = write(tmp_path, GOOD * 5)
    assert survives(Path(file), LibsvmSource(file, features=4).read) > 10
