"""The last order that a silo finished, on disk."""

import stat
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from fedsync.core.orders import Cursor, Evaluation, Window, WorkOrder, WorkReport
from fedsync.model.chunked_arrays import file_part
from fedsync.silo.protocol import Completed
from fedsync.silo.session.current_order import LastOrder

ORDER = WorkOrder("a/3", 2, 3, 16, 5, 0.1, seed=9, budget_s=1.5)
REPORT = WorkReport(
    2, 5, 80, 0.25, loss=0.5, overhead_s={"seal": 0.1}, windows=(Window(320.0),), evaluation=Evaluation(1.0, 2.0, 4)
)


def saved(file: Path, update: np.ndarray, cursor: Cursor | None = None, owed: np.ndarray | None = None) -> LastOrder:
    return LastOrder(ORDER, Completed(REPORT, update), cursor or Cursor(1, 12), owed, number=3).save(file)


@pytest.mark.parametrize("private", [b"", b"kept"])
@pytest.mark.parametrize("update", [np.array([1.5, -2], dtype=np.float32), np.array([7, 10, 255], dtype=np.uint8)])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, update: np.ndarray, private: bytes) -> None:
    """Also what the next update makes up for."""
    file, owed = tmp_path / "answer.bin", np.array([0.25, -3, 1e-9], dtype=np.float32)
    cursor = Cursor(1, 12, private=private)
    saved(file, update, cursor, owed=owed)
    found = LastOrder.load(file)
    assert found is not None
    assert (found.order, found.answer.report, found.cursor, found.number) == (ORDER, REPORT, cursor, 3)
    np.testing.assert_array_equal(found.answer.update, update)
    assert found.answer.update.dtype == update.dtype
    assert found.owed is not None
    np.testing.assert_array_equal(found.owed, owed)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    saved(file, update)
    again = LastOrder.load(file)
    assert again is not None and again.owed is None


def flipped(data: bytes, place: int) -> bytes:
    assert len(data) > 2000 > 1500 > data.index(b"\n")
    changed = bytearray(data)
    changed[place] ^= 1
    return bytes(changed)


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "short": lambda data: data[:-1],
    "empty": lambda data: b"",
    "long": lambda data: data + b"x",
    "digest": lambda data: flipped(data, 0),
    "line": lambda data: flipped(data, 40),
    "update": lambda data: flipped(data, 1500),
    "private": lambda data: flipped(data, -1),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_what_is_damaged_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str) -> None:
    file = tmp_path / "answer.bin"
    assert LastOrder.load(file) is None
    assert not caplog.text, "a silo that never worked has no file"
    saved(file, np.arange(500, dtype=np.float32), Cursor(0, 5, private=b"head"))
    file.write_bytes(DAMAGE[damage](file.read_bytes()))
    assert LastOrder.load(file) is None
    assert "answer.bin is corrupt" in caplog.text


def test_where_the_update_lies_is_known_so_that_it_can_be_sent_from_there(tmp_path: Path) -> None:
    file, update = tmp_path / "answer.bin", np.arange(500, dtype=np.float32)
    first = saved(file, update, Cursor(0, 5, private=b"head"))
    for each in (first, LastOrder.load(file)):
        assert each is not None
        at = file_part(each.answer.update)
        assert at is not None
        assert (at.path, at.offset % 64, at.nbytes) == (file, 0, update.nbytes)
        assert file.read_bytes()[at.offset : at.offset + at.nbytes] == update.tobytes()
        assert each.cursor.private == b"head"
    saved(file, update + 1)
    np.testing.assert_array_equal(first.answer.update, update)  # whoever has it goes on with the file that was


def test_a_trainer_that_dies_as_it_writes_has_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, update = tmp_path / "answer.bin", np.arange(500, dtype=np.float32)
    saved(file, update)
    with monkeypatch.context() as dying:
        dying.setattr("fedsync.common.files.os.replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            saved(file, update + 1)
    found = LastOrder.load(file)
    assert found is not None
    np.testing.assert_array_equal(found.answer.update, update)
