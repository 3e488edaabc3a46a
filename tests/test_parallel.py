"""`tests.parallel`: a process imports the files that it runs and no others, and each test runs once."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COUNTED = "import os, pathlib, pytest\npathlib.Path(__file__).with_suffix(f'.{os.getpid()}').touch()\n"
FILE = COUNTED + "def test_a(): pass\n@pytest.mark.slow\n@pytest.mark.parametrize('n', [1, 2])\ndef test_b(n): BODY\n"
OUTCOMES = re.compile(r"(\d+) (passed|failed|error)")


def run(folder: Path, marks: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-p", "tests.parallel", "-n", "2", "--dist", "loadfile", "-m", marks]
    return subprocess.run([*command, "-c", "/dev/null", str(folder)], cwd=ROOT, capture_output=True, text=True)


def outcomes(folder: Path, marks: str) -> dict[str, int]:
    """Numbers of tests of a folder that passed and failed, and of files that could not be imported."""
    done = run(folder, marks)
    return {what: int(count) for count, what in OUTCOMES.findall(done.stdout.splitlines()[-1])}


@pytest.mark.slow
def test_each_test_runs_once_and_each_file_is_imported_by_one_process(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text(FILE.replace("BODY", "assert n == 1" if number == 3 else "pass"))
    assert outcomes(tmp_path, "slow or not slow") == {"passed": 11, "failed": 1}
    assert len([path for path in tmp_path.iterdir() if path.suffix not in (".py", "")]) == 4
    (tmp_path / "test_4.py").write_text("import nothing_of_that_name\n")
    assert outcomes(tmp_path, "slow") == {"passed": 7, "failed": 1, "error": 1}
    (tmp_path / "test_3.py").unlink()
    assert outcomes(tmp_path, "not slow") == {"passed": 3, "error": 1}


@pytest.mark.slow
@pytest.mark.parametrize(
    "last",
    ["import sys\nsys.exit(0)\n", "@pytest.fixture(scope='session')\ndef a():\n    yield\n    assert 0\n"],
    ids=["a file ends its process", "a fixture of the session fails at its end"],
)
def test_a_run_fails_if_a_process_ends_with_an_error_outside_of_tests(last: str, tmp_path: Path) -> None:
    (tmp_path / "test_0.py").write_text("def test_0(): pass\n")
    (tmp_path / "test_1.py").write_text(f"import pytest\n{last}def test_1(request): request.getfixturevalue('a')\n")
    done = run(tmp_path, "not slow")
    assert done.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), done.stdout
