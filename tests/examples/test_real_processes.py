"""Every example does what its README says in real processes; a file of its own, so that it runs beside the others."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.examples.reader import SCORES, check, commands


@pytest.mark.examples
@pytest.mark.parametrize("name", SCORES)
def test_in_real_processes(name: str, example: Path) -> None:
    command = [sys.executable, "-m", "fedsync", *commands(example)["local"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check(example, "local")
