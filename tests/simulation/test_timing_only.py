"""Timing only: all that decides, nothing that learns, very many silos."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedsync.cli import Runtime, _starter
from fedsync.common.errors import ConfigError, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.events import UpdateArrived
from fedsync.core.journal import read_journal
from fedsync.simulation.timing_only import MODEL_BYTES, run_timing
from tests.simulation.fake import machines, strategy


def cluster(*silos: dict[str, Any]) -> ClusterConfig:
    return ClusterConfig(silos=machines(*silos))


def test_time_passes_as_with_training(tmp_path: Path) -> None:
    """The example of test_engine.py: 6.4 s for the unbalanced round, 3.2 s for each balanced one."""
    silos = cluster(*({"speed": speed} for speed in (300.0, 250.0, 200.0, 150.0, 100.0)))
    summary = run_timing(strategy(), silos, tmp_path)
    assert summary["seconds"] == pytest.approx(6.4 + 3.2 + 3.2)
    assert summary["samples"] == 3 * 5 * 640
    assert (summary["accuracy"], summary["loss"], summary["rounds"]) == (None, None, 3)
    assert summary["notes"] == [], "nobody was to evaluate anything, so no evaluation has failed"
    assert [silo["orders"] for silo in summary["silos"]] == [3] * 5


def test_a_run_that_everybody_left_names_them(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"nothing is left to happen.*; a is missing since 10\.0 s: left"):
        run_timing(strategy(), cluster({"speed": 100.0, "leaves_at_s": 10.0}), tmp_path)


def test_a_report_is_plausible_and_evaluates_nothing(tmp_path: Path) -> None:
    run_timing(strategy(), cluster({"speed": 100.0}), tmp_path)
    events = [event for entry in read_journal(tmp_path / "journal.jsonl")[1] for event in entry.events]
    first = next(event for event in events if isinstance(event, UpdateArrived))
    assert (first.report.steps, first.report.samples, first.report.evaluation) == (20, 640, None)
    assert first.report.compute_s == pytest.approx(6.4)
    assert first.meta.nbytes == MODEL_BYTES


def test_a_batch_holds_no_more_than_the_examples(tmp_path: Path) -> None:
    """Of 64 samples, a holds 10; b takes the other 54."""
    silos = cluster({"speed": 100.0, "examples": 10}, {"speed": 100.0})
    summary = run_timing(strategy(), silos, tmp_path)
    assert [silo["batch_size"] for silo in summary["silos"]] == [10, 54]


def test_the_model_has_the_size_it_is_told(tmp_path: Path) -> None:
    """A megabyte each way at 8 Mbit/s: 2 s besides the 6.4."""
    silos = cluster({"speed": 100.0, "bandwidth_mbps": 8.0})
    assert run_timing(strategy(), silos, tmp_path / "1")["seconds"] == pytest.approx(3 * 8.4)
    summary = run_timing(strategy(), silos, tmp_path / "2", model_bytes=500_000)
    assert summary["seconds"] == pytest.approx(3 * 7.4)
    assert (summary["bytes_up"], summary["bytes_down"]) == (3 * 500_000, 4 * 500_000)


def test_without_a_journal_the_summary_is_the_same(tmp_path: Path) -> None:
    silos = cluster({"speed": 100.0, "jitter": 0.2}, {"speed": 300.0})
    summaries = [run_timing(strategy(), silos, tmp_path / str(journal), journal=journal) for journal in (True, False)]
    assert summaries[0] == summaries[1]
    assert sorted(path.name for path in (tmp_path / "False").iterdir()) == ["config.yaml", "silos.yaml", "summary.json"]


LARGE = """\
silos:
  - {name: fast, count: 5000, speed: 300.0, contention: {kind: markov}}
  - {name: slow, count: 5000, speed: 100.0, crashes: {mtbf_s: 100, repair_s: 10}}
