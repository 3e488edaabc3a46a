"""`main`: what it prints, one line for the user's mistakes, a traceback where the fault is ours."""

import errno
import json
import logging
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedsync import cli
from fedsync.config.locate import locate
from tests.commands.call import call
from tests.observe.runs import two_silos

TIMING = ["--runtime", "virtual", "--timing-only", "--set", "stop.rounds=1"]

BROKEN = """
import torch
from torch.utils.data import TensorDataset

from fedsync import SiloData, Task


class Broken(Task):
    def model(self):
        return torch.nn.Linear(2, 2)

    def data(self, slot):
        data = TensorDataset(torch.zeros(64, 2), torch.zeros(64, dtype=torch.long))
        return SiloData(data, data)

    def loss(self, model, batch):
        raise RuntimeError("sensor unplugged")
"""


@pytest.fixture(autouse=True)
def settings() -> Iterator[None]:
    """`main` is made for a process of its own: what it sets there goes again."""
    handlers, level = logging.root.handlers[:], logging.root.level
    before = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)
    logging.root.handlers[:] = handlers
    logging.root.setLevel(level)


def main(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["fedsync", *arguments])
    with pytest.raises(SystemExit) as left:
        cli.main()
    assert isinstance(left.value.code, int)
    return left.value.code


def raising(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    """As if a command raised it."""

    def app() -> None:
        raise error

    monkeypatch.setattr(cli, "app", app)


@pytest.mark.slow
def test_compare_prints_ratios_to_the_first(tmp_path: Path) -> None:
    silos = tmp_path / "two.yaml"
    silos.write_text("silos: [{name: a, speed: 50000.0}, {name: b, speed: 25000.0}]")
    shown = call(
        "compare", "fedavg", "lb-bsp", "--silos", silos, "--seeds", "2", "--set", "stop.rounds=3",
        "--target-accuracy", "0.01", "--out", tmp_path / "cmp",
    )  # fmt: skip
    fedavg, balanced = json.loads((tmp_path / "cmp" / "compare.json").read_text())
    # By hand: FedAvg's round is 640 / 25,000 s. Balanced, 1,280 samples at 75,000/s.
    assert fedavg["seconds"] == pytest.approx(3 * 0.0256)
    assert balanced["seconds"] == pytest.approx(3 * 1280 / 75_000, rel=0.02)
    assert (fedavg["ratio"], fedavg["reached"]) == (1.0, 2)
    assert f"{balanced['ratio']:.3f}" in shown
    means = (tmp_path / "cmp" / "seeds.md").read_text()
    assert "| fedavg | 2 |" in means and "| lb-bsp | 2 |" in means


@pytest.mark.slow
def test_a_comparison_goes_on_without_a_strategy_whose_run_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    text = locate("fedavg").read_text(encoding="utf-8")
    bad = re.sub("learning_rate: [0-9.]+", "learning_rate: 1.0e+30", text.replace("name: fedavg", "name: bad"))
    Path("bad.yaml").write_text(bad, encoding="utf-8")
    assert main(monkeypatch, "compare", "bad.yaml", "fedavg", "--set", "stop.rounds=2", "--out", "cmp") == 1
    shown = capsys.readouterr()
    assert "training diverged" in shown.err and "bad is not compared: 1 of 1 runs failed" in shown.out
    fedavg, bad_row = json.loads(Path("cmp/compare.json").read_text())
    assert (fedavg["strategy"], fedavg["ratio"]) == ("fedavg", 1.0)
    assert bad_row["strategy"] == "bad" and "training diverged" in bad_row["failed"]["7"]
    assert main(monkeypatch, "report", *map(str, Path("cmp").iterdir())) == 0, "a shell's pattern names files, too"
    assert main(monkeypatch, "report", "cmp/fedavg-7", "typo") == 2


def test_schemas_are_json_schema() -> None:
    schema = json.loads(call("schema"))
    assert schema["type"] == "object" and {"stop", "balancer", "task"} <= set(schema["required"])
    for option, key in (("--server", "hub"), ("--silo", "presence"), ("--silos", "silos")):
        assert key in json.loads(call("schema", option))["properties"]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["run", "lb-bspp"], ["lb-bspp", "Did you mean 'lb-bsp'"]),
        (["run", "lb-bsp", "--set", "local.stepps=3"], ["local.stepps", "Did you mean 'steps'"]),
        (["run", "lb-bsp", "--set", "local.learning_rate=0o17"], ["0o17", "Quote it"]),
        (["run", "lb-bsp", "--silos", "nope"], ["nope", "hetero"]),
        (["compare", "lb-bsp", "lb-bsp"], ["named 'lb-bsp'"]),
        (["validate", "broken.yaml"], ["broken.yaml, line 3"]),
        (["run", "lb-bsp", "--runtime", "moon"], ["moon"]),
    ],
)
def test_the_users_mistakes_exit_with_2(
    arguments: list[str],
    expected: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "broken.yaml").write_text("name: x\nstop: {rounds: 1\n")
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *arguments) == cli.EXIT_USER
    errors = capsys.readouterr().err
    assert all(part in errors for part in expected), errors


