"""Scripts of bench/ load, run to their end and leave their files. What they measure is not tested.

One runs with `make slow`, the others with `make full`.
"""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bench.papers import objective
from bench.papers.lb_bsp_flwr import flwr_fedavg
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.simulation.run import run_virtual

ROOT = Path(__file__).parent.parent
TWO_STRATEGIES = ["--strategies", "fedavg", "pssp"]
PNG = b"\x89PNG\r\n\x1a\n"


SCRIPTS = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (ROOT / "bench").rglob("*.py")
    if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
)


def ran(*arguments: str, code: int = 0, **variables: str) -> subprocess.CompletedProcess[str]:
    """Finished Python process with these arguments in the repository's folder; it ends with this code."""
    command, environment = [sys.executable, *arguments], {**os.environ, **variables}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == code, done.stdout + done.stderr
    return done


@pytest.mark.full
def test_every_script_loads() -> None:
    modules = ", ".join(script.removesuffix(".py").replace("/", ".") for script in SCRIPTS)
    ran("-c", f"import {modules}")


@pytest.mark.slow
def test_names_that_scripts_import_from_the_package_are_there() -> None:
    """Also of modules that only a script's own processes load, and of imports inside functions."""
    missing = []
    for path in (ROOT / "bench").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fedsync":
                wanted = [each.name for each in node.names]
                module = __import__(str(node.module), fromlist=wanted)  # imports names that are modules
                missing += [f"{path.name}: {node.module}.{name}" for name in wanted if not hasattr(module, name)]
    assert not missing


def test_the_index_names_every_script_and_pages_name_none_that_is_not_there() -> None:
    index = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    assert {f"bench/{row}" for row in re.findall(r"^\| `([a-z/]+/\w+\.py)`", index, re.MULTILINE)} == set(SCRIPTS)
    for page in [ROOT / "Makefile", *ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        named = set(re.findall(r"bench/[\w/]+\.py", page.read_text(encoding="utf-8")))
        assert named <= set(SCRIPTS), page


@pytest.mark.parametrize(
    ("script", "arguments", "figures"),
    [
        pytest.param("papers/balancers", [], ["-drop", "-oscillation"], marks=pytest.mark.slow),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in (
                ("papers/progress", ["--parts", "speed", "inconsistency"], ["-speed", "-inconsistency"]),
                ("papers/progress", ["--parts", "stragglers", "sampling"], ["-stragglers", "-sampling"]),
                ("papers/time_to_target", ["--target", "0.3", "--clusters", "one-to-three", *TWO_STRATEGIES], [""]),
                ("papers/map", [], [""]),
                ("papers/even_batches", [], []),
                ("papers/lb_bsp", ["--tasks", "digits"], [""]),
                ("papers/predictors", [], []),
                ("papers/zipline", [], ["-search", "-training"]),
                ("papers/fsp", [], [""]),
                ("papers/fsp_workloads", ["--workloads", "k-means", "--parts", "workloads"], [""]),
                ("papers/absp_tables", ["--jobs", "LR", "k-means", "--clusters", "tenants"], [""]),
                ("papers/heterogeneity", [], [""]),
                ("papers/fedbn", [], []),
                ("papers/independent/check", [], []),
                ("cost/scheduling", [], [""]),
                ("cost/encrypted", ["--parts", "accuracy"], []),
                ("cost/wire", [], []),
            )
        ),
    ],
)
def test_bench_writes_json_and_figures(tmp_path: Path, script: str, arguments: list[str], figures: list[str]) -> None:
    out = tmp_path / "results" / "some.json"
    command = [f"bench/{script}.py", "--quick", "--processes", "1", "--out", str(out), *arguments]
    ran(*command, OMP_NUM_THREADS="1")
    assert json.loads(out.read_text())
    for suffix in figures:
        assert (out.parent / f"some{suffix}.png").read_bytes().startswith(PNG)


@pytest.mark.full
def test_time_to_target_says_who_missed_and_who_failed(tmp_path: Path) -> None:
    """A target beyond reach in the time there is, and a setting that one strategy does not know."""
    out = tmp_path / "some.json"
    command = ["bench/papers/time_to_target.py", "--seeds", "1", "--target", "0.99", "--longest", "2"]
    command += ["--clusters", "homogeneous", "--strategies", "fedavg", "lb-bsp", "--set", "balancer.floor=2"]
    done = ran(*command, "--processes", "1", "--out", str(out), code=1)  # the reference failed: nothing to compare with
    assert "balancer.floor" in done.stderr
    done = ran(*command[:-1], "stop.patience=null", "--processes", "1", "--out", str(out))
    assert done.stdout.count("missed 1/1") == 2
    assert [row["seconds_to_target"] for row in json.loads(out.read_text())["runs"]] == [None, None]


