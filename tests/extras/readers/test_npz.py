import io
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib import format as npy

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.npz import NpzSource, RatingsNpz
from tests.extras.readers.damage import survives

INPUTS = np.arange(24, dtype=np.float64).reshape(4, 2, 3)


def write(folder: Path, **arrays: Any) -> str:
    np.savez(folder / "a.npz", **arrays)
    return str(folder / "a.npz")


def test_inputs_targets_and_owners_are_read(tmp_path: Path) -> None:
    train = {"inputs": np.asfortranarray(INPUTS), "targets": np.array([0, 1, 2, 2], dtype=np.int16)}
    file = write(tmp_path, **train, owners=[5, 5, 6, 6], test_inputs=INPUTS[:1], test_targets=[1])
    source = NpzSource(file, classes=3)
    train, test = source.read()
    assert source.shape().inputs == (2, 3)
    assert train.inputs.dtype == np.float32
    np.testing.assert_array_equal(train.inputs, INPUTS)
    np.testing.assert_array_equal(train.targets, [0, 1, 2, 2])
    np.testing.assert_array_equal(train.owners, [5, 5, 6, 6])
    assert test is not None
    np.testing.assert_array_equal(test.targets, [1])


def test_bytes_stay_bytes_and_targets_may_be_numbers(tmp_path: Path) -> None:
    file = write(tmp_path, inputs=INPUTS.astype(np.uint8), targets=[0.5, 1, 2, 3])
    train, _ = NpzSource(file, classes=0).read()
    assert (train.inputs.dtype, train.targets.dtype) == (np.uint8, np.float32)


def test_what_is_missing_is_a_mistake_unless_it_is_asked_for(tmp_path: Path) -> None:
    file = write(tmp_path, inputs=[[1.0, np.nan], [2.0, 3.0]], targets=[0, 0])
    train, _ = RatingsNpz(file).read()
    np.testing.assert_array_equal(train.inputs, np.array([[1, np.nan], [2, 3]], dtype=np.float32))
    with pytest.raises(ConfigError, match="sample 1: a value is missing"):
        NpzSource(file).read()
    with pytest.raises(ConfigError, match="sample 2: a value is missing or not finite"):
        RatingsNpz(write(tmp_path, inputs=[[1.0], [np.inf]], targets=[0, 0])).read()


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"inputs": INPUTS}, r"a\.npz, targets: there is no such array; the file holds 1"),
        ({"inputs": INPUTS, "targets": [1]}, r"targets: 1 rows, the inputs have 4"),
        ({"inputs": INPUTS, "targets": np.zeros((4, 1))}, r"targets: the shape is \(4, 1\)"),
        ({"inputs": INPUTS, "targets": [0.0] * 4}, r"targets: classes are float64"),
        ({"inputs": INPUTS, "targets": [0, 1, 2, 10]}, r"sample 4: the label is not one of the classes 0 to 9"),
        ({"inputs": np.array(["a"]), "targets": [1]}, r"inputs: the array is not one of numbers"),
        ({"inputs": np.array([None]), "targets": [1]}, r"inputs: the array is not one of numbers"),
        ({"inputs": np.float32(1), "targets": [1]}, r"inputs: the array is empty"),
        ({"inputs": INPUTS[:0], "targets": []}, r"inputs: the array is empty"),
        ({"inputs": [1.0, 2.0], "targets": [0, 1]}, r"a\.npz, inputs: the shape is \(2,\).*\. Save one row a sample"),
        (
            {"inputs": INPUTS, "targets": [0] * 4, "test_inputs": [1.0], "test_targets": [0]},
            r"a\.npz, test_inputs: the shape is \(1,\)",
        ),
        (
            {"inputs": INPUTS, "targets": [0] * 4, "test_inputs": INPUTS[:, :1], "test_targets": [0] * 4},
            r"test_inputs: the shape of a sample is \(1, 3\), the inputs have \(2, 3\)",
        ),
        (
            {"inputs": INPUTS, "targets": [0] * 4, "test_inputs": INPUTS[:, 0], "test_targets": [0] * 4},
            r"test_inputs: the shape of a sample is \(3,\), the inputs have \(2, 3\)",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        NpzSource(write(tmp_path, **arrays)).read()


def test_inputs_without_features_are_refused_before_a_model_is_made(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"inputs: the shape is \(3,\)"):
        NpzSource(write(tmp_path, inputs=[1.0, 2.0, 3.0], targets=[0, 1, 1])).shape()


@pytest.mark.parametrize("shape", [(2**30,), (2**62, 2), (10**9, 10**9)])
def test_a_header_is_not_believed(tmp_path: Path, shape: tuple[int, ...]) -> None:
    content = io.BytesIO()
    npy.write_array_header_1_0(content, {"descr": "<f8", "fortran_order": False, "shape": shape})
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as archive:
        archive.writestr("inputs.npy", content.getvalue() + bytes(80))
    with pytest.raises(ConfigError, match=r"inputs: the header promises"):
        NpzSource(str(tmp_path / "a.npz")).read()


def test_missing_and_damaged_files_are_complained_of(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.npz: cannot read the file"):
        NpzSource(str(tmp_path / "no.npz")).read()
    (tmp_path / "text.npz").write_text("x")
    with pytest.raises(ConfigError, match=r"text\.npz: not a file of np\.savez"):
        NpzSource(str(tmp_path / "text.npz")).read()
    file = write(tmp_path, inputs=INPUTS, targets=[0, 1, 2, 3])
    assert survives(Path(file), NpzSource(file).read, trials=120) > 60
