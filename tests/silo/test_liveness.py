"""When a trainer counts as hanging; that it is ended then is in test_resident."""

import json
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from fedsync.silo.protocol import SOCKET
from fedsync.silo.session import liveness
from fedsync.silo.session.liveness import Signs, Trainers, probe
from fedsync.silo.session.trainer_socket import call
from tests.silo.holders import holder

# What a probe finds, and the processor time of the process by then: six probes without a sign of life make it hang.
SILENT = [(False, 1.0)]


@pytest.mark.parametrize(
    ("probes", "hangs"),
    [
        ([(True, 1.0)] * 20, False),  # idle: takes no processor time, but answers
        (SILENT * 6, False),  # the first tells nothing: there is none before it to compare with
        (SILENT * 7, True),
        ([(False, float(number)) for number in range(20)], False),  # computes, and lets no thread answer
        ([*SILENT * 6, (True, 1.0), *SILENT * 5], False),  # machine was asleep
        ([*SILENT * 6, (False, 1.01), *SILENT * 5], False),
        ([*SILENT * 6, (True, 1.0), *SILENT * 6], True),
    ],
)
def test_six_probes_without_a_sign_of_life_make_it_hang(probes: list[tuple[bool, float]], hangs: bool) -> None:
    signs = Signs()
    for answered, cpu_s in probes:
        signs = signs.after(answered=answered, cpu_s=cpu_s)
    assert (signs.silent >= 6) == hangs


@pytest.fixture
def mute(tmp_path: Path) -> Iterator[int]:
    """A process that has the folder ``tmp_path / "a"`` and listens, but lets nobody in."""
    (tmp_path / "a").mkdir()
    with holder(tmp_path / "a", "listens") as pid:
        yield pid


def test_the_health_file_tells_of_silent_trainers(mute: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liveness, "PROBE_S", 0.01)
    (tmp_path / "b").mkdir()  # where nobody is
    trainers = Trainers(tmp_path)
    assert trainers.told() == {"trainers": {}}
    trainers.look()
    first = trainers.told()
    assert (first["trainers"]["a"]["pid"], first["trainers"]["a"]["state"]) == (mute, "silent")
    json.dumps(first)
    trainers.look()
    assert trainers.told() == first, "since the first time"


def test_a_probe_does_not_wait_behind_others_that_are_not_let_in(mute: int, tmp_path: Path) -> None:
    waiting: list[Connection | None] = []
    with pytest.raises(BlockingIOError):
        while len(waiting) < 10_000:
            waiting.append(call(tmp_path / "a" / SOCKET))
    assert waiting and None not in waiting
    assert probe(tmp_path / "a") is None
