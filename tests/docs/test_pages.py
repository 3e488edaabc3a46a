"""What README and the pages say can be done as they say it."""

import inspect
import os
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

import fedsync
from fedsync.common.processes import OWNER
from fedsync.config.run_spec import RunSpec
from fedsync.flower import payloads
from fedsync.flower.timeouts import Timeouts
from fedsync.trainer.client import TrainerClient, stop_trainers
from fedsync.trainer.protocol import STATE, AskModel, Describe, Hello, Identity, InitialModel, exchange
from fedsync.trainer.refusals import MEANINGS
from tests.flower.grid import DirectGrid, silos_in_this_process
from tests.test_deploy import takes

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """Title ("" without one) and text of the code blocks in a language."""
    pattern = rf"```{language}(?: title=\"([^\"]*)\")?\n(.*?)```"
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.DOTALL)


def commands(path: Path) -> Iterator[str]:
    """The ``fedsync`` commands in a page's blocks."""
    text = path.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if language in ("", "console") and re.match(r"(\$ )?fedsync [a-z]", line):
                yield line.removeprefix("$ ").partition(" #")[0].partition(" > ")[0]


def headings(path: Path) -> set[str]:
    """Anchors of a page, as GitHub and MkDocs make them of headings in plain words."""
    lines = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.stem)
def test_every_relative_link_outside_the_site_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    relative = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert page != README or "docs/index.md" in relative
    for link in relative:
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_files_that_pages_for_contributors_name_are_there() -> None:
    added = {"NAME.py", "data_quorum.py", "test_data_quorum.py", "window.py"}
    for page in (ROOT / "CONTRIBUTING.md", DOCS / "extending.md", DOCS / "internals" / "architecture.md"):
        named = re.findall(r"`(?:python )?([\w./-]+/[\w.-]+\.py)", page.read_text(encoding="utf-8"))
        missing = [name for name in named if not ((ROOT / name).exists() or (ROOT / "fedsync" / name).exists())]
        assert {Path(name).name for name in missing} <= added, page


def test_every_word_of_a_refusal_is_explained_as_the_log_explains_it() -> None:
    rows = [f"| {code.name} | {meaning} | {remedy} |" for code, (meaning, remedy) in MEANINGS.items()]
    assert "\n".join(rows) in (DOCS / "deployment.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist_with_their_options(page: Path) -> None:
    for command in commands(page):
        assert takes(shlex.split(command)[1:]), command


def test_commands_are_found() -> None:
    assert [command for command in commands(README) if command.startswith("fedsync run fsp --runtime virtual")]
    assert [command for command in commands(DOCS / "quick-start.md") if command.startswith("fedsync report")]


def test_figures_for_choosing_are_those_of_the_benchmarks() -> None:
    def rows(page: str, heading: str) -> dict[str, list[str]]:
        part = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n## ")[0]
        cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line]
        return {row[0]: row[1:] for row in cells}

    measured = rows("benchmarks.md", "Time to target accuracy")
    # Ratios with their range, "1.38 (1.00-1.83)"; the row that they are to has seconds, "27.7 s".
    ratios = {name: ["1.00" if cell.endswith(" s") else cell[:4] for cell in row] for name, row in measured.items()}
    repeated = {name: row for name, row in rows("choosing.md", "By your machines").items() if name in measured}
    repeated.pop("strategy")
    assert len(repeated) > 5 and all(len(row) == 3 for row in repeated.values())
    for name, row in repeated.items():
        assert row == ratios[name][:3], f"choosing.md repeats other figures for {name}"


def test_compositions_are_those_of_the_shipped_files() -> None:
    (text,) = (text for title, text in blocks(DOCS / "extending.md", "yaml") if title == "compositions")
    usual = {"predictor": {"kind": "ema", "alpha": 0.2}, "balancer": {"kind": "fixed"}}
    shipped = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in ROOT.glob("strategies/*.yaml")}
    parts = ("predictor", "balancer", "barrier", "aggregation")
    wanted = {name: {part: whole[part] for part in parts} for name, whole in shipped.items() if name[-3:] != "-he"}
    assert {name: usual | found for name, found in yaml.safe_load(text).items()} == wanted


