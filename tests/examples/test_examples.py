"""Every example does what its README says, by its own commands: in virtual time, encrypted, in real processes."""

import json
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedsync.cli import main

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples"
SCORES = {
    "heart": 0.68,
    "huggingface": 0.85,
    "lightning": 0.7,
    "quickstart-pytorch": 0.8,
    "segmentation": 0.8,
    "sklearn": 0.9,
    "vit-adapters": 0.7,
}
"""What each example's model reaches at least."""

LIBRARIES = {"lightning": ["lightning"], "huggingface": ["transformers", "accelerate"], "segmentation": ["monai"]}
"""What an example needs that `make test` does without."""

QUICK = ("heart", "sklearn")
EVERYWHERE = [pytest.param(name, marks=() if name in QUICK else pytest.mark.examples) for name in SCORES]


@pytest.fixture
def example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example's folder, where its README's reader would be."""
    for library in LIBRARIES.get(name, ()):
        pytest.importorskip(library)
    shutil.copytree(FOLDER / name, tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    return tmp_path / name


def commands(example: Path) -> dict[str, list[str]]:
    """The README's commands, by the folder that each writes to."""
    lines = re.findall(r"^fedsync (run .*)$", (example / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {line.rpartition("runs/")[2]: shlex.split(line) for line in lines}


def check(example: Path, run: str) -> None:
    rows = [json.loads(line) for line in (example / "runs" / run / "rounds.jsonl").read_text().splitlines()]
    summary: dict[str, Any] = json.loads((example / "runs" / run / "summary.json").read_text())
    speeds = re.findall(r"name: (\w+), speed: (\d+)", (example / "silos.yaml").read_text())
    sizes = rows[-1]["batch_sizes"]
    by_speed = [sizes[name] for name, _ in sorted(speeds, key=lambda pair: int(pair[1]))]
    assert by_speed == sorted(by_speed) and by_speed[0] < by_speed[-1], "batches follow the speeds"
    assert summary["accuracy"] > SCORES[example.name]


@pytest.mark.parametrize("run", ["virtual", "encrypted"])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_in_virtual_time(name: str, run: str, example: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connect(self: socket.socket, address: object) -> None:
        raise AssertionError(f"it wants to download something from {address}")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr("sys.argv", ["fedsync", *commands(example)[run]])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code
    check(example, run)


@pytest.mark.examples
@pytest.mark.parametrize("name", SCORES)
def test_in_real_processes(name: str, example: Path) -> None:
    command = [sys.executable, "-m", "fedsync", *commands(example)["local"]]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    check(example, "local")


def test_the_stock_app_is_changed_where_its_readme_says() -> None:
    folder = FOLDER / "quickstart-pytorch"
    (diff,) = re.findall(r"```diff\n(.*?)```", (folder / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    parts = re.split(r"^ (\S+)\n", diff, flags=re.MULTILINE)[1:]
    changed = dict(zip(parts[::2], parts[1::2], strict=True))
    lines = {file: [line[1:] for line in part.splitlines() if line.startswith("+")] for file, part in changed.items()}
    assert sum(map(len, lines.values())) <= 5
    for file, wanted in lines.items():
        text = (folder / file).read_text(encoding="utf-8").splitlines()
        assert set(wanted) <= set(text)
        assert file == "pyproject.toml" or not any("fedsync" in line.lower() for line in text if line not in wanted)


def test_none_is_forgotten_and_what_they_need_can_be_installed() -> None:
    page = (FOLDER / "README.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| \[(.+?)\]\(\1\) \|.*`fedsync(?:\[(.+?)\])?` \|$", page, re.MULTILINE)
    documented = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert listed == re.findall(r"^\| `([\w-]+)` \|.*`fedsync(?:\[(.+?)\])?` \|$", documented, re.MULTILINE)
    assert {name for name, _ in listed} == {each.name for each in FOLDER.iterdir() if each.is_dir()}
    assert set(SCORES) <= {name for name, _ in listed}
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for name, wanted in listed:
        readme = (FOLDER / name / "README.md").read_text(encoding="utf-8")
        assert len(readme.splitlines()) <= 50, f"{name}: a screen, no more"
        assert not wanted or (set(wanted.split(",")) <= extras.keys() and f"fedsync[{wanted}]" in readme)
