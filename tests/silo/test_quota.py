"""What goes when a silo's disk has to have room."""

import os
import shutil
import time
from pathlib import Path
from unittest.mock import Mock

import pytest

from fedsync.silo.agent.joins import FOLDER, INBOX_FOLDER
from fedsync.silo.session import trainer_folder
from fedsync.silo.session.trainer_folder import TENURE, bound_log, tidy
from tests.silo.holders import holder


def folder(path: Path, nbytes: int, used_s: float) -> None:
    """A trainer's folder, last used then."""
    path.mkdir()
    (path / "copy.bin").write_bytes(b"x" * nbytes)
    os.utime(path / "copy.bin", (used_s, used_s))


def left(state: Path) -> list[str]:
    return sorted(path.name for path in state.iterdir())


@pytest.mark.parametrize(
    ("quota", "stay"),
    # a is the oldest, c the newest; together 60 bytes.
    [(60, "abc"), (59, "bc"), (50, "bc"), (49, "c"), (0, "c")],
)
def test_the_oldest_go_until_the_rest_fits_and_the_newest_stays(quota: int, stay: str, tmp_path: Path) -> None:
    for used_s, (name, nbytes) in enumerate({"a": 10, "b": 20, "c": 30}.items(), start=1):
        folder(tmp_path / name, nbytes, used_s)
    assert tidy(tmp_path, quota) is (quota >= 30)
    assert left(tmp_path) == list(stay)


def test_a_folder_that_is_removed_meanwhile_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The supervisor, the agent and trainers clean up at the same time, and an error would end the supervisor."""

    def other_process(path: Path) -> int:
        if path.parent.name == "a":
            shutil.rmtree(path.parent, ignore_errors=True)
        return 0

    for used_s, name in enumerate("ab"):
        folder(tmp_path / name, 100, used_s)
    monkeypatch.setattr(trainer_folder, "tree_bytes", other_process)
    assert tidy(tmp_path, 100)


def test_a_folder_that_cannot_be_removed_still_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for used_s, name in enumerate("ab"):
        folder(tmp_path / name, 100, used_s)
    refused = OSError("rm: cannot remove 'copy.bin': Operation not permitted")
    monkeypatch.setattr(trainer_folder, "remove_tree", Mock(side_effect=refused))
    assert not tidy(tmp_path, 100)
    assert "cannot be removed" in caplog.text and "not permitted" in caplog.text


def test_the_folder_of_a_quiet_agent_stays(tmp_path: Path) -> None:
    """It has the sessions and the inbox of all runs, and nothing is written to it while a run goes on."""
    (tmp_path / FOLDER / INBOX_FOLDER).mkdir(parents=True)
    (tmp_path / FOLDER / "run.session").write_bytes(b"x" * 10)
    for path in (tmp_path / FOLDER).iterdir():
        os.utime(path, (1, 1))
    for used_s, name in enumerate("ab", start=2):
        folder(tmp_path / name, 10_000, used_s)
    assert not tidy(tmp_path, 5000)
    assert left(tmp_path) == [FOLDER, "b"]
    assert (tmp_path / FOLDER / "run.session").exists()


def test_folders_of_real_trainers(tmp_path: Path) -> None:
    """One is old, one older with a trainer in it, one was used just now; the newest stays in any case."""
    names = {"living": 1.0, "old": 2.0, "recent": time.time() - 10.0, "newest": time.time()}
    for name, used_s in names.items():
        folder(tmp_path / name, 1000, used_s)
        (tmp_path / name / TENURE).touch()
        os.utime(tmp_path / name / TENURE, (used_s, used_s))
    with holder(tmp_path / "living"):
        assert tidy(tmp_path, 10_000) and len([*tmp_path.iterdir()]) == 4
        assert not tidy(tmp_path, 500)
        assert left(tmp_path) == ["living", "newest", "recent"]
    assert not tidy(tmp_path, 500)
    assert left(tmp_path) == ["newest", "recent"]
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
    monkeypatch.setattr(Path, "write_bytes", Mock(side_effect=OSError(28, "No space left on device")))
    (tmp_path / "trainer.log").write_text("12345")
    bound_log(tmp_path / "trainer.log", 4)
    assert [(file.name, file.stat().st_size) for file in tmp_path.iterdir()] == [("trainer.log", 0)]
