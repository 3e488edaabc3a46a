"""The five lines of from-fedavg.md, applied to a stock Flower app as its reader would, train and are balanced."""

import importlib
import inspect
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from flwr.common.config import get_project_config, validate_config
from flwr.serverapp.strategy import FedAvg

import fedsync
from fedsync.common.processes import free_ports
from fedsync.flower.process_environment import QUIET
from fedsync.server.timeouts import Timeouts
from fedsync.silo.owner.app_files import APP
from fedsync.silo.protocol import STATE
from fedsync.silo.session.trainer_client import stop_trainers
from fedsync.simulation.run import run_virtual
from tests.client.stock_app import STOCK
from tests.flower.grid import DirectGrid, silos_in_this_process

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "from-fedavg.md").read_text(encoding="utf-8")
PACKAGE = "pytorchexample"
BLOCKS = dict(re.findall(r'```\w+ title="([^"]*)"\n(.*?)```', PAGE, re.DOTALL))
DIFFS = {title: text for title, text in BLOCKS.items() if f'diff title="{title}"' in PAGE}


@pytest.fixture(autouse=True)
def _out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A strategy without ``out`` makes its folder here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def changed(text: str, diff: str) -> str:
    """A file with the hunks of a diff, each of whose old lines have to be there, once and together."""
    for hunk in diff.split("@@\n"):
        lines = hunk.splitlines()
        old = "\n".join(line[1:] for line in lines if line[0] != "+")
        new = "\n".join(line[1:] for line in lines if line[0] != "-")
        if not old:  # a line that comes alone is an import
            text = new + "\n" + text
            continue
        assert text.count(f"{old}\n") == 1, old
        text = text.replace(f"{old}\n", f"{new}\n")
    return text


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Path]:
    """The stock app, under the name that the page calls it, with the page's changes."""
    folder = tmp_path / "app"
    shutil.copytree(STOCK / "digitsapp", folder / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(STOCK / "pyproject.toml", folder)
    for path in folder.rglob("*.*"):
        path.write_text(path.read_text(encoding="utf-8").replace("digitsapp", PACKAGE), encoding="utf-8")
    for title, diff in DIFFS.items():
        (folder / title).write_text(changed((folder / title).read_text(encoding="utf-8"), diff), encoding="utf-8")
    yield folder
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]


def test_there_are_five_lines() -> None:
    come, gone = (sum(line[:1] == sign for text in DIFFS.values() for line in text.splitlines()) for sign in "+-")
    assert (come, gone) == (5, 4) and "Five lines" in PAGE


def test_flowers_own_check_of_apps_passes(app: Path) -> None:
    valid, errors, _ = validate_config(get_project_config(app), check_module=True, project_dir=app)
    assert valid, errors


def test_our_start_takes_what_theirs_does() -> None:
    theirs, ours = (inspect.signature(start).parameters for start in (FedAvg.start, fedsync.FedSync.start))
    assert theirs.keys() <= ours.keys()


