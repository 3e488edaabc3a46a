"""Kills of every process of a run at a random moment: is best.pt the version that best.json names?

A run on real processes of this machine is killed whole with SIGKILL, examined, resumed, killed again, and so on. After
each kill best.pt is loaded and evaluated with the data of each silo whose evaluation of the named version is in the
journal. The sums must be those that the silo reported then. At the end the version in summary.json is tested likewise.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from bench.common import print_table
from fedsync.common.files import file_digest
from fedsync.core.orders import Cursor, Split, Subject
from fedsync.extras.cross_site.site_evaluation import sites_of_run
from fedsync.observe.quality.kept_models import BEST, STATED
from fedsync.train.weights import load_model

SILOS = "silos:\n- {name: a, speed: 2000.0}\n- {name: b, speed: 1200.0}\n"
QUICK = ("local.steps=20", "local.batch_size=32", "task={kind: digits, partition: {kind: dirichlet, alpha: 0.3}}")
START_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--strategies", nargs="+", default=["fedavg", "asp", "fsp"])
    parser.add_argument("--kills", type=int, default=10, help="of each strategy")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    luck, rows = random.Random(options.seed), []
    for strategy in options.strategies:
        with tempfile.TemporaryDirectory() as folder:
            rows += campaign(strategy, options.kills, Path(folder), luck)
    columns = list(rows[0])
    print_table("best.pt after kill -9 of every process", columns, [[row[name] for name in columns] for row in rows])
    if any(row["equal"] != "yes" for row in rows):
        sys.exit("best.pt is not what is said of it")


def campaign(strategy: str, kills: int, folder: Path, luck: random.Random) -> list[dict[str, Any]]:
    """One run that is killed so often, and then comes to its end."""
    out, silos, rows = folder / "run", folder / "silos.yaml", []
    silos.write_text(SILOS)
    last = 6 * (kills + 1) * (1 if strategy == "fedavg" else 2)
    changes = [f"--set={each}" for each in (f"stop={{rounds: {last}}}", *QUICK)]
    begin = ["run", strategy, "--silos", str(silos), "--runtime", "local", "--out", str(out), *changes]
    for number in range(kills):
        process = _start(begin if not number else ["run", "--resume", str(out)], folder)
        _wait(out, process, _commits(out) + luck.randint(2, 5))
        time.sleep(luck.uniform(0.0, 0.5))
        _kill(process)
        rows.append(_row(strategy, out, f"killed after {_commits(out)} commits"))
    process = _start(["run", "--resume", str(out)], folder)
    if process.wait(600):
        raise SystemExit((folder / "log").read_text()[-2000:])
    stated = json.loads((out / "summary.json").read_text())["best"]
    row = _row(strategy, out, "came to its end")
    same = stated["version"] == row["version"] and stated["digest"].startswith(row["digest"])
    return [*rows, row if same else {**row, "equal": "no: the summary says another"}]


def _start(command: list[str], folder: Path) -> subprocess.Popen[bytes]:
    with (folder / "log").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "fedsync", *command], stdout=log, stderr=log, start_new_session=True
        )


def _wait(out: Path, process: subprocess.Popen[bytes], commits: int) -> None:
    end_s = time.monotonic() + START_S
    while _commits(out) < commits:
        if process.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(f"the run ended, or stands still: {(out.parent / 'log').read_text()[-2000:]}")
        time.sleep(0.05)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """All that the run has started, none of which may clean up."""
    family = psutil.Process(process.pid)
    for each in [family, *family.children(recursive=True)]:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    process.wait()


def _entries(out: Path) -> Iterator[dict[str, Any]]:
    """Of the journal; a line in whose middle its writer died is none."""
    path = out / "journal.jsonl"
    for line in path.read_text().splitlines()[1:] if path.exists() else ():
        try:
            yield json.loads(line)
        except ValueError:
            return


def _commits(out: Path) -> int:
    return sum(action["type"] == "Commit" for entry in _entries(out) for action in entry["actions"])


def _row(strategy: str, out: Path, what: str) -> dict[str, Any]:
    path = out / BEST
    stated = json.loads((out / STATED).read_bytes()).get(file_digest(path)) if path.exists() else None
    if stated is None:
        return {"strategy": strategy, "moment": what, "version": None, "digest": "", "silos": 0, "equal": "no: unknown"}
    told = _told(out, stated["version"])
    equal = bool(told)
    for site in sites_of_run(out, sorted(told)) if told else ():
        with site.trainer() as trainer:
            loaded = load_model(path, trainer.facts.layout, trainer.facts.names)
            evaluation = trainer.judge(loaded, Cursor(), Split.VALIDATION, Subject.BEST, gains=False)
        name = site.name
        equal &= (evaluation.loss, evaluation.correct) == (told[name]["loss"], told[name]["correct"])
    digest = hashlib.sha256((out / BEST).read_bytes()).hexdigest()[:12]
    about = {"strategy": strategy, "moment": what, "version": stated["version"], "digest": digest}
    return {**about, "silos": len(told), "equal": "yes" if equal else "no"}


def _told(out: Path, version: int) -> dict[str, dict[str, Any]]:
    """What silos found in a version, by their names."""
    told: dict[str, dict[str, Any]] = {}
    for entry in _entries(out):
        for event in entry["events"]:
            if event["type"] == "UpdateArrived" and event["report"]["base_version"] == version:
                told[event["meta"]["silo"]] = event["report"]["evaluation"]
            elif event["type"] == "Evaluated" and event["version"] == version and event.get("evaluation"):
                told[event["silo"]] = event["evaluation"]
    return told


if __name__ == "__main__":
    main()
