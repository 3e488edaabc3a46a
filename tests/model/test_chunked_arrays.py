"""Arrays in spans, and maps of files whose pages a process does not keep."""

import gc
import hashlib
from pathlib import Path

import numpy as np
import pytest

from fedsync.model.chunked_arrays import SPAN_BYTES, FilePart, digest, file_part, give_back, map_file, pieces, spans
from tests.memory import resident

VALUES = 3 * SPAN_BYTES // 4 + 5
"""A little more than three spans of float32."""


def on_disk(folder: Path, ahead: bytes = b"") -> tuple[Path, np.ndarray]:
    values = np.arange(VALUES, dtype=np.float32)
    path = folder / "values"
    path.write_bytes(ahead + values.tobytes())
    return path, values


@pytest.mark.parametrize(
    ("count", "item", "expected"),
    [
        (0, 4, []),
        (5, 4, [(0, 5)]),
        (SPAN_BYTES // 4, 4, [(0, SPAN_BYTES // 4)]),
        (SPAN_BYTES // 4 + 1, 4, [(0, SPAN_BYTES // 4), (SPAN_BYTES // 4, SPAN_BYTES // 4 + 1)]),
        (2, 2 * SPAN_BYTES, [(0, 1), (1, 2)]),
    ],
)
def test_spans_cover_an_array_once(count: int, item: int, expected: list[tuple[int, int]]) -> None:
    assert [*spans(count, item)] == expected


def test_a_map_is_the_file_and_cannot_be_written(tmp_path: Path) -> None:
    path, values = on_disk(tmp_path, b"headhead")
    found = map_file(path, np.float32, offset=8)
    np.testing.assert_array_equal(found, values)
    np.testing.assert_array_equal(map_file(path, np.float32, 8, 2), values[:2])
    with pytest.raises(ValueError, match="read-only"):
        found[0] = 1
    with pytest.raises(ValueError, match=r"smaller|exceeds|greater"):
        map_file(path, np.float32, 8, VALUES + 1)


def test_where_an_array_lies_is_known_also_of_a_part(tmp_path: Path) -> None:
    path, values = on_disk(tmp_path, b"headhead")
    found = map_file(path, np.float32, offset=8)
    assert file_part(found) == FilePart(path, 8, values.nbytes)
    assert file_part(found.view(np.uint8)) == FilePart(path, 8, values.nbytes)
    assert file_part(found[3:7]) == FilePart(path, 20, 16)
    assert file_part(found[::2]) is None
    assert file_part(values) is None
    assert file_part(np.frombuffer(b"12345678", np.uint8)) is None


def test_pages_that_were_read_are_given_back(tmp_path: Path) -> None:
    path, _ = on_disk(tmp_path)
    found = map_file(path, np.float32)
    before = resident()
    total = found.sum()
    assert resident() - before > 2 * SPAN_BYTES
    give_back(found[5:], np.zeros(3))
    assert resident() - before < SPAN_BYTES
    assert found.sum() == total, "what is read again is what it was"
    give_back(found)
    most = max(resident() - before for _ in pieces(found))
    assert most < 2 * SPAN_BYTES, "who reads all of it holds a span"


def test_a_hash_is_that_of_the_bytes(tmp_path: Path) -> None:
    path, values = on_disk(tmp_path)
    assert digest(map_file(path)) == digest(values) == hashlib.sha256(values.tobytes()).digest()
    assert digest(values[:0]) == hashlib.sha256().digest()
    assert digest(values, hashlib.blake2b) == hashlib.blake2b(values.tobytes()).digest()


def test_a_file_goes_with_the_last_array_that_shows_it(tmp_path: Path) -> None:
    path, values = on_disk(tmp_path)
    part = map_file(path, np.float32, remove=True)[1:3]
    gc.collect()
    assert path.exists()
    path.rename(tmp_path / "other")  # whoever has linked it elsewhere keeps it
    (tmp_path / "other").rename(path)
    np.testing.assert_array_equal(part, values[1:3])
    del part
    gc.collect()
    assert not path.exists()
