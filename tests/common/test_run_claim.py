"""One rule for a run's folder: nothing of a run is lost, and nobody breaks a run that is at work."""

import errno
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedsync.common.errors import ConfigError
from fedsync.common.locks import held, taken
from fedsync.common.run_claim import _FILES, _RESULTS, CHECKPOINTS, RUN_LOCK, Existing, claim, claimed


def a_run(folder: Path, name: str = "summary.json") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("a week of work")
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("name", _RESULTS)
def test_a_folder_with_a_run_is_refused_with_the_ways_on(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"has the files of a run.*--overwrite"):
        claim(a_run(tmp_path, name))
    assert names(tmp_path) == [name], "nothing is written into it"


@pytest.mark.parametrize(
    ("summary", "goes_on"), [(None, True), ("{", True), ('{"stopped_by": "2 rounds done"}', False)]
)
def test_of_a_run_that_was_cut_off_the_first_way_is_on(tmp_path: Path, summary: str | None, goes_on: bool) -> None:
    a_run(tmp_path / CHECKPOINTS, "7.ckpt")
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    with pytest.raises(ConfigError) as error:
        claim(tmp_path)
    assert (f"--resume {tmp_path} (in Python resume=True)" in str(error.value)) == goes_on
    assert "--overwrite" in str(error.value)


def test_of_two_that_look_at_one_moment_one_gets_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other takes the lock, or even ends its run, between the first look and the lock."""
    monkeypatch.setattr("fedsync.common.run_claim.held", lambda lock: False)
    with taken(tmp_path / RUN_LOCK) as mine, pytest.raises(ConfigError, match="a run is at work here"):
        assert mine
        claim(tmp_path)

    @contextmanager
    def ended_meanwhile(lock: Path) -> Iterator[bool]:
        a_run(lock.parent)
        with taken(lock) as mine:
            yield mine

    monkeypatch.setattr("fedsync.common.run_claim.taken", ended_meanwhile)
    with pytest.raises(ConfigError, match="has the files of a run"):
        claim(tmp_path)
    assert "summary.json" in names(tmp_path)


def test_a_default_folder_that_has_a_run_gets_the_next_free_number(tmp_path: Path) -> None:
    a_run(tmp_path / "x-7")
    first = claim(tmp_path / "x-7", Existing.NUMBER)
    second = claim(tmp_path / "x-7", Existing.NUMBER)  # of a process that was started a moment later
    assert [first.path.name, second.path.name] == ["x-7-2", "x-7-3"]


def test_overwriting_removes_what_runs_write_and_nothing_else(tmp_path: Path) -> None:
    for name in (*_RESULTS, *_FILES):
        (tmp_path / name).write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    with claimed(tmp_path, Existing.OVERWRITE):
        assert names(tmp_path) == ["notes.txt", RUN_LOCK]


@pytest.mark.parametrize("model", ["best.pt", "fedavg-7/best.pt", "other/best.pt", "mine.pt"])
def test_overwriting_never_removes_the_model_that_the_run_begins_with(tmp_path: Path, model: str) -> None:
    a_run(tmp_path, "journal.jsonl")
    path = a_run((tmp_path / model).parent, Path(model).name) / Path(model).name
    if model in ("best.pt", "fedavg-7/best.pt"):
        with pytest.raises(ConfigError, match=r"would remove .*best.pt, with which it begins. Copy the model"):
            claim(tmp_path, Existing.OVERWRITE, ["fedavg-7"], [None, str(path)])
        assert (tmp_path / "journal.jsonl").exists()
    else:
        claim(tmp_path, Existing.OVERWRITE, models=[str(path)]).release()
    assert path.exists()


def test_overwriting_removes_all_that_the_documentation_lists() -> None:
    """A killed run leaves also the working files, for example the sessions of its silos."""
    page = (Path(__file__).parents[2] / "docs" / "run-folder.md").read_text(encoding="utf-8")
    files = page.partition("## Files")[2].partition("## The best version")[0]
    first_cells = [line.split("|")[1] for line in files.splitlines() if line.startswith("| `")]
    listed = {name.rstrip("/") for cell in first_cells for name in re.findall("`([^`]+)`", cell)}
    assert {"model.pt", "checkpoints", "hub"} <= listed <= {*_RESULTS, *_FILES}


def test_a_run_of_a_server_is_overwritten_only_once_it_has_ended(tmp_path: Path) -> None:
    a_run(tmp_path, "run.json")
    with pytest.raises(ConfigError, match=r"has not ended.*fedsync server stop"):
        claim(tmp_path, Existing.OVERWRITE)
    (tmp_path / "error.json").touch()
    claim(tmp_path, Existing.OVERWRITE).release()


@pytest.mark.parametrize("existing", [Existing.REFUSE, Existing.OVERWRITE, Existing.RESUME])
def test_nobody_takes_the_folder_of_a_run_that_is_at_work(tmp_path: Path, existing: Existing) -> None:
    with claimed(a_run(tmp_path), Existing.OVERWRITE), pytest.raises(ConfigError, match="a run is at work here"):
        claim(tmp_path, existing)
    assert not held(tmp_path / RUN_LOCK)


@pytest.mark.parametrize("existing", [Existing.REFUSE, Existing.OVERWRITE])
def test_a_file_of_the_user_s_own_is_never_replaced(tmp_path: Path, existing: Existing) -> None:
    (tmp_path / "silos.yaml").write_text("mine")
    with pytest.raises(ConfigError, match=r"would replace 'silos.yaml', which is not of a run"):
        claim(tmp_path, existing)
    assert names(tmp_path) == ["silos.yaml"]


def test_a_run_that_never_began_leaves_no_folder_and_frees_its_name(tmp_path: Path) -> None:
    with claimed(tmp_path / "x", Existing.NUMBER) as folder:
        assert folder.is_dir()
    assert names(tmp_path) == []


def test_what_a_failed_start_left_is_no_run(tmp_path: Path) -> None:
    with claimed(tmp_path / "x") as folder:
        (folder / "logs").mkdir()
    with claimed(tmp_path / "x", Existing.NUMBER) as folder:
        assert folder == tmp_path / "x" and not (folder / "logs").exists()


def test_runs_below_a_comparison_s_folder_count(tmp_path: Path) -> None:
    a_run(tmp_path / "lb-bsp-7")
    with pytest.raises(ConfigError, match="has the files of a run"):
        claim(tmp_path, runs=["fedavg-7", "lb-bsp-7"])
    claim(tmp_path, runs=["fedavg-7"]).release()


def test_the_lock_ends_with_its_process_and_a_removed_one_locks_nothing(tmp_path: Path) -> None:
    code = f"from fedsync.common.run_claim import claim; from pathlib import Path; claim(Path({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    file = tmp_path / RUN_LOCK
    assert file.exists() and not held(file)
    with taken(file) as got:
        file.unlink()
        assert got
    with file.open("a") as opened:
        file.unlink()
        from fedsync.common.locks import _try

        assert not _try(opened)


def test_a_disk_that_takes_nothing_is_no_reason_to_count_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "x")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(OSError, match="No space left"):
        claim(tmp_path / "x", Existing.NUMBER)
