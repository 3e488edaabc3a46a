"""The command line as a person uses it: exit codes, messages, and nothing left behind."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from fedsync.cli import main

SILOS = """
silos:
  - {name: a, speed: 50000.0}
  - {name: b, speed: 25000.0}
"""


def fedsync(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "fedsync", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=240, check=False)


Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Call]:
    """The same without a process, which would load Python anew: exit code, output, errors."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedsync", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    monkeypatch.chdir(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    yield run
    signal.signal(signal.SIGTERM, before)


@pytest.fixture
def silos(tmp_path: Path) -> Path:
    path = tmp_path / "two.yaml"
    path.write_text(SILOS)
    return path


def test_run_in_virtual_time_prints_who_waited(silos: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = fedsync(
        "run", "lb-bsp", "--silos", silos, "--runtime", "virtual", "--set", "stop.rounds=2", "--seed", "3",
        "--out", out, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "round    2/2" in done.stdout and "who waited for whom" in done.stdout
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["strategy"], summary["runtime"], summary["seed"], summary["rounds"]) == ("lb-bsp", "virtual", 3, 2)


def test_compare_prints_ratios_to_the_first(call: Call, silos: Path, tmp_path: Path) -> None:
    code, shown, errors = call(
        "compare", "fedavg", "lb-bsp", "--silos", silos, "--seeds", "2", "--set", "stop.rounds=3",
        "--target-accuracy", "0.01", "--out", "cmp",
    )  # fmt: skip
    assert code == 0, errors
    fedavg, balanced = json.loads((tmp_path / "cmp" / "compare.json").read_text())
    # By hand: FedAvg's round is 640 / 25,000 s. Balanced, 1,280 samples at 75,000/s, from round two on.
    assert fedavg["seconds"] == pytest.approx(3 * 0.0256)
    assert balanced["seconds"] == pytest.approx(0.0256 + 2 * 1280 / 75_000, rel=0.02)
    assert (fedavg["ratio"], fedavg["reached"]) == (1.0, 2)
    assert f"{balanced['ratio']:.3f}" in shown


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "lb-bspp"], ["lb-bspp", "Did you mean 'lb-bsp'"]),
        (["run", "lb-bsp", "--set", "local.stepps=3"], ["local.stepps", "Did you mean 'steps'"]),
        (["run", "lb-bsp", "--set", "local.learning_rate=1e-3"], ["1e-3", "0.001"]),
        (["run", "lb-bsp", "--silos", "nope"], ["nope", "hetero"]),
        (["compare", "lb-bsp", "lb-bsp"], ["named 'lb-bsp'"]),
        (["validate", "broken.yaml"], ["broken.yaml, line 3"]),
        (["run", "lb-bsp", "--runtime", "moon"], ["moon"]),
    ],
)
def test_the_users_mistakes_exit_with_2(call: Call, arguments: list[str], expected: list[str], tmp_path: Path) -> None:
    (tmp_path / "broken.yaml").write_text("name: x\nstop: {rounds: 1\n")
    code, _, errors = call(*arguments)
    assert code == 2, errors
    assert all(part in errors for part in expected), errors


def test_a_failing_task_exits_with_1_and_says_why(silos: Path, tmp_path: Path) -> None:
    (tmp_path / "task.py").write_text(
        "import torch\nfrom torch.utils.data import TensorDataset\nfrom fedsync import SiloData, Task\n\n"
        "class Broken(Task):\n"
        "    def model(self):\n        return torch.nn.Linear(2, 2)\n"
        "    def data(self, slot):\n"
        "        data = TensorDataset(torch.zeros(64, 2), torch.zeros(64, dtype=torch.long))\n"
        "        return SiloData(data, data)\n"
        "    def loss(self, model, batch):\n        raise RuntimeError('sensor unplugged')\n"
    )
    options = ["--silos", silos, "--runtime", "local", "--set", "task={kind: custom, file: task.py}"]
    done = fedsync("run", "fedavg", *options, "--out", tmp_path / "out", cwd=tmp_path)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "every silo failed" in done.stderr and "sensor unplugged" in done.stderr


@pytest.mark.parametrize(("name", "kind"), [("hetero", "a silo file with 5 silos"), ("pssp", "strategy 'pssp'")])
def test_shipped_files_are_valid(call: Call, name: str, kind: str) -> None:
    code, shown, errors = call("validate", name)
    assert code == 0 and kind in shown, errors


def test_schema_is_json_schema(call: Call) -> None:
    schema = json.loads(call("schema")[1])
    assert schema["type"] == "object" and {"stop", "balancer", "task"} <= set(schema["required"])


@pytest.fixture
def endless_run(silos: Path, tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A local run in its second round or later, with no end in sight."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedsync", "run", "fedavg", "--silos", str(silos), "--out", str(out)]
    process = subprocess.Popen(
        [*command, "--set", "stop.rounds=100000"],
        cwd=tmp_path,
        start_new_session=True,
        # A shell has its background jobs ignore Ctrl-C, and the tests may run in one.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        rounds, end = out / "rounds.jsonl", time.monotonic() + 180
        while time.monotonic() < end and not (rounds.exists() and rounds.stat().st_size):
            time.sleep(0.2)
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.full)])
def test_an_interrupted_local_run_leaves_no_process(
    number: signal.Signals, endless_run: subprocess.Popen[bytes]
) -> None:
    family = psutil.Process(endless_run.pid).children(recursive=True)
    assert len(family) >= 7, "a SuperLink, two SuperNodes, two executors and two trainers at least"
    endless_run.send_signal(number)
    assert endless_run.wait(timeout=60) == 130
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive


def test_a_killed_local_run_leaves_no_process(endless_run: subprocess.Popen[bytes]) -> None:
    family = psutil.Process(endless_run.pid).children(recursive=True)
    endless_run.kill()
    endless_run.wait()
    _, alive = psutil.wait_procs(family, timeout=60)
    assert not alive
