"""Real processes, and owners with privacy budgets: runs add up, and who has nothing left is missing from the result."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cli import app
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.ops.runs import stop_run, submit_run
from fedsync.privacy.accounting import epsilon, shown
from fedsync.privacy.release import Release
from fedsync.server.run_folder import Phase, phase
from tests.e2e.deployed import deployed, wait_for, write_files

SILOS = ("berlin", "paris", "rome")
MOST, ENDLESS = 100.0, 100_000
DELTA, TRAIN, BATCH, STEPS, ROUNDS = 1e-3, 50, 10, 2, 2
EACH = Release(BATCH / TRAIN, 2.0)
"""Release of each step."""
RUN = STEPS * (1 + ROUNDS)
"""Steps of a whole run: an estimate of the scale on which updates are sealed, and the rounds."""

STRATEGY = [
    "task={kind: csv, file: 'data:patients', target: ill, test_share: 0.1, standardise: {x: [0, 1], y: [0, 1]}}",
    f"local={{steps: {STEPS}, batch_size: {BATCH}, threads: 1}}",
    f"silos=[{', '.join(SILOS)}]",
    "cipher={kind: bfv, members: 2, metrics: plain}",
    f"privacy={{kind: dp-sgd, clip: 1.0, noise_multiplier: {EACH.noise}}}",
]


def files(folder: Path) -> None:
    """Write the server's file and the owners' files. Berlin's budget lacks the last order of a second run."""
    keys = emulated_keys(SILOS, folder / "keys")
    for index, name in enumerate(SILOS):
        drawn = np.random.default_rng(index).normal(size=(TRAIN + 5, 2))
        rows = [f"{x:.3f},{y:.3f},{int(x + y > 0)}" for x, y in drawn]
        data = folder / f"{name}-data" / "patients.csv"
        data.parent.mkdir()
        data.write_text("\n".join(["x,y,ill", *rows]) + "\n")

    def own(name: str) -> str:
        most = epsilon({EACH: 2 * RUN - STEPS}, DELTA) if name == "berlin" else MOST
        return (
            f"keys: {keys.silos[name]}, data: {{patients: {name}-data/patients.csv}}, limits: {{batch_size: 1, "
            f"samples: 1}}, privacy: {{patients: {{epsilon: {most}, delta: {DELTA}, examples: {TRAIN}}}}},"
        )

    write_files(folder, SILOS, f"keys: {keys.server_file},", own)


def begin(folder: Path, name: str, rounds: int, silos: int) -> Path:
    """Submit a run that begins with so many silos, and return its folder."""
    config = ServerStartConfig.load(folder / "server.yaml")
    more = [f"stop.rounds={rounds}", f"min_silos={silos}"]
    return submit_run(config, StrategyConfig.load("fedavg", [*STRATEGY, *more]), folder / name)


def summary_of(out: Path) -> dict[str, Any]:
    """Wait for a run's end, and return its summary."""
    wait_for(lambda: phase(out) is Phase.OVER, "the run did not end", 300.0)
    summary: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return summary


def tells(out: Path, text: str) -> bool:
    return (out / "journal.jsonl").exists() and text in (out / "journal.jsonl").read_text()


def spent(folder: Path, silo: str) -> tuple[Sequence[tuple[int, str]], str]:
    """Return what ``fedsync silo privacy`` prints: steps and epsilon of each run and of all together, and the rest."""
    done = CliRunner().invoke(app, ["silo", "privacy", "--silo", str(folder / f"{silo}.yaml")])
    assert done.exit_code == 0, done.output
    rows = re.findall(r"^\W*\S.*?\s(\d+)\W+(?:2\W+)?(\d+\.\d{3})\W*$", done.output, re.MULTILINE)
    (left,) = re.findall(r"left\W+(\d+\.\d{3})", done.output)
    return [(int(steps), cost) for steps, cost in rows], left


def cost(steps: int) -> tuple[int, str]:
    return steps, shown(epsilon({EACH: steps}, DELTA))


@pytest.mark.full
def test_budgets_add_up_over_runs_and_a_run_ends_without_the_silo_that_has_nothing_left(tmp_path: Path) -> None:
    files(tmp_path)
    with deployed(tmp_path, SILOS):
        first = summary_of(begin(tmp_path, "first", ROUNDS, silos=3))
        assert first["rounds"] == ROUNDS and not first["notes"], first["notes"]
        for name in SILOS:
            rows, _ = spent(tmp_path, name)
            assert rows == [cost(RUN), cost(RUN)], "one run, and all together"

        out = begin(tmp_path, "second", ENDLESS, silos=2)
        wait_for(lambda: tells(out, "berlin answers BUDGET"), "nobody is refused", 300.0)
        stop_run(out)
        second = summary_of(out)
        assert any("berlin is missing since" in note and "answers BUDGET" in note for note in second["notes"])
        assert spent(tmp_path, "berlin") == ([cost(RUN), cost(RUN - STEPS), cost(2 * RUN - STEPS)], "0.000")
        for name in ("paris", "rome"):
            (before, more, together), left = spent(tmp_path, name)
            assert before == cost(RUN) and more == cost(more[0]) and together == cost(RUN + more[0])
            assert more[0] >= STEPS and 0 < float(left) < MOST
