"""The plan that is printed before a private run is what the silos' ledgers have at its end."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.privacy_plan.private_plan import Basis, plan_table, planned_spending
from fedsync.privacy.accounting import PrivacyPlan, epsilon
from fedsync.simulation.run import run_virtual
from tests.simulation.test_columns import ROWS, table

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

NOISE: dict[str, Any] = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 2.0}
SCORED = {**NOISE, "score_noise": 5.0}
TARGET = {"kind": "dp-sgd", "clip": 1.0, "target_epsilon": 2.0, "delta": 1e-3, "score_noise": 5.0}
SEALED = "cipher={kind: bfv, metrics: plain}"


def strategy(folder: Path, privacy: dict[str, Any], *changes: str, tables: int = 2, **task: Any) -> StrategyConfig:
    people = [{**row, "person": number // 2} for number, row in enumerate(ROWS)]
    files = [table(folder / f"{name}.csv", ["age", "dose", "person", "sick"], people) for name in "abcd"[:tables]]
    made = {"kind": "csv", "files": files, "target": "sick", "ignore": ["person"], **task}
    made["standardise"] = {"age": [32, 7], "dose": [5, 3]}
    given = [f"task={json.dumps(made)}", f"privacy={json.dumps(privacy)}", "stop.rounds=2"]
    return StrategyConfig.load("fedavg", [*given, "local={steps: 3, batch_size: 4, threads: 1}", *changes])


def silos(**budget: Any) -> ClusterConfig:
    """Two silos, of which the first has a budget if one is given."""
    entries: list[dict[str, Any]] = [{"name": name, "speed": 100} for name in "ab"]
    if budget:
        entries[0]["privacy"] = {"epsilon": 50, "delta": 1e-2, **budget}
    return ClusterConfig.model_validate({"silos": entries})


def spent(config: StrategyConfig, machines: ClusterConfig, out: Path) -> dict[str, float]:
    summary = run_virtual(config, machines, out)
    assert summary["rounds"] == 2 and summary["lost"] == []
    return {name: each["epsilon"] for name, each in summary["privacy"].items()}


def planned(config: StrategyConfig, machines: ClusterConfig) -> dict[str, float | None]:
    return {each.silo: each.epsilon for each in planned_spending(config, machines)}


def as_planned(config: StrategyConfig, machines: ClusterConfig, out: Path) -> dict[str, float]:
    """Epsilon that a run spends, by silo, which is that of its plan."""
    found = spent(config, machines, out)
    assert found == pytest.approx(planned(config, machines), abs=1e-9)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("cipher", [[], [SEALED]], ids=["clear", "encrypted"])
@pytest.mark.parametrize("privacy", [NOISE, SCORED, TARGET], ids=["noise", "scores", "target"])
def test_a_run_spends_what_its_plan_says(privacy: dict[str, Any], cipher: list[str], tmp_path: Path) -> None:
    """An encrypted run also spends the two steps from which silos estimate the scale of their updates."""
    as_planned(strategy(tmp_path, privacy, *cipher), silos(), tmp_path / "run")


OWNERS = {
    "rdp": {"accountant": "rdp"},
    "public scores": {"public": ["scores"]},
    "persons": {"unit": "person", "person_column": "person"},
    "a public number": {"examples": 30},
    "more noise": {"least_noise": 1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("privacy", "budget"),
    [*((SCORED, each) for each in OWNERS.values()), (TARGET, OWNERS["rdp"]), (TARGET, OWNERS["more noise"])],
    ids=[*OWNERS, "target, rdp", "target, more noise"],
)
def test_a_plan_goes_by_what_the_owner_says(budget: dict[str, Any], privacy: dict[str, Any], tmp_path: Path) -> None:
    as_planned(strategy(tmp_path, privacy, SEALED), silos(**budget), tmp_path / "run")


@pytest.mark.slow
def test_a_budget_below_the_target_is_spent_as_planned(tmp_path: Path) -> None:
    found = as_planned(strategy(tmp_path, TARGET, SEALED), silos(epsilon=1.0), tmp_path / "run")
    assert 0.98 < found["a"] <= 1.0 and 1.96 < found["b"] <= 2.0


@pytest.mark.slow
def test_a_validation_split_costs_two_more_scores(tmp_path: Path) -> None:
    """Of the last and of the best version on the test split; the second is spared if they are one version."""
    config = strategy(tmp_path, SCORED, validation=0.25)
    found = spent(config, silos(), tmp_path / "run")
    spared = json.loads((tmp_path / "run" / "summary.json").read_text())["best"]["version"] == 2
    for each in planned_spending(config, silos()):
        for cost, scores in ((each.epsilon, 3), (found[each.silo], 3 - spared)):
            releases = PrivacyPlan(2, 3, 4, SCORED["score_noise"], scores).releases(each.settings)
            assert cost == pytest.approx(epsilon(releases, each.delta), abs=1e-9)


EVEN = "balancer={kind: spend-evenly, budgets: {a: 0.5, b: 2, c: 1, d: 1}, delta: 1.0e-2}"
BY_SPEED = "balancer={kind: proportional}"
ON_TIME = "barrier={kind: on-time, slack: 0.1}"


def machines(*speeds: int, **first: Any) -> ClusterConfig:
    """Silos of these speeds [samples/s], of which the first has some more settings."""
    entries = [{"name": name, "speed": speed} for name, speed in zip("abcd", speeds, strict=False)]
    return ClusterConfig.model_validate({"silos": [{**entries[0], **first}, *entries[1:]]})


SCHEDULES: dict[str, tuple[list[str], ClusterConfig, Basis]] = {
    "drawn evaluations": (["fraction_evaluate=0.5"], machines(100, 100, 100, 100), Basis.EXACT),
    "batches by budget": ([EVEN], machines(100, 100, 100, 100), Basis.EXACT),
    "batches by speed": ([BY_SPEED], machines(50, 100, 200, 400), Basis.TIMED),
    "steps by time": ([BY_SPEED, ON_TIME], machines(50, 100, 200, 400, jitter=0.5), Basis.TIMED),
    "a silo that returns": ([], machines(100, 100, 100, faults=[{"at_s": 0.15, "down_s": 0.2}]), Basis.TIMED),
    "orders one by one": (["barrier={kind: asp}"], machines(50, 200, 100), Basis.TIMED),
    "some seconds": (["stop={seconds: 0.5}"], machines(50, 200, 100), Basis.TIMED),
}


@pytest.mark.slow
@pytest.mark.parametrize(("changes", "cluster", "basis"), SCHEDULES.values(), ids=SCHEDULES)
def test_a_plan_follows_the_orders_of_the_run(
    changes: list[str], cluster: ClusterConfig, basis: Basis, tmp_path: Path
) -> None:
    """In virtual time. On other machines, the plan of a run that depends on time has no bound without a budget."""
    config = strategy(tmp_path, SCORED, "stop.rounds=4", *changes, tables=len(cluster.silos))
    plan = planned_spending(config, cluster)
    found = run_virtual(config, cluster, tmp_path / "run")["privacy"]
    assert {name: each["epsilon"] for name, each in found.items()} == {each.silo: each.epsilon for each in plan}
    assert {each.basis for each in plan} == {basis}
    assert all(each.most == (inf if basis is Basis.TIMED else each.epsilon) for each in plan)
    told = plan_table(config, cluster, plan)
    assert told.caption == f"Epsilon is {basis}."
    assert list(told.columns[5].cells) == (["-"] * len(plan) if basis is Basis.TIMED else list(told.columns[4].cells))


@pytest.mark.slow
def test_schedules_differ_in_what_they_cost(tmp_path: Path) -> None:
    """Else equal plans would say nothing about draws, batches and returns."""

    def plan(cluster: ClusterConfig, *changes: str) -> dict[str, float | None]:
        config = strategy(tmp_path, SCORED, "stop.rounds=4", *changes, tables=len(cluster.silos))
        return planned(config, cluster)

    for changes, cluster, _ in SCHEDULES.values():
        assert plan(cluster, *changes) != plan(machines(*[100] * len(cluster.silos)))


@pytest.mark.slow
def test_a_run_that_ends_by_a_score_spends_at_most_its_plan(tmp_path: Path) -> None:
    config = strategy(tmp_path, SCORED, "stop={rounds: 6, target_accuracy: 0.01}")
    plan = planned_spending(config, machines(100, 100))
    summary = run_virtual(config, machines(100, 100), tmp_path / "run")
    assert summary["rounds"] < 6
    for each in plan:
        assert each.basis is Basis.BOUND and each.epsilon == each.most
        assert each.epsilon is not None and summary["privacy"][each.silo]["epsilon"] < each.epsilon


@pytest.mark.slow
def test_a_budget_that_runs_out_is_spent_as_planned_and_is_the_bound(tmp_path: Path) -> None:
    own = {"epsilon": 1.0, "delta": 1e-2}
    config = strategy(tmp_path, SCORED, "min_silos=1", "stop.rounds=6", tables=3)
    cluster = machines(100, 100, 100, privacy=own)
    plan = planned_spending(config, cluster)
    summary = run_virtual(config, cluster, tmp_path / "run")
    assert [each["silo"] for each in summary["lost"]] == ["a"] and [each.ends for each in plan] == [False, True, True]
    assert {name: each["epsilon"] for name, each in summary["privacy"].items()} == {
        each.silo: each.epsilon for each in plan
    }
    (timed, *_) = planned_spending(strategy(tmp_path, SCORED, "min_silos=1", BY_SPEED, tables=3), cluster)
    assert timed.basis is Basis.TIMED and timed.most == own["epsilon"]