@pytest.mark.slow
def test_the_app_trains(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results = []
    begin = fedsync.FedSync.start

    def start(self: fedsync.FedSync, **arguments: Any) -> Any:
        """As the app does, but without pauses between two looks at silos that answer at once."""
        self._timing = Timeouts(poll_s=0.001)
        results.append(begin(self, **arguments))
        return results[-1]

    monkeypatch.setattr(fedsync.FedSync, "start", start)
    monkeypatch.setenv(APP, str(app))
    monkeypatch.syspath_prepend(app)
    monkeypatch.chdir(tmp_path)
    config = get_project_config(app)["tool"]["flwr"]["app"]["config"]
    server = importlib.import_module(f"{PACKAGE}.server_app")
    torch.manual_seed(1)  # the app's first model is drawn
    with silos_in_this_process():
        server.main(DirectGrid(2), SimpleNamespace(run_config=config))
    (result,) = results
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    assert sorted(result.evaluate_metrics_serverapp) == [0, 1, 2, 3]
    assert result.evaluate_metrics_serverapp[3]["accuracy"] > 0.5 > result.evaluate_metrics_serverapp[0]["accuracy"]
    rows = [json.loads(line) for line in (result.out / "rounds.jsonl").read_text().splitlines()]
    assert all(sum(row["batch_sizes"].values()) == 64 for row in rows)
    state = torch.load(tmp_path / "final_model.pt", weights_only=True)
    assert state["norm.num_batches_tracked"].dtype == torch.int64


def test_batches_follow_the_speeds(app: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In virtual time, by the page's file, with what the page says it wants."""
    (app / "strategy.yaml").write_text(BLOCKS["strategy.yaml"], encoding="utf-8")
    more = [f"task.model={PACKAGE}.task:Net", "stop.rounds=3", "min_silos=3", "local.steps=5"]
    config = fedsync.StrategyConfig.load(app / "strategy.yaml", more)
    speeds = {"fast": 300.0, "middle": 200.0, "slow": 100.0}
    silos = {"silos": [{"name": name, "speed": speed} for name, speed in speeds.items()]}
    run_virtual(config, fedsync.ClusterConfig.model_validate(silos), tmp_path / "out")
    rows = [json.loads(line) for line in (tmp_path / "out" / "rounds.jsonl").read_text().splitlines()]
    assert rows[-1]["batch_sizes"] == {"fast": 48, "middle": 32, "slow": 16}


def test_the_files_of_the_page_are_good(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (app / "strategy.yaml").write_text(BLOCKS["strategy.yaml"], encoding="utf-8")
    names: dict[str, Any] = {"__file__": str(app / "from_yaml.py")}
    exec(BLOCKS["from_yaml.py"], names)
    config = names["strategy"].config
    assert (config.stop.rounds, config.task.folder) == (40, str(app))


@pytest.mark.parametrize("call", re.findall(r"FedSync\.\w+\([^)]*\)", PAGE))
def test_what_the_page_calls_can_be_called(call: str) -> None:
    names = {"FedSync": fedsync.FedSync, "fraction_evaluate": 0.5, "keys": Path("server.json"), "Path": Path}
    text = call.replace("=...", "=keys")
    if "from_yaml" not in text:
        made = eval(text.replace("(", "(task={'kind': 'digits'}, ", 1), names)
        assert isinstance(made, fedsync.FedSync)


def shown_by_flwr(app: Path, tmp_path: Path) -> str:
    """What the page's commands print, in an environment without any of ours; then what they left running is ended."""
    home, state = tmp_path / "flwr", Path("/tmp") / f"fsa-{os.getpid()}"
    state.mkdir(mode=0o700)
    names = ("FLWR_LOCAL_SUPERLINK_HTTP_API_PORT", "FLWR_LOCAL_CONTROL_API_PORT")
    ports = {name: str(port) for name, port in zip(names, free_ports(2), strict=True)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {**os.environ, **QUIET, **ports, "PATH": path, "FLWR_HOME": str(home), STATE: str(state)}
    (exported,) = re.findall(r"\$ export (\w+)=1", PAGE)
    (command,) = re.findall(r"\$ (flwr run .*)", PAGE)
    try:
        run = subprocess.run(
            command.split(), cwd=app, env={**environment, exported: "1"}, capture_output=True, text=True, timeout=300
        )
    finally:
        for process in Path("/proc").glob("[0-9]*"):
            try:
                ours = f"FLWR_HOME={home}".encode() in (process / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if ours:
                os.kill(int(process.name), signal.SIGTERM)
        stop_trainers(state)
        shutil.rmtree(state)
    return run.stdout + run.stderr


@pytest.mark.full
def test_flwr_run_shows_rounds(app: Path, tmp_path: Path) -> None:
    shown = shown_by_flwr(app, tmp_path)
    rounds = re.findall(r"\[ROUND (\d)/3\] [\d.]+ s; loss [\d.]+; (?:accuracy [\d.]+; )?batches silo-0 \d+", shown)
    assert rounds == ["1", "2", "3"], shown
    (folder,) = re.findall(r"files of the run: (\S+)", shown)
    assert (Path(folder) / "summary.json").exists()


@pytest.mark.full
def test_flwr_run_shows_the_users_own_line(app: Path, tmp_path: Path) -> None:
    file = app / PACKAGE / "client_app.py"
    file.write_text(
        file.read_text().replace("    model.load_state_dict(", "    {}['gamma']\n    model.load_state_dict(", 1)
    )
    (line,) = (number for number, text in enumerate(file.read_text().splitlines(), 1) if "gamma" in text)
    assert re.search(rf"{PACKAGE}/client_app\.py, line {line}: KeyError: 'gamma'", shown_by_flwr(app, tmp_path))
