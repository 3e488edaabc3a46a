"""Private runs in virtual time: two runs of one seed are equal, byte by byte, and an encrypted run is as the clear.

And a run that its server continues under another name has one budget for both parts.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.silo.protocol import Identity
from fedsync.silo.session.session import SiloSession
from fedsync.simulation.run import run_virtual
from tests.privacy.guards import BUDGET, ORDER, PRIVATE, guard_of, owner, strategy
from tests.simulation.test_columns import table

pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing")

ROWS: dict[str, Any] = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 2.0, "score_noise": 5.0}
UPDATES: dict[str, Any] = {"kind": "silo-noise", "clip": 1.0, "noise_multiplier": 2.0}
SEALED = "cipher={kind: bfv, metrics: plain, members: 3, kept_versions: 0}"
FILES = ("journal.jsonl", "rounds.jsonl", "summary.json", "model.pt")
CASES = {
    "rows": (ROWS, []),
    "encrypted rows": (ROWS, ["cipher={kind: bfv, metrics: plain}"]),
    "updates": (UPDATES, [SEALED, "aggregation={kind: fedavg, weight: silo}"]),
}


def run(folder: Path, privacy: Mapping[str, Any], changes: list[str], out: Path) -> dict[str, bytes]:
    files = [table(folder / f"{name}.csv", ["age", "dose", "sick"]) for name in "abc"]
    scales = {"age": [32, 7], "dose": [5, 3]}
    task = json.dumps({"kind": "csv", "files": files, "target": "sick", "standardise": scales})
    given = [f"task={task}", f"privacy={json.dumps(privacy)}", "stop.rounds=2", *changes]
    config = StrategyConfig.load("fedavg", [*given, "local={steps: 3, batch_size: 4, threads: 1}"])
    silos = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 100} for name in "abc"]})
    run_virtual(config, silos, out)
    return {name: (out / name).read_bytes() for name in FILES}


@pytest.mark.slow
@pytest.mark.parametrize(("privacy", "changes"), CASES.values(), ids=CASES)
def test_runs_of_one_seed_are_equal_and_no_more(privacy: Mapping[str, Any], changes: list[str], tmp_path: Path) -> None:
    one, again = (run(tmp_path, privacy, changes, tmp_path / name) for name in ("one", "again"))
    assert one == again
    (tmp_path / "moved").mkdir()
    moved = run(tmp_path / "moved", privacy, changes, tmp_path / "elsewhere")
    for name in ("rounds.jsonl", "model.pt"):
        assert moved[name] == one[name], "noise knows no folder"
    assert run(tmp_path, privacy, [*changes, "seed=99"], tmp_path / "other")["model.pt"] != one["model.pt"]


@pytest.mark.slow
def test_the_first_encrypted_updates_that_weigh_by_precision_are_not_rounded_away(tmp_path: Path) -> None:
    """Noise on 322 values takes nine bits of the weights, and so of the updates, which silos foresee in their votes."""
    found = {}
    for name, cipher in (("clear", []), ("encrypted", ["cipher={kind: bfv, metrics: plain, bits: 8}"])):
        weighed = ["aggregation={kind: fedavg, weight: precision}", "task.model=mlp", "task.hidden=64", *cipher]
        run(tmp_path, ROWS, [*weighed, "stop.rounds=1"], tmp_path / name)
        found[name] = torch.cat([each.flatten() for each in torch.load(tmp_path / name / "model.pt").values()])
    assert float((found["encrypted"] - found["clear"]).abs().max()) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize("budget", [None, BUDGET], ids=["no budget", "an owner's budget"])
def test_a_run_that_goes_on_under_another_name_goes_on_with_what_it_spent(
    budget: BudgetConfig | None, folder: Path
) -> None:
    """Its server lost a checkpoint: the silo has another folder for it, without the orders that it finished."""
    aim = {**PRIVATE, "noise_multiplier": None, "target_epsilon": 2.0, "delta": 1e-3}
    config = strategy(folder, aim)
    local = config.local.model_copy(update={"steps": ORDER.max_steps, "batch_size": ORDER.batch_size})
    spec = RunSpec.of(config.model_copy(update={"local": local}), None, 3)
    rules, noises = owner(folder, budget), []
    names = (("x-1", "", 0, 0), ("x-2", "x-1", 0, 6), ("x-3", "x-1", 0, 12), ("y", "", 0, 0), ("x-4", "x-1", 1, 0))
    for name, began, index, spent in names if budget is None else names[:-1]:
        named = spec.model_copy(update={"run": name, "began": began})
        identity, home = Identity(named.dump(), index, "a"), folder / "trainers" / name
        home.mkdir(parents=True, mode=0o700)
        identity.save(home)
        subject = SiloSession(identity, named, owner=rules, folder=home)
        guard = guard_of(subject)
        assert guard.ledgers[-1].spent.total() == spent, "neither another run's nor another silo's"
        noises.append(guard.settings.noise)
        for number in (1, 2):
            order = replace(ORDER, update_id=f"a/{spent + number}", base_version=spent // 3 + number - 1)
            subject.train(order, subject.initial_model())
    assert noises == pytest.approx(noises[:1] * len(noises), rel=0.02), (
        "what is left is planned, and not the whole run again"
    )
