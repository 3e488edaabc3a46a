"""Time of a short run on real processes: seconds by phase, and processor seconds by program.

Starts ``fedsync run`` with two silos, and checks programs and files of the run every tenth of a second. A phase ends
when a program of the next phase starts, or when a file is written:

| phase | until |
|---|---|
| server | SuperNodes start: the SuperLink listens, and keys are made and registered |
| handing over | the ServerApp starts: ``flwr run`` has submitted the run |
| ServerApp | trainers start: the ServerApp has been imported, and has asked the silos |
| trainers | the first version: trainers have imported the user's code, loaded data and model, and trained once |
| rounds | the summary |
| end | the command returns: all processes have ended |

    python bench/cost/startup.py [--turns 3] [--example examples/quickstart-pytorch] [--out bench/results/startup.json]
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from pathlib import Path
from statistics import median

import psutil

from bench.common import print_table, write_json

PROGRAMS = {
    "fedsync run": "-m fedsync run",
    "SuperLink": "launch superlink",
    "SuperExec": "launch superexec",
    "SuperNode": "launch supernode",
    "agent": "fedsync.silo.agent.agent",
    "flwr run": "flwr run",
    "ServerApp": "flwr-serverapp",
    "trainer": "fedsync.silo.session.resident_trainer",
}
"""What stands in their command lines."""

PHASES = ("server", "handing over", "ServerApp", "trainers", "rounds", "end")
SILOS = "silos:\n  - {name: fast, speed: 3000}\n  - {name: slow, speed: 1000}\n"
MARK = "FEDSYNC_BENCH_STARTUP"
"""An environment variable, by which processes of this bench are known from others."""


class Watched:
    """The processes of one run."""

    def __init__(self) -> None:
        self.mark = uuid.uuid4().hex
        self._others = {process.pid for process in psutil.process_iter()}
        self._programs: dict[int, str] = {}
        self._processor_s: dict[int, float] = {}
        self.began_s: dict[str, float] = {}

    def look(self) -> None:
        for process in psutil.process_iter():
            if process.pid not in self._others:
                with suppress(psutil.Error):
                    self._note(process)

    def _note(self, process: psutil.Process) -> None:
        line = " ".join(process.cmdline())
        program = next((name for name, words in PROGRAMS.items() if words in line), None)
        if program is None or process.environ().get(MARK) != self.mark:
            return
        self._programs[process.pid] = program
        times = process.cpu_times()
        self._processor_s[process.pid] = times.user + times.system
        self.began_s[program] = min(process.create_time(), self.began_s.get(program, float("inf")))

    def processor_s(self) -> dict[str, float]:
        total: Counter[str] = Counter()
        for number, program in self._programs.items():
            total[program] += self._processor_s[number]  # type: ignore[assignment]
        return dict(total)


def turn(example: Path, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds of each phase, and processor seconds of each program."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / example.name
        shutil.copytree(example, folder)
        (folder / "two.yaml").write_text(SILOS)
        watched, out = Watched(), folder / "out"
        command = ["run", "strategy.yaml", "--silos", "two.yaml", "--out", "out", "--set", "min_silos=2"]
        environment = {**os.environ, MARK: watched.mark}
        begun_s = time.time()
        process = subprocess.Popen(
            [sys.executable, "-m", "fedsync", *command, "--set", f"stop.rounds={rounds}"],
            cwd=folder, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT,
        )  # fmt: skip
        while process.poll() is None:
            watched.look()
            if (out / "rounds.jsonl").exists() and (out / "rounds.jsonl").stat().st_size:
                watched.began_s.setdefault("first version", time.time())
            time.sleep(0.1)
        ended_s = time.time()
        assert process.returncode == 0, "the run failed"
        began = watched.began_s
        summary_s = (out / "summary.json").stat().st_mtime
    marks = [
        begun_s, began["SuperNode"], began["ServerApp"], began["trainer"], began["first version"], summary_s, ended_s
    ]  # fmt: skip
    seconds = {phase: after - before for phase, (before, after) in zip(PHASES, pairwise(marks), strict=True)}
    return seconds, watched.processor_s()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--example", type=Path, default=Path("examples/quickstart-pytorch"))
    parser.add_argument("--out", type=Path, default=Path("bench/results/startup.json"))
    options = parser.parse_args()
    begun_load = os.getloadavg()[0]
    turns = [turn(options.example, options.rounds) for _ in range(options.turns)]
    phases = {phase: [seconds[phase] for seconds, _ in turns] for phase in PHASES}
    programs = {name: [processor.get(name, 0.0) for _, processor in turns] for name in PROGRAMS}
    title = f"{options.example.name}, two silos, {options.rounds} rounds; {os.cpu_count()} processors"
    load = (begun_load, os.getloadavg()[0])
    rows = [(name, *(f"{each:.1f}" for each in (median(taken), *taken))) for name, taken in phases.items()]
    totals = [sum(seconds.values()) for seconds, _ in turns]
    rows.append(("all", *(f"{each:.1f}" for each in (median(totals), *totals))))
    columns = [f"turn {number}" for number in range(1, options.turns + 1)]
    print_table(f"{title}, load {load[0]:.1f} to {load[1]:.1f}", ("phase [s]", "median", *columns), rows)
    rows = [(name, *(f"{each:.1f}" for each in (median(taken), *taken))) for name, taken in programs.items()]
    print_table("", ("program [processor s]", "median", *columns), rows)
    write_json(options.out, {"load": load, "phases": phases, "programs": programs})


if __name__ == "__main__":
    main()