MY_MODEL = """\
import torch

class Net(torch.nn.Linear):
    def __init__(self):
        super().__init__(4, 2)
"""
MY_DATA = """\
import torch

def load(index, count):
    \"\"\"The sign of the first of four numbers.\"\"\"
    inputs = torch.randn(64, 4, generator=torch.Generator().manual_seed(index))
    share = torch.utils.data.TensorDataset(inputs, (inputs[:, 0] > 0).long())
    return share, share
"""


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Path]:
    """A folder with the files of from-fedavg.md, and the user's own modules."""
    for language in ("python", "yaml"):
        for title, text in blocks(DOCS / "from-fedavg.md", language):
            (tmp_path / title.replace(", ", "-")).write_text(text, encoding="utf-8")
    (tmp_path / "my_model.py").write_text(MY_MODEL, encoding="utf-8")
    (tmp_path / "my_data.py").write_text(MY_DATA, encoding="utf-8")
    yield tmp_path
    for name in ("my_model", "my_data"):
        sys.modules.pop(name, None)


def main_of(path: Path) -> Any:
    """What a ServerApp's file calls ``main``; modules beside it are found, as by Flower."""
    names: dict[str, Any] = {"__file__": str(path), "__name__": "server_app"}
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), names)
    return names["main"]


def test_flowers_side_of_the_ten_lines_is_as_shown(app: Path) -> None:
    assert callable(main_of(app / "server_app.py-before"))
    FedAvg(fraction_train=1.0, min_available_nodes=5)
    theirs, ours = (inspect.signature(start).parameters for start in (FedAvg.start, fedsync.FedSync.start))
    assert theirs.keys() <= ours.keys()
    before, after = ((app / f"server_app.py-{when}").read_text().splitlines() for when in ("before", "after"))
    gone, come = ([line for line in one if line not in two] for one, two in ((before, after), (after, before)))
    assert len(gone) == 2 and all("FedAvg" in line for line in gone)
    assert len(come) == 3


def test_the_ten_lines_train(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    begin = fedsync.FedSync.start

    def start(self: fedsync.FedSync, grid: Grid, num_rounds: int, **arguments: Any) -> Any:
        """As shown, but one round only, and no pauses between two looks at silos that answer at once."""
        assert num_rounds == self.config.stop.rounds == 40
        self._timing = Timeouts(poll_s=0.001)
        results.append(begin(self, grid, num_rounds=1, **arguments))
        return results[-1]

    monkeypatch.setattr(fedsync.FedSync, "start", start)
    torch.manual_seed(1)  # the page's model begins with random weights
    with silos_in_this_process():
        main_of(app / "server_app.py-after")(DirectGrid(5), None)
    (result,) = results
    assert max(result.train_metrics_clientapp) == 1
    # Half of the labels are right by chance.
    assert result.evaluate_metrics_clientapp[1]["accuracy"] > 0.8
    assert np.isfinite(payloads.from_arrays(result.arrays)[0]).all()


def test_a_silos_trainer_finds_what_the_task_imports(
    app: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = tmp_path_factory.mktemp("s")  # a socket's path may not be long
    state.chmod(0o700)
    monkeypatch.setenv(STATE, str(state))
    monkeypatch.setenv(OWNER, str(os.getpid()))
    spec = RunSpec.of(fedsync.StrategyConfig.load(str(app / "strategy.yaml")), None, 5)
    try:
        # A process of its own, elsewhere, as at a silo; it takes a second or two to start.
        link = TrainerClient(Identity(spec.dump(), index=3, name="silo-3"))
        (hello, _), (model, _) = exchange(link.ask, Describe()), exchange(link.ask, AskModel())
        assert isinstance(hello, Hello) and hello.facts.examples == 64
        assert isinstance(model, InitialModel) and model.layout.size == 4 * 2 + 2
    finally:
        stop_trainers(state)


def test_the_client_is_fedsyncs(app: Path) -> None:
    from fedsync.flower.client_app import app as silo_app

    names: dict[str, Any] = {}
    exec((app / "client_app.py").read_text(encoding="utf-8"), names)
    assert names["app"] is silo_app


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_examples_of_yaml_are_yaml(page: Path) -> None:
    for _, text in blocks(page, "yaml"):
        assert isinstance(yaml.safe_load(text), dict)
