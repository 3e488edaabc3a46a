"""What is large lies in a file as long as somebody has it; a full disk is an error, or memory has to do."""

import gc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.model.chunked_arrays import ArrayKeeper, file_part, map_file
from tests.model.stores import files_in, no_space

MIB = 2**20


def test_what_is_large_lies_in_a_file_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    keeper = ArrayKeeper(tmp_path / "kept")
    made = keeper.write(3 * MIB, (bytes([at]) * MIB for at in range(3)))
    assert made.dtype == np.uint8 and not made.flags.writeable and file_part(made) is not None
    assert [int(made[at * MIB]) for at in range(3)] == [0, 1, 2] and len(made) == 3 * MIB
    (path,) = files_in(tmp_path / "kept")
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert file_part(keeper.keep(made)) == file_part(made), "it is in a file already"
    part = made[MIB : MIB + 2]
    del made
    gc.collect()
    assert files_in(tmp_path / "kept") == [path] and part.tolist() == [1, 1]
    del part
    gc.collect()
    assert files_in(tmp_path / "kept") == []


def test_what_is_small_or_has_no_folder_stays_in_memory(tmp_path: Path) -> None:
    keeper, nowhere = ArrayKeeper(tmp_path / "kept"), ArrayKeeper()
    small = keeper.write(5, (b"ab", memoryview(b"cde")))
    assert small.tobytes() == b"abcde" and not small.flags.writeable
    large = np.zeros(2 * MIB, np.uint8)
    assert np.shares_memory(keeper.keep(large[:9]), large) and np.shares_memory(nowhere.keep(large), large)
    assert not nowhere.keep(large).flags.writeable and large.flags.writeable
    assert file_part(nowhere.write(2 * MIB, (large.data,))) is None
    assert not (tmp_path / "kept").exists()
    kept = keeper.keep(large)
    assert not np.shares_memory(kept, large) and np.array_equal(kept, large) and file_part(kept) is not None


def test_what_is_in_any_file_stays_there(tmp_path: Path) -> None:
    (tmp_path / "received").write_bytes(bytes(2 * MIB))
    received = map_file(tmp_path / "received", np.float32, 4 * 7)
    assert file_part(ArrayKeeper(tmp_path / "kept").keep(received)) == file_part(received)
    assert not (tmp_path / "kept").exists()


def test_what_a_killed_process_has_left_goes(tmp_path: Path) -> None:
    kept = ArrayKeeper(tmp_path / "kept").keep(np.ones(MIB, np.uint8))
    assert len(files_in(tmp_path / "kept")) == 1
    ArrayKeeper(tmp_path / "kept")
    assert files_in(tmp_path / "kept") == []
    assert kept[7] == 1, "who has it mapped still has it"


def whole(size: int) -> np.ndarray:
    return np.random.default_rng(size).standard_normal(size).astype(np.float32)


def test_a_disk_that_takes_no_more_is_said_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    keeper, values = ArrayKeeper(tmp_path / "kept"), whole(MIB)

    def parts() -> Iterator[bytes]:
        yield bytes(MIB)
        no_space()

    with pytest.raises(ConfigError, match="No space left on device"):
        keeper.write(2 * MIB, parts())
    monkeypatch.setattr("fedsync.model.chunked_arrays.map_file", no_space)
    with pytest.raises(ConfigError, match="No space left on device"):
        keeper.keep(values)
    with pytest.raises(ConfigError, match="No space left on device"):
        keeper.make(np.float32, MIB, lambda start, stop: values[start:stop])
    assert files_in(tmp_path / "kept") == []


def test_memory_has_to_do_where_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    keeper, values = ArrayKeeper(tmp_path / "kept", or_memory=True), whole(MIB)
    monkeypatch.setattr("fedsync.model.chunked_arrays.map_file", no_space)
    for kept in (keeper.keep(values), keeper.make(np.float32, MIB, lambda start, stop: values[start:stop])):
        np.testing.assert_array_equal(kept, values)
        assert file_part(kept) is None and not kept.flags.writeable
    assert caplog.text.count("No space left on device") == 1, "said once, not every round"
    assert files_in(tmp_path / "kept") == [], "nothing half written is left"
