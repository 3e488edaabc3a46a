"""The same strategy in virtual time, in Flower's simulation engine and on real Flower processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedsync import replay
from fedsync.cli import Runtime, runner
from fedsync.common.errors import RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.flower.flower_simulation import run_simulation
from fedsync.observe.ledger import Ledger
from fedsync.ops.local import run_local
from fedsync.server.timeouts import Timeouts
from tests.e2e.deployed import SMALL, wait_for

SPEEDS = {"clinic-a": 60_000.0, "clinic-b": 40_000.0, "clinic-c": 20_000.0}
CLUSTER = ClusterConfig.model_validate({"silos": [{"name": name, "speed": speed} for name, speed in SPEEDS.items()]})
SHORT = ["stop.rounds=2", "local.steps=4"]
LARGE = "task={kind: mlp, data: {kind: digits28}, hidden: [200], partition: {kind: dirichlet, alpha: 0.5}}"
UNEVEN = "task={kind: digits, partition: {kind: dirichlet, alpha: 0.5}}"

CONTRACT = {
    "strategy", "runtime", "seed", "rounds", "commits", "seconds", "accuracy", "loss", "target_accuracy",
    "seconds_to_target", "samples", "utilisation", "wait_fraction", "bytes_up", "bytes_down", "silos",
}  # fmt: skip
SILO_CONTRACT = {"name", "orders", "steps", "samples", "compute_s", "overhead_s", "wait_s", "batch_size"}


FEW_BITS = ["wire={up: int8, down: bf16}", "server_optimizer={kind: cautious-adam}", "local.momentum=0.9"]
SEALED = ["cipher={kind: bfv, members: 2}", "server_optimizer={kind: fedadam}"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        pytest.param([SMALL, *FEW_BITS], id="few bits"),
        pytest.param([SMALL, *SEALED], id="sealed"),
        pytest.param([UNEVEN], id="uneven", marks=pytest.mark.full),
    ],
)
def test_all_runtimes_end_with_the_same_bits(settings: list[str], tmp_path: Path) -> None:
    """With declared speeds; that FedAvg does, too, is below.

    Digits that are dealt unevenly bring libraries of data into each process, which takes as long as all the rest.
    """
    config = StrategyConfig.load("lb-bsp", [*SHORT, *settings, "balancer.speeds=declared"])
    models, summaries = {}, {}
    for runtime in Runtime:
        out = tmp_path / runtime
        summaries[runtime] = runner(runtime)(config, CLUSTER, out, target_accuracy=0.05)
        models[runtime] = torch.load(out / "model.pt", weights_only=True)
        _check_files(out, summaries[runtime], runtime)
    virtual = models[Runtime.VIRTUAL]
    for runtime in (Runtime.FLOWER, Runtime.LOCAL):
        assert list(models[runtime]) == list(virtual)
        for name, tensor in virtual.items():
            assert torch.equal(models[runtime][name], tensor), f"{name} differs in {runtime}"
        for figure in ("accuracy", "loss", "samples", "bytes_up", "bytes_down", "rounds"):
            assert summaries[runtime][figure] == summaries[Runtime.VIRTUAL][figure], figure
    sizes = {silo["name"]: silo["batch_size"] for silo in summaries[Runtime.LOCAL]["silos"]}
    # By hand: 96 samples in the ratio 3 : 2 : 1.
    assert sizes == dict(zip(SPEEDS, [48, 32, 16], strict=True))


def _check_files(out: Path, summary: dict[str, object], runtime: Runtime) -> None:
    assert json.loads((out / "summary.json").read_text()) == summary
    assert set(summary) >= CONTRACT
    assert summary["runtime"] == runtime
    for silo in summary["silos"]:  # type: ignore[attr-defined]
        assert set(silo) >= SILO_CONTRACT
        assert silo["compute_s"] + silo["overhead_s"] + silo["wait_s"] == pytest.approx(summary["seconds"])
    rounds = [json.loads(line) for line in (out / "rounds.jsonl").read_text().splitlines()]
    assert [row["round"] for row in rounds] == [1, 2]
    assert all(row["accuracy"] is not None and set(row["batch_sizes"]) == set(SPEEDS) for row in rounds)
    replay(out / "journal.jsonl")
    assert StrategyConfig.load(out / "config.yaml").model_dump() is not None
    assert ClusterConfig.load(out / "silos.yaml") == CLUSTER


@pytest.mark.parametrize(("given", "limit_s"), [([], 600.0), (["waiting.idle_s=45"], 45.0)])
def test_silos_that_the_simulation_engine_starts_have_ten_minutes(
    given: list[str], limit_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three silos needed more than three minutes on a machine with twelve other busy processes."""
    limits = []

    def created(*settings: object, timing: Timeouts, **others: object) -> None:
        limits.append(timing.join_timeout_s)
        raise RunError("only the limit counts here")

    monkeypatch.setattr("fedsync.flower.flower_strategy.FedSync", created)
    with pytest.raises(RunError, match="only the limit"):
        run_simulation(StrategyConfig.load("lb-bsp", [*SHORT, *given]), CLUSTER, tmp_path / "out")
    assert limits == [limit_s]


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_simulation_engine_with_a_summary(number: signal.Signals, tmp_path: Path) -> None:
    """Ray replaces the handler of SIGTERM, and only the main thread gets signals."""
    out, silos = tmp_path / "out", tmp_path / "silos.yaml"
    silos.write_text("silos:\n  - {name: a, speed: 60000}\n")
    command = [sys.executable, "-m", "fedsync", "run", "fedavg", "--runtime", "flower", "--silos", str(silos)]
    command += ["--out", str(out), "--set", "stop.rounds=100000", "--set", "local.steps=1"]
    process = subprocess.Popen(command)
    try:
        journal = out / "journal.jsonl"
        wait_for(lambda: journal.exists() and "Commit" in journal.read_text(), "no round has ended", 180.0)
        process.send_signal(number)
        assert process.wait(timeout=90) == 130
    finally:
        process.kill()
    assert json.loads((out / "summary.json").read_text())["rounds"] >= 1


@pytest.mark.full
def test_fedavg_of_a_large_model_ends_with_the_same_bits_on_real_processes(tmp_path: Path) -> None:
    """The model goes over the hub as a file."""
    out, parcels = tmp_path / "real", set[str]()

    class Watch:
        def follow(self, ledger: Ledger) -> None:
            parcels.update(path.name for path in (out / "state").glob("*/*.parcel"))

    config = StrategyConfig.load("fedavg", [*SHORT, LARGE, "local.threads=1"])
    two = ClusterConfig(silos=CLUSTER.silos[:2])
    summary = run_local(config, two, out, listeners=[Watch()])
    assert summary["rounds"] == 2 and len(parcels) >= 2, "each version is a file at the silos"
    runner(Runtime.VIRTUAL)(config, two, tmp_path / "virtual")
    real, virtual = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("real", "virtual"))
    assert all(torch.equal(real[name], tensor) for name, tensor in virtual.items())
