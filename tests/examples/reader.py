"""What somebody does who reads an example's README: runs its commands, and looks at what came out."""

import json
import re
import shlex
import shutil
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
    "lora": 0.9,
    "quickstart-huggingface": 0.85,
    "quickstart-lightning": 0.6,
    "quickstart-pytorch": 0.8,
    "segmentation": 0.8,
    "sklearn": 0.9,
    "vit-adapters": 0.7,
}
"""What each example's model reaches at least."""

TRAVELLING = {"lora": 8192}
"""Values that travel, of examples whose README says so."""

LIBRARIES = {
    "lightning": ["lightning"],
    "quickstart-lightning": ["lightning"],
    "huggingface": ["transformers", "accelerate"],
    "quickstart-huggingface": ["transformers"],
    "lora": ["transformers", "peft"],
    "segmentation": ["monai"],
}
"""What an example needs that `make test` does without."""

PUBLISHED = [name for name in SCORES if name.startswith("quickstart-")]
"""Examples that are Flower apps, with a diff from what was published."""


def commands(example: Path) -> dict[str, list[str]]:
    """The README's commands, by the folder that each writes to."""
    lines = re.findall(r"^fedsync (run .*)$", (example / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    return {line.rpartition("runs/")[2]: shlex.split(line) for line in lines}


def carry_out(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a command of ``fedsync`` in this process, which ends well."""
    monkeypatch.setattr("sys.argv", ["fedsync", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert not end.value.code


def check(example: Path, run: str) -> None:
    rows = [json.loads(line) for line in (example / "runs" / run / "rounds.jsonl").read_text().splitlines()]
    summary: dict[str, Any] = json.loads((example / "runs" / run / "summary.json").read_text())
    speeds = re.findall(r"name: (\w+), speed: (\d+)", (example / "silos.yaml").read_text())
    sizes = rows[-1]["batch_sizes"]
    slowest, *_, fastest = (sizes[name] for name, _ in sorted(speeds, key=lambda pair: int(pair[1])))
    assert slowest < fastest, "batches follow the speeds"
    assert summary["accuracy"] > SCORES[example.name]
    if run != "encrypted" and example.name in TRAVELLING:
        orders = sum(silo["orders"] for silo in summary["silos"])
        assert summary["bytes_up"] == orders * 4 * TRAVELLING[example.name]


def changes(example: Path) -> list[tuple[str, str, str]]:
    """The README's diff: files, lines as published (empty where there was none), and what stands there now."""
    (diff,) = re.findall(r"```diff\n(.*?)```", (example / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    found, file, before = [], "", ""
    for line in diff.splitlines():
        if line.startswith("+"):
            found.append((file, before, line[1:]))
            before = ""
        elif line.startswith("-"):
            before = line[1:]
        else:
            file = line.strip()
    return found


def as_published(example: Path, folder: Path) -> Path:
    """The app before its diff."""
    shutil.copytree(example, folder)
    for file, before, now in changes(example):
        text = (folder / file).read_text(encoding="utf-8")
        assert f"\n{now}\n" in text, f"{file} has the line {now}"
        text = text.replace(f"\n{now}\n", f"\n{before}\n" if before else "\n", 1)
        (folder / file).write_text(text, encoding="utf-8")
    return folder
