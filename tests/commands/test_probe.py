from pathlib import Path

import pytest
import torch
import yaml

from fedsync.commands.probe import silo_file
from fedsync.common.errors import ConfigError
from fedsync.config.cluster import ClusterConfig
from fedsync.core.speed.curve import Curve
from tests.commands.call import call


@pytest.mark.parametrize(
    ("curve", "memory_samples"),
    [
        (Curve(1234.0), None),
        (Curve(20130.0, 1.5e-5), 512),
        (Curve(20130.0, 0.0021, 16), 1),
        (Curve(1.5, 0.0, 64), None),
        (Curve(4e12), None),
    ],
)
def test_the_entry_loads_and_says_what_was_measured(tmp_path: Path, curve: Curve, memory_samples: int | None) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(silo_file(curve, 64, memory_samples))
    (silo,) = ClusterConfig.load(file).silos
    assert silo.memory_samples == memory_samples
    read = silo.build_curve()
    for batch in (1, 16, 64, 1000):
        # No silo file takes a speed above 1e9; a launch time of a hundredth of the longest step may be left out.
        expected = max(curve.step_s(batch), batch / 1e9)
        assert read.step_s(batch) == pytest.approx(expected, rel=1e-3, abs=0.01 * curve.step_s(64))


def test_a_line_through_the_origin_needs_no_curve() -> None:
    (entry,) = yaml.safe_load(silo_file(Curve(1000.0, 1e-5), 64, None))["silos"]
    assert set(entry) == {"name", "speed"}


def test_a_name_that_no_silo_can_have_is_mended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("platform.node", lambda: "node 1/rack")
    assert yaml.safe_load(silo_file(Curve(1.0), 8, None))["silos"][0]["name"] == "node-1-rack"


def test_the_command_prints_a_table_and_an_entry_that_loads(tmp_path: Path) -> None:
    strategy, out = tmp_path / "small.yaml", tmp_path / "silo.yaml"
    (tmp_path / "points.csv").write_text("x,y\n" + "".join(f"{row % 5},{row % 2}\n" for row in range(24)))
    strategy.write_text(
        "name: small\nstop: {rounds: 1}\nlocal: {device: cuda, threads: 1}\nbalancer: {kind: fixed}\n"
        "barrier: {kind: bsp}\ntask: {kind: csv, files: [points.csv], target: y}\n"
    )
    threads = torch.get_num_threads()
    shown = call("probe", "--task", strategy, "--device", "cpu", "--seconds", "0.1", "--out", out)
    torch.set_num_threads(threads)
    # Three quarters of 24 rows are there to train on.
    assert "small on cpu, 18 training samples" in shown
    rows = [line.split() for line in shown.splitlines() if line[:1] == " " and line.split()[:1]]
    assert [row[0] for row in rows if row[0].isdecimal()][:2] == ["1", "2"]
    assert out.read_text() in shown
    assert len(ClusterConfig.load(out).silos) == 1


@pytest.mark.parametrize(
    ("arguments", "place"),
    [
        (["--out", "nowhere/silo.yaml"], "--out: there is no folder"),
        (["--out", "."], "--out: '.' is a folder"),
        (["--device", "gpu"], "--device"),
        (["--task", "nothing"], "nothing"),
    ],
)
def test_mistakes_are_named(arguments: list[str], place: str) -> None:
    with pytest.raises(ConfigError, match=place):
        call("probe", *arguments)


@pytest.mark.parametrize("task", ["{kind: silo-app, file: loop.py}", "{kind: clientapp, app: 'app.client:app'}"])
def test_a_loop_of_ones_own_is_not_measured(task: str, tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    rest = "stop: {rounds: 1}, balancer: {kind: fixed}, barrier: {kind: bsp}"
    file.write_text(f"{{name: own, {rest}, task: {task}}}")
    with pytest.raises(ConfigError, match=r"a training loop of its own.* a run says, not fedsync probe"):
        call("probe", "--task", str(file))
