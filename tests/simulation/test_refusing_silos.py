"""Silos that refuse a run at its start: others go on without them, as on real machines."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import ConfigError, RunError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.privacy_plan.private_plan import check_plan, planned_spending
from fedsync.simulation.run import run_virtual
from tests.simulation.lost import SILO_APP, run
from tests.simulation.test_columns import ROWS, table

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

REFUSALS: dict[str, tuple[dict[str, Any], str, str]] = {
    "noise": ({"least_noise": 3.0}, "OWNER", "noise_multiplier: 2, and this silo's owner demands at least 3"),
    "clip": ({"largest_clip": 0.5}, "OWNER", "privacy.clip: 1, and this silo's owner allows at most 0.5"),
    "unit": ({"unit": "silo", "accountant": "rdp"}, "OWNER", "protects another unit"),
    "persons": ({"unit": "person", "person_column": "patient"}, "CONFIG", "'patient'"),
}


def strategy(folder: Path, *changes: str) -> StrategyConfig:
    files = [table(folder / f"{name}.csv", ["age", "dose", "sick"]) for name in "abc"]
    scales = {"age": [32, 7], "dose": [5, 3]}
    made = json.dumps({"kind": "csv", "files": files, "target": "sick", "standardise": scales})
    private = "privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 2.0}"
    given = [f"task={made}", private, "stop.rounds=2", "local={steps: 1, batch_size: 4, threads: 1}"]
    return StrategyConfig.load("fedavg", [*given, *changes])


def silos(budget: dict[str, Any], refusing: str = "b") -> ClusterConfig:
    own = {"epsilon": 50, "delta": 1e-2, **budget}
    entries = [{"name": name, "speed": 100, **({"privacy": own} if name in refusing else {})} for name in "abc"]
    return ClusterConfig.model_validate({"silos": entries})


@pytest.mark.parametrize(("budget", "code", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_a_run_goes_on_without_a_refusing_silo(budget: dict[str, Any], code: str, reason: str, tmp_path: Path) -> None:
    summary = run_virtual(strategy(tmp_path, "min_silos=2"), silos(budget), tmp_path / "run")
    assert summary["rounds"] == 2 and list(summary["privacy"]) == ["a", "c"]
    assert [(each["silo"], each["why"]) for each in summary["lost"]] == [("b", "it never joined")]
    (note,) = [note for note in summary["notes"] if note.startswith("took no part")]
    assert f"b answers {code}" in note and reason in note


def test_a_silo_whose_budget_is_spent_does_not_come_back_from_its_crashes(tmp_path: Path) -> None:
    machines = silos({"epsilon": 1.0}, "abc").model_dump(mode="json")
    for silo in machines["silos"]:
        silo["crashes"] = {"mtbf_s": 3.0, "repair_s": 0.1}
    changes = ("privacy={kind: dp-sgd, clip: 1.0, noise_multiplier: 1.0}", "stop.rounds=1000", "min_silos=2")
    with pytest.raises(RunError, match=r"nothing is left to happen.*a is missing.*BUDGET"):
        run_virtual(strategy(tmp_path, *changes), ClusterConfig.model_validate(machines), tmp_path / "run")
    assert (tmp_path / "run" / "last.pt").exists(), "what the budgets paid for is kept"


def test_a_run_without_enough_silos_names_each_that_refuses_and_why(tmp_path: Path) -> None:
    machines = silos(REFUSALS["noise"][0], "bc")
    with pytest.raises(RunError, match=r"needs 2 silos, and at most 1 .* can take part") as told:
        run_virtual(strategy(tmp_path, "min_silos=2"), machines, tmp_path / "run")
    assert all(f"{name} answers OWNER" in str(told.value) for name in "bc")
    assert str(told.value).count(REFUSALS["noise"][2]) == 2


def test_a_run_that_all_refuse_says_so_once(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"every silo refuses the run, OWNER: .*a, b, c: privacy\.clip: 1") as told:
        run_virtual(strategy(tmp_path), silos(REFUSALS["clip"][0], "abc"), tmp_path / "run")
    assert str(told.value).count("allows at most") == 1


def test_code_that_fails_at_the_start_costs_its_own_silo_alone(tmp_path: Path) -> None:
    summary = run(tmp_path, SILO_APP, ["min_silos=1"], setup="assert not wrong, 'no scanner'")
    assert summary["rounds"] == 4 and [each["silo"] for each in summary["lost"]] == ["a"]
    assert any("a answers CODE" in note and "no scanner" in note for note in summary["notes"])


@pytest.mark.parametrize(("odd", "other"), [(["age", "sick"], "dose"), (["dose", "age", "years", "sick"], "years")])
def test_a_silo_whose_table_has_other_columns_leaves_the_run(odd: list[str], other: str, tmp_path: Path) -> None:
    """In private runs as in others, and in the survey before a run."""
    private, plain = strategy(tmp_path, "min_silos=2"), strategy(tmp_path, "min_silos=2", "privacy=null")
    surveyed = strategy(tmp_path, "min_silos=2", "privacy=null", "task.standardise=federated")
    table(tmp_path / "b.csv", odd, [{**row, "years": 9} for row in ROWS])
    for number, config in enumerate((private, plain, surveyed)):
        summary = run_virtual(config, silos({}, ""), tmp_path / f"run-{number}")
        assert summary["rounds"] == 2
        assert [(each["silo"], each["why"]) for each in summary["lost"]] == [("b", "it never joined")]
        (note,) = [note for note in summary["notes"] if note.startswith("took no part")]
        assert "b answers CONFIG" in note and other in note


def test_a_mistake_in_the_strategy_is_told_as_such(tmp_path: Path) -> None:
    """All silos find it, and none is to blame."""
    config = strategy(tmp_path, "task.target=wealth")
    with pytest.raises(ConfigError, match="wealth"):
        run_virtual(config, silos({}, ""), tmp_path / "run")


@pytest.mark.parametrize(("budget", "code", "reason"), REFUSALS.values(), ids=REFUSALS)
def test_the_plan_names_a_silo_that_will_refuse(budget: dict[str, Any], code: str, reason: str, tmp_path: Path) -> None:
    config, machines = strategy(tmp_path, "min_silos=2"), silos(budget)
    planned = planned_spending(config, machines)
    assert [each.begins for each in planned] == [True, False, True]
    (warning,) = check_plan(config, machines, planned)
    assert warning.startswith("the run is refused by b (") and reason in warning
    with pytest.raises(ConfigError, match=r"refused by b \(.*\), and the run needs 3 silos to begin"):
        check_plan(strategy(tmp_path), machines, planned)
