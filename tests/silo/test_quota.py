"""What goes when a silo's disk has to have room."""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedsync.silo.agent.joins import FOLDER, INBOX_FOLDER
from fedsync.silo.session import trainer_folder
from fedsync.silo.session.trainer_folder import TENURE, bound_log, tidy


@pytest.mark.parametrize(
    ("quota", "left"),
    # a is the oldest, c the newest; together 60 bytes.
    [(60, "abc"), (59, "bc"), (50, "bc"), (49, "c"), (0, "c")],
)
def test_the_oldest_go_until_the_rest_fits_and_the_newest_stays(quota: int, left: str, tmp_path: Path) -> None:
    for used_s, (name, nbytes) in enumerate({"a": 10, "b": 20, "c": 30}.items(), start=1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "copy.bin").write_bytes(b"x" * nbytes)
        os.utime(tmp_path / name / "copy.bin", (used_s, used_s))
    assert tidy(tmp_path, quota) is (quota >= 30)
    assert "".join(sorted(path.name for path in tmp_path.iterdir())) == left


def test_a_folder_that_another_process_removes_meanwhile_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The supervisor, the agent and trainers clean up at the same time, and an error would end the supervisor."""

    def other_process(path: Path) -> int:
        if path.parent.name == "a":
            shutil.rmtree(path.parent, ignore_errors=True)
        return 0

    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / "copy.bin").write_bytes(b"x" * 100)
    monkeypatch.setattr(trainer_folder, "tree_bytes", other_process)
    assert tidy(tmp_path, 100)


def test_a_folder_that_cannot_be_removed_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(path: Path) -> None:
        raise OSError("rm: cannot remove 'copy.bin': Operation not permitted")

    for used_s, name in enumerate("ab", start=1):
        (tmp_path / name).mkdir()
        (tmp_path / name / "copy.bin").write_bytes(b"x" * 100)
        os.utime(tmp_path / name / "copy.bin", (used_s, used_s))
    monkeypatch.setattr(trainer_folder, "remove_tree", refused)
    assert not tidy(tmp_path, 100)
    assert "cannot be removed" in caplog.text and "not permitted" in caplog.text


def test_the_folder_of_a_quiet_agent_stays(tmp_path: Path) -> None:
    """It has the sessions and the inbox of all runs, and nothing is written to it while a run goes on."""
    (tmp_path / FOLDER / INBOX_FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "run.session").write_bytes(b"x" * 10)
    for path in (tmp_path / FOLDER).iterdir():
        os.utime(path, (1, 1))
    for used_s, name in enumerate("ab", start=2):
        (tmp_path / name).mkdir()
        (tmp_path / name / "copy.bin").write_bytes(b"x" * 10_000)
        os.utime(tmp_path / name / "copy.bin", (used_s, used_s))
    assert not tidy(tmp_path, 5000)
    assert sorted(path.name for path in tmp_path.iterdir()) == [FOLDER, "b"]
    assert (tmp_path / FOLDER / "run.session").exists()


HOLD = """
import pathlib, sys
from fedsync.silo.session.trainer_folder import FolderLock
tenure = FolderLock.take(pathlib.Path(sys.argv[1]))
input(tenure)
"""


def test_folders_of_real_trainers(tmp_path: Path) -> None:
    """One is old, one older with a trainer in it, one was used just now; the newest stays in any case."""
    names = {"living": 1.0, "old": 2.0, "recent": time.time() - 10.0, "newest": time.time()}
    for name, used_s in names.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "copy.bin").write_bytes(b"x" * 1000)
        (tmp_path / name / TENURE).touch()
        for file in (tmp_path / name).iterdir():
            os.utime(file, (used_s, used_s))
    command = [sys.executable, "-c", HOLD, str(tmp_path / "living")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as trainer:
        assert trainer.stdout is not None
        trainer.stdout.read(1)
        assert tidy(tmp_path, 10_000) and len([*tmp_path.iterdir()]) == 4
        assert not tidy(tmp_path, 500)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["living", "newest", "recent"]
        trainer.kill()
    assert not tidy(tmp_path, 500)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "recent"]
    assert tidy(tmp_path / "nowhere", 0)


def test_a_log_is_put_aside_while_it_is_written(tmp_path: Path) -> None:
    log = tmp_path / "trainer.log"
    bound_log(log, 4)
    with log.open("ab", buffering=0) as file:
        file.write(b"1234")
        bound_log(log, 4)
        assert log.read_bytes() == b"1234", "no longer than it may be"
        file.write(b"567")
        bound_log(log, 4)
        assert (log.read_bytes(), (tmp_path / "trainer.log.1").read_bytes()) == (b"", b"4567")
        file.write(b"89")
    assert log.read_bytes() == b"89", "whoever has it open goes on at its new beginning"


def test_a_log_is_emptied_even_if_the_disk_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, data: bytes) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    (tmp_path / "trainer.log").write_text("12345")
    bound_log(tmp_path / "trainer.log", 4)
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("trainer.log", 0)]