"""


def fedsync(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-X", "importtime", "-m", "fedsync", "run", *arguments, "--out", str(folder / "out")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.full
def test_ten_thousand_silos_take_seconds_and_no_torch(tmp_path: Path) -> None:
    """Three rounds from the command line; a bound of a minute of wall time is for very slow machines."""
    (tmp_path / "large.yaml").write_text(LARGE)
    options = ["--runtime", "virtual", "--timing-only", "--no-journal", "--silos", "large.yaml"]
    begin_s = time.monotonic()
    done = fedsync(tmp_path, "fedavg", *options, "--set", "stop.rounds=3")
    assert time.monotonic() - begin_s < 60
    assert done.returncode == 0, done.stderr
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "fedsync.simulation.timing_only" in imported
    assert not {name for name in imported if name.split(".")[0] in ("torch", "flwr", "ray", "sklearn")}
    assert "median" in done.stdout, "ten thousand rows are for nobody"
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert len(summary["silos"]) == 10_000
    assert summary["rounds"] == 3
    assert sum(silo["failures"] for silo in summary["silos"]) > 100, "crashes took place"


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"runtime": Runtime.LOCAL}, "--timing-only: the local runtime takes real time"),
        ({"runtime": Runtime.FLOWER}, "--timing-only: the flower runtime takes real time"),
        ({"target_accuracy": 0.9}, "--target-accuracy: there is no accuracy without training"),
        ({"timing_only": False, "journal": False}, "--no-journal: only for runs without training"),
        ({"timing_only": False, "model_bytes": 8}, "--model-bytes: only for runs without training"),
    ],
)
def test_options_that_contradict_each_other(changes: dict[str, Any], told: str) -> None:
    options = {
        "runtime": Runtime.VIRTUAL,
        "target_accuracy": None,
        "timing_only": True,
        "model_bytes": None,
        "journal": True,
    }
    with pytest.raises(ConfigError, match=told):
        _starter(**{**options, **changes})


@pytest.mark.slow
def test_strategies_can_be_compared_without_training(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedsync", "compare", "fedavg", "lb-bsp", "--timing-only", "--out", "cmp"]
    command += ["--set", "stop.rounds=20"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "no training" in done.stdout
    assert "round" in done.stdout and "loss" not in done.stdout
    fedavg, balanced = json.loads((tmp_path / "cmp" / "compare.json").read_text())
    # hetero: 20 rounds of 6.4 s; balanced, 20 x 160 samples at 1000 a second, the first one too.
    assert fedavg["seconds"] == pytest.approx(128.0)
    assert balanced["seconds"] == pytest.approx(20 * 3.2)
    assert fedavg["seconds_to_target"] is None


def test_a_strategy_of_a_missing_task_file_runs(tmp_path: Path) -> None:
    """The task is not looked at."""
    config = StrategyConfig.load("fedavg", ["stop.rounds=1", "task={kind: custom, file: nowhere.py}"])
    assert run_timing(config, cluster({"speed": 100.0}), tmp_path)["rounds"] == 1


def test_fewer_bits_take_less_time_and_bytes(tmp_path: Path) -> None:
    """1024 values: 4096 bytes, or 1032 as int8 and 16 more down. At 0.01 Mbit/s, 1250 bytes/s."""
    silos = cluster({"speed": 640.0, "bandwidth_mbps": 0.01})
    for wire, up, whole, down in (("{}", 4096, 4096, 4096), ("{up: int8, down: int8}", 1032, 4112, 1048)):
        config = StrategyConfig.load("fedavg", ["stop.rounds=4", f"wire={wire}"])
        book = run_timing(config, silos, tmp_path / str(up), model_bytes=4096)
        assert book["seconds"] == pytest.approx(4 * 1.0 + (4 * up + whole + 3 * down) / 1250)
        assert book["bytes_up"] == 4 * up
        assert book["bytes_down"] == whole + 3 * down + 4096, "and the whole to evaluate"
