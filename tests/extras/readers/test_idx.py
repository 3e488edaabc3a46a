import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.idx import IdxSource
from tests.extras.readers.damage import survives


def idx(array: np.ndarray) -> bytes:
    """As Yann LeCun's page describes it: 0, 0, type, axes, sizes and values, big-endian."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


IMAGES = np.arange(5 * 4 * 6).reshape(5, 4, 6) % 256
LABELS = np.array([3, 1, 0, 9, 2])


def fill(folder: Path, *, packed: bool = False, test: bool = True) -> None:
    for part in ("train", "t10k") if test else ("train",):
        for name, array in ((f"{part}-images-idx3-ubyte", IMAGES), (f"{part}-labels-idx1-ubyte", LABELS)):
            content = gzip.compress(idx(array)) if packed else idx(array)
            (folder / (f"{name}.gz" if packed else name)).write_bytes(content)


@pytest.mark.parametrize("packed", [False, True])
def test_images_and_labels_are_read(tmp_path: Path, packed: bool) -> None:
    fill(tmp_path, packed=packed)
    source = IdxSource(str(tmp_path))
    train, test = source.read()
    assert source.shape().inputs == (1, 4, 6)
    assert train.inputs.dtype == np.uint8
    np.testing.assert_array_equal(train.inputs[:, 0], IMAGES)
    np.testing.assert_array_equal(train.targets, LABELS)
    assert test is not None
    np.testing.assert_array_equal(test.targets, LABELS)
    assert float(train.dense().max()) == pytest.approx(119 / 255)


def test_test_files_may_be_missing_and_classes_may_begin_at_one(tmp_path: Path) -> None:
    fill(tmp_path, test=False)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx(LABELS + 1))
    train, test = IdxSource(str(tmp_path), first_class=1).read()
    assert test is None
    np.testing.assert_array_equal(train.targets, LABELS)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("images-idx3-ubyte", b"", r"byte 0: this is not an IDX file"),
        ("images-idx3-ubyte", idx(LABELS), r"byte 0: this is not an IDX|byte 2: the file holds .* 1 axes"),
        ("images-idx3-ubyte", idx(IMAGES)[:-1], r"there are fewer bytes than the header promises"),
        ("images-idx3-ubyte", idx(IMAGES) + b"x", r"there are more bytes than the header promises"),
        ("images-idx3-ubyte", struct.pack(">BBBB3I", 0, 0, 8, 3, 2**31, 2**31, 2**31), r"byte 4: the header promises"),
        ("images-idx3-ubyte", struct.pack(">BBBB3I", 0, 0, 8, 3, 0, 4, 6), r"byte 4: .*empty array"),
        ("images-idx3-ubyte", struct.pack(">BBBB3I", 0, 0, 13, 3, 5, 4, 6), r"byte 2: .*0x08 \(bytes\) with 3 axes"),
        ("labels-idx1-ubyte", idx(LABELS[:4]), r"4 labels for the 5 images"),
        ("labels-idx1-ubyte", idx(np.array([0, 1, 10, 2, 3])), r"sample 3: the label is not one of the classes 0 to 9"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    fill(tmp_path)
    (tmp_path / f"train-{name}").write_bytes(content)
    with pytest.raises(ConfigError, match=rf"train-{name}.*{message}|train-{name}, {message}"):
        IdxSource(str(tmp_path)).read()


def test_test_images_of_another_size_are_named(tmp_path: Path) -> None:
    fill(tmp_path)
    (tmp_path / "t10k-images-idx3-ubyte").write_bytes(idx(IMAGES[:, :3]))
    with pytest.raises(ConfigError, match=r"t10k-images.*: the shape of an image is \(1, 3, 6\), .* \(1, 4, 6\)"):
        IdxSource(str(tmp_path)).read()


def test_folders_and_files_that_are_missing_or_twice_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no such folder.*task\.data\.folder"):
        IdxSource(str(tmp_path / "no")).read()
    with pytest.raises(ConfigError, match=r"no file matches \*train-images\*"):
        IdxSource(str(tmp_path)).shape()
    fill(tmp_path)
    fill(tmp_path, packed=True)
    with pytest.raises(ConfigError, match=r"2 files match \*train-images\*"):
        IdxSource(str(tmp_path)).read()


def test_a_packed_file_that_unpacks_to_more_than_its_header_says_is_not_unpacked_whole(tmp_path: Path) -> None:
    fill(tmp_path, packed=True)
    bomb = gzip.compress(idx(IMAGES) + bytes(5_000_000))
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(bomb)
    with pytest.raises(ConfigError, match="there are more"):
        IdxSource(str(tmp_path)).read()


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["train-images-idx3-ubyte", "train-labels-idx1-ubyte"])
def test_damaged_files_are_complained_of(tmp_path: Path, packed: bool, name: str) -> None:
    fill(tmp_path, packed=packed)
    assert survives(tmp_path / (f"{name}.gz" if packed else name), IdxSource(str(tmp_path)).read) > 30
