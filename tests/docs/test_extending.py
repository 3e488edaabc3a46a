"""The parts that docs/extending*.md add run as they stand there, and do what the pages say."""

import json
import re
import subprocess
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from tests.e2e.deployed import SMALL

DOCS = Path(__file__).parents[2] / "docs"
PAGE, FEATURES_PAGE = DOCS / "extending.md", DOCS / "extending-features.md"
HEAD = """\
from pathlib import Path
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual
from fedsync.simulation.timing_only import run_timing

def silos(names):
    return ClusterConfig.model_validate({"silos": [{"name": name, "speed": 400.0} for name in names]})

"""
RUN = """\
import data_quorum, window  # registers the kinds, as a file of the package does by lying there
config = StrategyConfig.load("data-quorum.yaml", ["predictor={kind: window, size: 3}"])
run_timing(config, ClusterConfig.load("hetero"), Path("run"))
"""


def blocks(page: Path) -> dict[str, str]:
    """Titles and texts of a page's code blocks."""
    found = re.findall(r"```(?:python|yaml) title=\"([^\"]+)\"\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return dict(found)


def carry_out(script: str, folder: Path) -> str:
    """Output of a script in a process of its own: a kind that is registered stays."""
    command = [sys.executable, "-c", HEAD + script]
    done = subprocess.run(command, cwd=folder, check=True, timeout=240, capture_output=True, text=True)
    return done.stdout


def journal_of(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "journal.jsonl").read_text().splitlines()[1:]]


@pytest.mark.slow
def test_the_barrier_and_the_predictor_run_and_commit_at_60_percent_of_the_examples(tmp_path: Path) -> None:
    for title, text in blocks(PAGE).items():
        (tmp_path / Path(title).name).write_text(text, encoding="utf-8")
    carry_out(RUN, tmp_path)
    entries = journal_of(tmp_path / "run")
    reasons = [entry["reason"] for entry in entries if any(one["type"] == "Commit" for one in entry["actions"])]
    shares = [int(percent) for reason in reasons for percent in re.findall(r"with (\d+)% of the examples", reason)[:1]]
    assert len(shares) == 20 and all(60 <= share < 100 for share in shares), "nobody waits for all of five silos"


FEATURES = 'run_virtual(StrategyConfig.load("run.yaml"), silos("ab"), Path("run"))'


def feature_run(folder: Path, plugin: str, extensions: str, rounds: int, **changes: str) -> list[dict[str, Any]]:
    """The journal of a run in a process of its own with a file of the page, changed, as its plugin."""
    text = blocks(FEATURES_PAGE)[plugin]
    for before, after in changes.items():
        assert text.count(before) == 1
        text = text.replace(before, after)
    folder.mkdir(exist_ok=True)
    (folder / plugin).write_text(text, encoding="utf-8")
    (folder / "run.yaml").write_text(
        f"name: features\nplugin: {plugin}\nextensions: {extensions}\nstop: {{rounds: {rounds}}}\n"
        "barrier: {kind: bsp}\nbalancer: {kind: fixed}\nlocal: {steps: 4, batch_size: 8}\n"
        f"{SMALL.replace('=', ': ', 1)}\n",
        encoding="utf-8",
    )
    carry_out(FEATURES, folder)
    return journal_of(folder / "run")


@pytest.mark.slow
def test_the_energy_rule_ends_a_run(tmp_path: Path) -> None:
    """Nobody measures energy in virtual time, so the rule counts 1 J an update in the second run."""
    energy = "[{kind: energy, limit_j: 5}]"
    assert feature_run(tmp_path, "energy.py", energy, 3)[-1]["reason"].endswith("3 rounds done")
    one_each = {'event.report.metrics.get("energy_j", 0.0)': "1.0"}
    journal = feature_run(tmp_path / "again", "energy.py", energy, 9, **one_each)
    assert "6 J are used, of 5" in journal[-1]["reason"]  # two silos at a time: after three rounds it is beyond 5
    config = yaml.safe_load((tmp_path / "again" / "run" / "config.yaml").read_text())
    assert config["extensions"] == [{"kind": "energy", "limit_j": 5.0}]


@pytest.mark.slow
def test_the_web_hook_hears_of_each_best_version(tmp_path: Path) -> None:
    posted: list[dict[str, Any]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posted.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    server = HTTPServer(("127.0.0.1", 0), Hook)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        url = f"http://127.0.0.1:{server.server_port}/"
        journal = feature_run(tmp_path, "web_hook.py", f"[{{kind: web-hook, url: '{url}'}}]", 3)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
    best = [action for entry in journal for action in entry["actions"] if action["type"] == "KeepBest"]
    assert best and [each["version"] for each in posted] == [each["score"]["version"] for each in best]


OUTLIERS = """\
from server_app import WithoutOutliers, app
small = "task={kind: mlp, data: {kind: blobs, samples: 200}}"
config = StrategyConfig.load("bsp", [small, "stop.rounds=3"]).with_policies({"aggregation": WithoutOutliers(most=1.0)})
print(*run_virtual(config, silos("abc"), Path("run"))["notes"])
"""


@pytest.mark.slow
def test_the_aggregation_leaves_out_the_longest_updates(tmp_path: Path) -> None:
    """Of three silos one is longer than the median in each round."""
    (tmp_path / "server_app.py").write_text(blocks(PAGE)["server_app.py"], encoding="utf-8")
    said = carry_out(OUTLIERS, tmp_path)
    counts = re.findall(r" (\d+) times", said)
    assert "NoOutliers left out updates in 3 commits: " in said and sum(map(int, counts)) == 3
