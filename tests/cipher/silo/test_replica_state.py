"""A silo's state on disk: whole, or not there."""

import logging
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.tally import BINS, Tally
from fedsync.cipher.silo.replica_state import ReplicaState, Scales
from fedsync.common.checksums import digested
from fedsync.core.errors import ConfigError

VOTES = Tally(2, 0, 0.0, np.arange(2 * BINS, dtype=np.int64).reshape(2, BINS), 2, 0, None)
STATE = ReplicaState(
    7, np.array([1.0, -2.0, 3.5], dtype=np.float32), Scales(((0, 1), (-1, 2)), {"a": 2}, VOTES), {"a": (1, 4)}
)


def _load(file: Path) -> ReplicaState | None:
    return ReplicaState.load(file, values=3, tensors=2)


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    file = tmp_path / "copy.bin"
    assert _load(file) is None
    STATE.save(file)
    again = _load(file)
    assert again is not None
    np.testing.assert_array_equal(again.model, STATE.model)
    assert (again.version, dict(again.added), again.scales.exponents) == (7, {"a": (1, 4)}, ((0, 1), (-1, 2)))
    assert again.to_bytes() == STATE.to_bytes()


def test_a_file_that_is_damaged_anywhere_is_as_good_as_none_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "copy.bin"
    STATE.save(file)
    data = file.read_bytes()
    damaged = [data[:cut] for cut in (0, 5, 32, 36, 60, len(data) - 4)]
    damaged += [data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :] for at in range(0, len(data), 7)]
    for one in damaged:
        file.write_bytes(one)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            assert _load(file) is None
        assert str(file) in caplog.text and "check the disk" in caplog.text


@pytest.mark.parametrize(
    "state",
    [
        ReplicaState(7, np.zeros(2, dtype=np.float32), STATE.scales, {}),
        ReplicaState(7, STATE.model, Scales(((0, 1, 2),)), {}),
        ReplicaState(7, STATE.model, Scales(()), {}),
    ],
)
def test_a_whole_file_of_another_model_is_not_loaded(state: ReplicaState, tmp_path: Path) -> None:
    state.save(tmp_path / "copy.bin")
    assert _load(tmp_path / "copy.bin") is None


@pytest.mark.parametrize("body", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", b"\x02" + bytes(7) + b"{}"])
def test_whole_nonsense_is_not_loaded(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "copy.bin").write_bytes(digested(body))
    assert _load(tmp_path / "copy.bin") is None


def test_a_disk_that_does_not_take_it_is_the_owner_s_matter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        STATE.save(tmp_path / "missing" / "copy.bin")
