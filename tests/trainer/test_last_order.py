"""The last order that a silo finished, on disk."""

import stat
from pathlib import Path

import numpy as np
import pytest

from fedsync.core.errors import PolicyError
from fedsync.core.orders import Evaluation, Window, WorkOrder, WorkReport
from fedsync.train.sampler import Cursor
from fedsync.trainer.last_order import LastOrder
from fedsync.trainer.protocol import Completed
from tests.memory import traced

ORDER = WorkOrder("a/3", 2, 3, 16, 5, 0.1, seed=9, budget_s=1.5)
REPORT = WorkReport(
    2, 5, 80, 0.25, loss=0.5, overhead_s={"seal": 0.1}, windows=(Window(320.0),), evaluation=Evaluation(1.0, 2.0, 4)
)


@pytest.mark.parametrize("update", [np.array([1.5, -2], dtype=np.float32), np.array([7, 10, 255], dtype=np.uint8)])
def test_what_is_loaded_is_what_was_saved(tmp_path: Path, update: np.ndarray) -> None:
    file = tmp_path / "answer.bin"
    done = LastOrder(ORDER, Completed(REPORT, update), Cursor(1, 12))
    done.save(file)
    found = LastOrder.load(file)
    assert found is not None
    assert (found.order, found.answer.report, found.cursor) == (ORDER, REPORT, Cursor(1, 12))
    np.testing.assert_array_equal(found.answer.update, update)
    assert found.answer.update.dtype == update.dtype
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: b"", lambda data: data + b"x"])
def test_what_is_not_whole_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: object) -> None:
    file = tmp_path / "answer.bin"
    assert LastOrder.load(file) is None
    assert not caplog.text, "a silo that never worked has no file"
    LastOrder(ORDER, Completed(REPORT, np.zeros(3, dtype=np.float32)), Cursor(0, 5)).save(file)
    file.write_bytes(damage(file.read_bytes()))  # type: ignore[operator]  # a function of the list above
    assert LastOrder.load(file) is None
    assert "answer.bin is corrupt" in caplog.text


@pytest.mark.parametrize("private", [b"", b"kept"])
def test_what_the_next_update_makes_up_for_is_saved_with_the_order(tmp_path: Path, private: bytes) -> None:
    file, owed = tmp_path / "answer.bin", np.array([0.25, -3, 1e-9], dtype=np.float32)
    update = np.array([7, 10, 255], dtype=np.uint8)
    LastOrder(ORDER, Completed(REPORT, update), Cursor(1, 12, private=private), owed).save(file)
    found = LastOrder.load(file)
    assert found is not None and found.owed is not None
    np.testing.assert_array_equal(found.owed, owed)
    np.testing.assert_array_equal(found.answer.update, update)
    assert found.cursor.private == private
    LastOrder(ORDER, Completed(REPORT, update), Cursor(1, 12)).save(file)
    again = LastOrder.load(file)
    assert again is not None and again.owed is None


@pytest.mark.parametrize("place", [0, 40, 1500, -1], ids=["digest", "line", "update", "private"])
def test_one_byte_that_changed_is_noticed(tmp_path: Path, place: int) -> None:
    file = tmp_path / "answer.bin"
    LastOrder(ORDER, Completed(REPORT, np.arange(500, dtype=np.float32)), Cursor(0, 5, private=b"head")).save(file)
    data = bytearray(file.read_bytes())
    assert len(data) > 2000 > 1500 > data.index(b"\n")
    data[place] ^= 1
    file.write_bytes(data)
    assert LastOrder.load(file) is None


def test_where_the_update_lies_is_known_so_that_it_can_be_sent_from_there(tmp_path: Path) -> None:
    file, update = tmp_path / "answer.bin", np.arange(500, dtype=np.float32)
    unsaved = LastOrder(ORDER, Completed(REPORT, update), Cursor(0, 5, private=b"head"))
    with pytest.raises(PolicyError, match="'a/3' is in no file"):
        _ = unsaved.update_at
    saved = unsaved.save(file)
    for each in (saved, LastOrder.load(file)):
        assert each is not None
        at = each.update_at
        assert (at.path, at.offset % 64, at.nbytes) == (file, 0, update.nbytes)
        assert file.read_bytes()[at.offset : at.offset + at.nbytes] == update.tobytes()
        assert each.cursor.private == b"head"
    LastOrder(ORDER, Completed(REPORT, update + 1), Cursor(0, 5)).save(file)
    np.testing.assert_array_equal(saved.answer.update, update)  # whoever has it goes on with the file that was


def test_an_update_is_written_without_a_copy_of_it(tmp_path: Path) -> None:
    update = np.zeros(2**20, dtype=np.float32)
    with traced() as taken:
        saved = LastOrder(ORDER, Completed(REPORT, update), Cursor(0, 5)).save(tmp_path / "answer.bin")
        del update
    assert taken.peak < saved.answer.update.nbytes / 10