def test_flwrs_own_fedavg_is_what_lb_bsp_is_compared_to(tmp_path: Path) -> None:
    """Its versions are as good, and come at the same instants, as those of the strategy file of that name."""
    config = StrategyConfig.load("fedavg", ["stop.rounds=3", "local.steps=3"])
    cluster = ClusterConfig.model_validate({"silos": [{"name": "a", "speed": 96}, {"name": "b", "speed": 32}]})
    ours, theirs = run_virtual(config, cluster, tmp_path), flwr_fedavg(config, cluster)
    rounds = [json.loads(text) for text in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert theirs["at_s"] == pytest.approx([3.0, 6.0, 9.0])  # by hand: 3 steps of 32 samples at 32/s
    assert [entry["at_s"] for entry in rounds] == pytest.approx(theirs["at_s"])
    # float32 sums in another order may tip one test image of 360.
    assert [entry["accuracy"] for entry in rounds] == pytest.approx(theirs["accuracy"], abs=1.5 / 360)
    assert theirs["wait_fraction"] == pytest.approx(1 / 3)  # by hand: one of two silos waits 2 s of 3
    assert ours["wait_fraction"] == pytest.approx(theirs["wait_fraction"])


@pytest.mark.full
def test_code_of_ones_own_counts_each_order_once_though_its_trainer_is_killed(tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    ran("bench/faults/foreign.py", "--kills", "2", "--out", str(out))
    for result in json.loads(out.read_text()):
        assert result["well"] and result["kills"] == 2 and result["orders"] == 6
        assert all(1 <= each["steps done"] < 24 for each in result["killed"]), "in the middle of the loop"


@pytest.mark.full
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces take root")
def test_a_federation_over_a_lossy_line_comes_to_its_last_round_and_sends_little_again(tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    ran("-m", "bench.faults.networks", "--quick", "--out", str(out))
    clean, lossy = json.loads(out.read_text())
    assert not clean["problem"] and not lossy["problem"] and lossy["rounds"] == 3
    assert lossy["lost"] > 0 and lossy["payload"] <= 1.2 * clean["payload"]


@pytest.mark.full
def test_the_gpu_bench_runs_on_a_processor_too(tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    ran("bench/cost/gpu.py", "--quick", "--device", "cpu", "--out", str(out))
    result = json.loads(out.read_text())
    assert {row["precision"] for row in result["cost"]} == set(result["curves"]) == {"fp32", "bf16", "fp16"}
    # Ten samples where two fit: pieces of ten, five and two.
    assert {(end["piece"], end["found"], end["steps"]) for end in result["memory"].values()} == {(2, 2, 2)}
    assert out.with_suffix(".png").read_bytes().startswith(PNG)


@pytest.mark.slow
def test_the_gpu_bench_without_a_gpu_says_so_and_ends(tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    assert "no GPU" in ran("bench/cost/gpu.py", "--out", str(out), CUDA_VISIBLE_DEVICES="").stdout
    assert not out.exists()


@pytest.mark.slow
def test_peers_that_are_not_installed_are_skipped_with_a_word_on_how_to_get_them(tmp_path: Path) -> None:
    out = tmp_path / "some.json"
    (tmp_path / "nvflare.py").write_text("raise ImportError('none here')\n")
    (tmp_path / "appfl.py").write_text("raise ImportError('none here')\n")
    done = ran("bench/papers/peers.py", "--quick", "--out", str(out), PYTHONPATH=str(tmp_path))
    assert done.stdout.count("skipped (none here). To compare: pip install") == 2
    assert json.loads(out.read_text()) == {"nvflare": None, "appfl": None}


def test_rounds_timed_anew_are_those_that_training_on_the_other_machines_would_have_had() -> None:
    """And a target leaves a twentieth of the decrease: from 3.0 to 1.0 that is 1.1."""
    assert objective.target_of([(1.0, 3.0), (2.0, 1.5), (3.0, 1.0)]) == pytest.approx(1.1)
    assert objective.reached_s([(1.0, 3.0), (2.0, 1.1), (3.0, 1.0)], 1.1) == 2.0
    sets = (
        "task={kind: k-means, clusters: 3, data: {kind: blobs, samples: 200}}",
        "local={steps: 2, batch_size: 8, learning_rate: 0.5}",
        "aggregation={kind: fedavg, weight: samples}",
    )
    even = tuple({"name": f"{silo}", "speed": 100.0} for silo in range(3))
    mixed = tuple({"name": f"{silo}", "speed": speed, "jitter": 0.1} for silo, speed in enumerate((100.0, 50.0, 20.0)))
    slow = objective.Job(("slow",), "bsp", sets, mixed, seconds=0.0, rounds=3)
    trained = objective.run(slow)
    retimed = objective.retimed(objective.run(objective.Job(("even",), "bsp", sets, even, 0.0, rounds=3)), slow)
    assert [at_s for at_s, _ in retimed["curve"]] == [at_s for at_s, _ in trained["curve"]]
    # Arrivals in another order are added in another order.
    assert [loss for _, loss in retimed["curve"]] == pytest.approx([loss for _, loss in trained["curve"]], rel=1e-5)
    assert (retimed["waits"], retimed["updates"]) == (trained["waits"], 9)