def test_a_failing_task_exits_with_1_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "task.py").write_text(BROKEN)
    task = ["--set", "task={kind: custom, file: task.py}", "--out", "out"]
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, "run", "fedavg", "--runtime", "virtual", *task) == cli.EXIT_FAILED
    error = " ".join(capsys.readouterr().err.split())
    assert "failed: every silo failed" in error and "sensor unplugged" in error


def test_who_interrupts_a_run_or_asks_it_to_end_has_130(monkeypatch: pytest.MonkeyPatch) -> None:
    raising(monkeypatch, KeyboardInterrupt())
    assert main(monkeypatch) == 130
    for number in (signal.SIGTERM, signal.SIGHUP):
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # as `nohup` does
    assert main(monkeypatch) == 130
    signal.raise_signal(signal.SIGHUP)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["run", "lb-bsp", *TIMING, "--out", "file"], "file: File exists"),
        (["compare", "lb-bsp", *TIMING, "--out", "file"], "file: File exists"),
        (["validate", 300 * "x"], f"{300 * 'x'}: File name too long"),
        (["run", 300 * "x"], f"{300 * 'x'}: File name too long"),
        (["export", "run", "--tensorboard", "file"], "file/events.out.tfevents."),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_path_that_cannot_be_used_is_named_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    if "--tensorboard" in arguments:
        pytest.importorskip("tensorboardX")
        two_silos(tmp_path / "run")
    (tmp_path / "file").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(monkeypatch, *arguments) == cli.EXIT_USER
    lines = [line for line in capsys.readouterr().err.splitlines() if line.strip()]
    assert lines[-1].startswith(f"error: {said}") and ". Check the path" in lines[-1]
    assert not any("Traceback" in line for line in lines)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "a [b]"), "a [b]: Permission denied. "),
        (PermissionError(errno.EACCES, "Permission denied", b"a"), "a: Permission denied. "),
        (FileNotFoundError(errno.ENOENT, "No such file or directory", Path("a"), None, "b"), "a -> b: No such file"),
        (OSError(errno.EIO, None, "a"), "a: OSError. "),
    ],
)
def test_whatever_the_path_is_given_as(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: OSError, said: str
) -> None:
    raising(monkeypatch, error)
    assert main(monkeypatch) == cli.EXIT_USER
    line = capsys.readouterr().err
    assert line.startswith(f"error: {said}") and line.endswith("Check the path, its permissions and the disk\n")


@pytest.mark.parametrize(
    "error",
    [
        OSError("only words"),
        OSError(errno.EBADF, "Bad file descriptor", 7),
        BrokenPipeError(errno.EPIPE, "Broken pipe", "a"),
    ],
    ids=repr,
)
def test_an_error_that_names_no_path_of_the_users_is_ours(monkeypatch: pytest.MonkeyPatch, error: OSError) -> None:
    raising(monkeypatch, error)
    with pytest.raises(type(error)) as caught:
        cli.main()
    assert caught.value is error


def test_a_full_disk_is_one_line_although_the_error_names_no_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising(monkeypatch, OSError(errno.ENOSPC, "No space left on device"))
    assert main(monkeypatch) == cli.EXIT_FAILED
    assert capsys.readouterr().err.startswith("failed: a file cannot be written: No space left on device. Make room")


def test_a_default_folder_is_never_used_twice_and_a_named_one_only_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for _ in range(2):
        assert main(monkeypatch, "run", "lb-bsp", *TIMING) == 0
        assert main(monkeypatch, "compare", "lb-bsp", *TIMING) == 0
    assert {path.name for path in Path("runs").iterdir()} == {
        *("lb-bsp-virtual-7", "lb-bsp-virtual-7-2", "compare", "compare-2")
    }
    assert not [*Path("runs").rglob("run.lock")], "nothing stays of the lock"
    for command in ("run", "compare"):
        folder = {"run": "runs/lb-bsp-virtual-7", "compare": "runs/compare"}[command]
        kept = sorted((path, path.stat().st_mtime_ns) for path in Path(folder).rglob("*"))
        assert main(monkeypatch, command, "lb-bsp", *TIMING, "--out", folder) == cli.EXIT_USER
        assert f"{folder}: the folder has the files of a run" in " ".join(capsys.readouterr().err.split())
        assert sorted((path, path.stat().st_mtime_ns) for path in Path(folder).rglob("*")) == kept
        assert main(monkeypatch, command, "lb-bsp", *TIMING, "--out", folder, "--overwrite") == 0
        assert sorted((path, path.stat().st_mtime_ns) for path in Path(folder).rglob("*")) != kept


def test_what_looks_like_markup_is_printed_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    odd = "[bold]x[/nothing] :warning:"
    assert main(monkeypatch, "run", "lb-bsp", *TIMING, "--out", odd) == 0
    assert f"Files: {odd}\n" in capsys.readouterr().out
    assert main(monkeypatch, "report", odd) == 0
    assert f"Report: {odd}/report.html\n" in capsys.readouterr().out
