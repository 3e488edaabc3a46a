"""The examples of docs/your-loop.md and docs/flower-clientapp.md work as they stand, and are balanced."""

import json
import re
from pathlib import Path

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

from tests.client.stock_app import stock_app
from tests.commands.call import call

DOCS = Path(__file__).parents[2] / "docs"
PAGE, CLIENTAPP = DOCS / "your-loop.md", DOCS / "flower-clientapp.md"


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["plain", "pad"])
def test_the_lines_of_the_flower_app_are_enough(cipher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = PAGE.read_text(encoding="utf-8") + CLIENTAPP.read_text(encoding="utf-8")
    blocks = dict(re.findall(r'```\w+ title="(.*?)"\n(.*?)```', text, re.DOTALL))
    changes, removed = [], ""
    for line in blocks["client_app.diff"].splitlines():
        if line.startswith("-"):
            removed = line[1:]
        elif removed:
            changes.append((removed, line[1:]))
            removed = ""
        else:
            changes.append(("\napp = ClientApp()", f"\n{line[1:]}\n\napp = ClientApp()"))
    assert len(changes) == 2, "as the page says"
    stock_app(tmp_path, changes)
    for name in ("flower.yaml", "silos.yaml"):
        (tmp_path / name).write_text(blocks[name], encoding="utf-8")
    (command,) = re.findall(r"`fedsync (run flower.yaml .*?)`", text)
    monkeypatch.chdir(tmp_path)
    call(*command.split(), "--out", "out", "--set", f"cipher={{kind: {cipher}}}")
    rows = [json.loads(line) for line in Path("out/rounds.jsonl").read_text().splitlines()]
    assert rows[-1]["batch_sizes"] == {"fast": 48, "middle": 32, "slow": 16}
    assert rows[-1]["accuracy"] > 0.85
    assert torch.load("out/model.pt", weights_only=True)["norm.num_batches_tracked"].dtype == torch.int64


@pytest.mark.slow
@pytest.mark.parametrize("cipher", ["plain", "pad"])
def test_the_example_trains_and_batches_follow_the_speeds(
    cipher: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, block in re.findall(r'```\w+ title="(.*?)"\n(.*?)```', text, re.DOTALL):
        (tmp_path / name).write_text(block, encoding="utf-8")
    (command,) = re.findall(r"^fedsync (run .*)$", text, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    call(*command.split(), "--set", f"cipher={{kind: {cipher}}}")
    rows = [json.loads(line) for line in Path("runs/own-loop/rounds.jsonl").read_text().splitlines()]
    assert rows[-1]["batch_sizes"] == {"fast": 48, "middle": 32, "slow": 16}
    assert rows[-2]["accuracy"] > 0.9
    assert Path("runs/own-loop/model.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["private_fit.py", pytest.param("lightning_fit.py", marks=pytest.mark.examples)])
def test_a_private_example_trains_and_tells_no_loss(fit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fit == "lightning_fit.py":
        pytest.importorskip("lightning")
    blocks = dict(re.findall(r'```\w+ title="(.*?)"\n(.*?)```', PAGE.read_text(encoding="utf-8"), re.DOTALL))
    before, mark, after = blocks["client_app.py"].partition("@app.train()")
    _, end, evaluation = after.partition("@app.evaluate()")
    assert mark and end
    blocks["client_app.py"] = f"{before}{blocks[fit]}\n\n{end}{evaluation}"
    for name, block in blocks.items():
        (tmp_path / name).write_text(block, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    call("run", "private.yaml", "--silos", "silos.yaml", "--runtime", "virtual", "--out", "out")
    rows = [json.loads(line) for line in Path("out/rounds.jsonl").read_text().splitlines()]
    assert len(rows) >= 3
    assert all(row.get(figure) is None for row in rows for figure in ("loss", "train_loss", "accuracy"))
    images, labels = (torch.from_numpy(each) for each in load_digits(return_X_y=True))
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    model.load_state_dict(torch.load("out/model.pt", weights_only=True))
    right = (model(images.float() / 16).argmax(dim=1) == labels).float().mean()
    assert right > 0.7, "a model of chance is right in a tenth"
