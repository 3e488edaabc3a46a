"""Another user's modules in the folder where a program of FedSync is started: none is imported beside the keys."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fedsync.common.processes import INTERPRETER
from fedsync.flower.process_environment import QUIET
from tests.attacks.call_sites import FILES, ROOT, tree, where

LIBRARIES = [
    "torch", "numpy", "flwr", "grpc", "uvicorn", "starlette", "httpx", "psutil", "pydantic", "typer", "rich",
    "cryptography", "yaml",
]  # fmt: skip
PROGRAMS = {
    "trainer": [*INTERPRETER, "fedsync.silo.session.resident_trainer", "nowhere"],
    "fork server": [*INTERPRETER, "fedsync.common.fork_server", "0", "fedsync.silo.session.service", "x"],
    "SuperNode, SuperLink, SuperExec": [*INTERPRETER, "fedsync.flower.launch", "supernode", "--help"],
    "agent": [*INTERPRETER, "fedsync.silo.agent.agent"],
    "Flower's command line": [*INTERPRETER, "fedsync.flower.flwr_calls"],
    "console script": [str(Path(sys.executable).with_name("fedsync")), "doctor", "--silo", "nowhere"],
    "module": [sys.executable, "-m", "fedsync", "doctor", "--silo", "nowhere"],
}


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS)
def test_no_program_imports_what_lies_in_its_folder(program: list[str], tmp_path: Path) -> None:
    for library in LIBRARIES:
        (tmp_path / f"{library}.py").write_text("open('planted', 'w').close()\n")
    subprocess.run(program, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    assert not (tmp_path / "planted").exists()


def test_neither_do_those_that_programs_start() -> None:
    """Flower's own programs, and processes that are spawned: they take the variable along."""
    assert QUIET["PYTHONSAFEPATH"] == "1"
    code = "import os; from fedsync.common.processes import *; safe_paths(); print(os.environ['PYTHONSAFEPATH'])"
    command, environment = [*INTERPRETER[:-1], "-c", code], {**os.environ, "PYTHONSAFEPATH": ""}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "1"


@pytest.mark.slow
def test_every_command_begins_with_it() -> None:
    wrong = []
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.List | ast.Tuple) and len(node.elts) > 1:
                elements = [ast.unparse(each) for each in node.elts]
                if elements[0] == "sys.executable" and "'-P'" not in elements:
                    wrong.append(where(path, node))
    assert not wrong, wrong


@pytest.mark.parametrize("file", ["Dockerfile", "fedsync-silo.service", "fedsync-server.service"])
def test_units_and_images_say_so(file: str) -> None:
    assert "PYTHONSAFEPATH=1" in (ROOT / "deploy" / file).read_text()
