"""A silo's state on disk: whole, or not there."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import LinkKind
from fedsync.cipher.encoding.tally import BINS, HeaderForm, Tally
from fedsync.cipher.silo.history import History
from fedsync.cipher.silo.replica_state import ReplicaState, Scales
from fedsync.common.errors import ConfigError
from fedsync.common.files import digested
from fedsync.model.chunked_arrays import file_part

COUNTERS = np.zeros((2, BINS), dtype=np.int64)
COUNTERS[0, 3], COUNTERS[1, 5:7] = 2, 1
VOTES = Tally(2, 0, 0.0, COUNTERS, 2, 0, None)
HISTORY = History(bytes(32)).begin(bytes(32), bytes(32))
for _ in range(7):
    HISTORY = HISTORY.after(LinkKind.EMPTY, (), bytes(32))
STATE = ReplicaState(
    7,
    np.array([1.0, -2.0, 3.5], dtype=np.float32),
    Scales(((0, 1), (-1, 2)), 3, {"a": 2}, VOTES, (-3, 0)),
    {"a": (1, 4)},
    HISTORY,
)


def _load(file: Path) -> ReplicaState | None:
    return ReplicaState.load(file, values=3, header=HeaderForm(2))


def test_what_was_saved_is_loaded_and_its_model_is_a_map_of_the_file(tmp_path: Path) -> None:
    file = tmp_path / "copy.bin"
    assert _load(file) is None
    saved, loaded = STATE.save(file), _load(file)
    assert loaded is not None
    assert (loaded.version, dict(loaded.added), loaded.scales.exponents) == (7, {"a": (1, 4)}, ((0, 1), (-1, 2)))
    assert b"".join(loaded.pieces) == b"".join(STATE.pieces)
    for one in (saved, loaded):
        part = file_part(one.model)
        assert part is not None and part.path == file and part.offset % 32 == 0 and one.model.flags.aligned
        assert one.model.tolist() == STATE.model.tolist() and one.digest == STATE.digest
    replace(STATE, model=np.zeros(3, np.float32)).save(file)
    assert saved.model.tolist() == STATE.model.tolist(), "whoever has the version before still has it"


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
    "change",
    [
        {"model": np.zeros(2, dtype=np.float32)},
        {"model": np.array([1, np.nan, 2], dtype=np.float32)},
        {"scales": Scales(((0, 1, 2),))},
        {"scales": Scales(())},
        {"scales": Scales(((0, 24),))},
        {"scales": Scales(((0, 1),) * 65)},
        {"scales": Scales(((0, 1),), 2, {"a": 2}, replace(VOTES, tensors=3), (0, 1))},
        {"scales": Scales(((0, 1),), 2, {"a": 2}, replace(VOTES, count=3), (0, 1))},
        {"scales": Scales(((0, 1),), 2, {"a": 2}, replace(VOTES, votes=COUNTERS[:, :-1]), (0, 1))},
        {"scales": Scales(((0, 1),), 2, {"a": 2}, VOTES, (0,))},
        {"scales": Scales(((0, 1),), 2, {"a": 2}, VOTES, (0, 24))},
        {"scales": Scales(((0, 1),), 2, {"a": 2}, None, (0, 1))},
        {"version": 8},
    ],
)
def test_a_whole_file_that_is_no_state_of_this_model_is_not_loaded(change: dict[str, object], tmp_path: Path) -> None:
    replace(STATE, **change).save(tmp_path / "copy.bin")  # type: ignore[arg-type]
    assert _load(tmp_path / "copy.bin") is None


@pytest.mark.parametrize(
    "change",
    [
        {"model": np.array([1.0, -2.0, 3.25], dtype=np.float32)},
        {"scales": Scales(((0, 1), (-1, 1)), 3, {"a": 2}, VOTES, (-3, 0))},
        {"scales": Scales(((0, 1), (-1, 2)), 4, {"a": 2}, VOTES, (-3, 0))},
        {"scales": Scales(((0, 1), (-1, 2)), 3, {"b": 2}, VOTES, (-3, 0))},
        {"scales": Scales(((0, 1), (-1, 2)), 3, {"a": 2}, VOTES, (-3, 1))},
        {"added": {"a": (1, 5)}},
        {"version": 8},
    ],
)
def test_the_digest_is_of_all_that_the_next_version_depends_on(change: dict[str, object]) -> None:
    assert replace(STATE, **change).digest != STATE.digest  # type: ignore[arg-type]
    assert replace(STATE, history=History(bytes(32))).digest == STATE.digest
    again = ReplicaState.from_bytes(b"".join(STATE.pieces), values=3, header=HeaderForm(2))
    assert again.digest == STATE.digest and again.history == STATE.history


@pytest.mark.parametrize("body", [b"", b"\xff" * 8, (2).to_bytes(8, "little") + b"[]", b"\x02" + bytes(7) + b"{}"])
def test_whole_nonsense_is_not_loaded(body: bytes, tmp_path: Path) -> None:
    (tmp_path / "copy.bin").write_bytes(digested(body))
    assert _load(tmp_path / "copy.bin") is None


def test_a_disk_that_does_not_take_it_is_the_owner_s_matter(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be written"):
        STATE.save(tmp_path / "missing" / "copy.bin")
