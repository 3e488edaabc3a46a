import pickle
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.cifar import CifarSource
from tests.extras.readers.damage import survives

IMAGES = (np.arange(3 * 3072) % 251).astype(np.uint8).reshape(3, 3072)


def python2(images: np.ndarray, key: str, labels: list[int]) -> bytes:
    """As the data set's own files are: protocol 2 of Python 2, where text is bytes."""
    raw = images.tobytes().decode("latin1")
    text = pickle.dumps({"data": _Array(images.shape, raw), key: labels, "batch_label": "one"}, protocol=2)
    # Python 2's short strings in place of Python 3's text, for the keys.
    for word in (b"data", key.encode(), b"batch_label", b"one"):
        text = text.replace(b"X" + len(word).to_bytes(4, "little") + word, b"U" + len(word).to_bytes(1) + word)
    return text


class _Array:
    """Pickles as an array of Python 2 does: _reconstruct(ndarray, (0,), 'b'), then its state."""

    def __init__(self, shape: tuple[int, ...], raw: str) -> None:
        self.shape, self.raw = shape, raw

    def __reduce__(self) -> tuple[object, ...]:
        made = np.zeros(1, dtype=np.uint8).__reduce__()
        return (made[0], made[1], (1, self.shape, np.dtype("u1"), False, self.raw.encode("latin1")))


def fill(folder: Path) -> None:
    (folder / "data_batch_1").write_bytes(python2(IMAGES, "labels", [0, 1, 9]))
    (folder / "data_batch_2").write_bytes(pickle.dumps({b"data": IMAGES[:2], b"labels": [5, 6]}))
    (folder / "test_batch").write_bytes(python2(IMAGES[:1], "labels", [3]))


def test_batches_are_read_in_order(tmp_path: Path) -> None:
    fill(tmp_path)
    train, test = CifarSource(str(tmp_path)).read()
    assert test is not None
    np.testing.assert_array_equal(train.targets, [0, 1, 9, 5, 6])
    np.testing.assert_array_equal(train.inputs, np.concatenate([IMAGES, IMAGES[:2]]).reshape(-1, 3, 32, 32))
    np.testing.assert_array_equal(test.inputs, IMAGES[:1].reshape(-1, 3, 32, 32))
    assert CifarSource(str(tmp_path)).shape().inputs == (3, 32, 32)


def test_of_cifar_100_the_fine_labels_count(tmp_path: Path) -> None:
    content = {b"data": IMAGES, b"coarse_labels": [0, 0, 0], b"fine_labels": [99, 50, 0]}
    (tmp_path / "train").write_bytes(pickle.dumps(content))
    train, test = CifarSource(str(tmp_path), classes=100).read()
    np.testing.assert_array_equal(train.targets, [99, 50, 0])
    assert test is None


class _Evil:
    """Would write a file, if it were run."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_runs_nothing(tmp_path: Path) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps({b"data": IMAGES, b"labels": _Evil(tmp_path / "ran")}))
    with pytest.raises(ConfigError, match=r"data_batch_1: not a data set in a pickle"):
        CifarSource(str(tmp_path)).read()
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    "content",
    [
        b"cos\nsystem\n(S'true'\ntR.",
        b"cbuiltins\neval\n(S'1'\ntR.",
        # A memo of two thousand million places, and a text of as many bytes that are not there.
        b"\x80\x02Nr\xff\xff\xff\x7f.",
        b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7fxx.",
        b"\x80\x04\x95\xff\xff\xff\xff\xff\xff\xff\x7fN.",
        b"(" * 10_000 + b"t" * 10_000 + b".",
        b"cnumpy\nndarray\n((I1000000\nI1000000\nI1000000\nttR.",
        b"",
    ],
)
def test_hostile_pickles_are_complained_of(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "data_batch_1").write_bytes(content)
    with pytest.raises(ConfigError, match="data_batch_1"):
        CifarSource(str(tmp_path)).read()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([1, 2], "no array `data` and list `labels`"),
        ({b"data": [1], b"labels": [1]}, "no array `data`"),
        ({b"data": IMAGES}, "no array `data` and list"),
        ({b"data": IMAGES, b"labels": [1, 2]}, r"the images are \(3, 3072\), expected \(2, 3072\)"),
        ({b"data": IMAGES.astype(np.int64), b"labels": [1, 2, 3]}, "not one of whole bytes"),
        ({b"data": IMAGES, b"labels": [1, 2, 10]}, "sample 3: the label is not one of the classes 0 to 9"),
        ({b"data": IMAGES, b"labels": [1, 2, 10**30]}, "sample 3: the label"),
        ({b"data": IMAGES, b"labels": [1, "2", 3]}, "sample 2: the label"),
        ({b"data": IMAGES, b"labels": [1, True, 3]}, "sample 2: the label"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, content: object, message: str) -> None:
    (tmp_path / "data_batch_1").write_bytes(pickle.dumps(content))
    with pytest.raises(ConfigError, match=f"data_batch_1.*{message}"):
        CifarSource(str(tmp_path)).read()


def test_damaged_files_are_complained_of(tmp_path: Path) -> None:
    fill(tmp_path)
    assert survives(tmp_path / "data_batch_1", CifarSource(str(tmp_path)).read) > 30
