"""Output that nobody can read any more: a run goes on, and a command whose result it is says so."""

import subprocess
import sys
from pathlib import Path

import pytest

RUN = "run lb-bsp --runtime virtual --timing-only --set stop.rounds=300 --out out"


def fedsync(folder: Path, arguments: str, redirected: str) -> subprocess.CompletedProcess[str]:
    command = f"set -o pipefail; {sys.executable} -m fedsync {arguments} {redirected}"
    return subprocess.run(["bash", "-c", command], cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("redirected", ["> /dev/full", "| head -1", "<&- >&- 2>&-", "2> /dev/full"])
def test_a_run_goes_on_whatever_becomes_of_its_output(tmp_path: Path, redirected: str) -> None:
    done = fedsync(tmp_path, RUN, redirected)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "out" / "summary.json").exists()
    first = (tmp_path / "out" / "journal.jsonl").read_text().splitlines()[0]
    assert first.startswith('{"format"'), "no other output takes the place of a closed one"


@pytest.mark.slow
def test_a_result_that_is_lost_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = fedsync(tmp_path, "schema", "> /dev/full")
    assert done.returncode != 0
    assert done.stderr.startswith("error: standard output: No space left on device")
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.slow
def test_a_full_disk_ends_a_run_with_one_line(tmp_path: Path) -> None:
    """A limit of 512 bytes a file is as good as a full disk."""
    done = subprocess.run(
        ["bash", "-c", f"ulimit -f 1; {sys.executable} -m fedsync {RUN}"],
        cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("failed: out: the run's files cannot be written: File too large. Free disk space")
    assert "start the run again, or resume it if it has checkpoints" in line
