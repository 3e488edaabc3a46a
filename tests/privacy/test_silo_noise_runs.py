"""Runs that protect whole silos: what they need, what each order spends, and what a silo's owner may demand."""

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedsync.cipher.keys.authority import emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.common.errors import BudgetSpent, ConfigError, OwnerRefusal
from fedsync.config.cipher import sealing
from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder
from fedsync.extras.privacy_plan.private_plan import plan_table, planned_spending
from fedsync.privacy.accounting import epsilon
from fedsync.privacy.release import Release
from fedsync.silo.owner.owner_policy import ALL_DATA, OwnerPolicy
from fedsync.silo.owner.privacy_ledger import PrivacyLedger
from fedsync.silo.protocol import Completed, Identity
from fedsync.silo.session.session import SiloSession
from fedsync.simulation.run import run_virtual
from tests.simulation.lost import SILO_APP

NOISY: dict[str, Any] = {"kind": "silo-noise", "clip": 1.0, "noise_multiplier": 2.0, "delta": 1e-2}
SEALED = {"kind": "bfv", "metrics": "plain", "members": 3, "kept_versions": 0}
SILO = BudgetConfig(unit="silo", epsilon=4.0, delta=1e-2, accountant="rdp")
ORDER = WorkOrder("a/1", 0, 1, 8, 3, 0.1, seed=1, evaluate=False)


def strategy(name: str = "fedavg", *changes: str, privacy: dict[str, Any] = NOISY, **cipher: Any) -> StrategyConfig:
    given = [f"privacy={json.dumps(privacy)}", f"cipher={json.dumps({**SEALED, **cipher})}", "stop={rounds: 4}"]
    return StrategyConfig.load(name, [*given, "aggregation={kind: fedavg, weight: silo}", "local.threads=1", *changes])


def spec_of(config: StrategyConfig) -> RunSpec:
    return RunSpec.of(config, None, 4).model_copy(update={"quorum": 4})


def session(folder: Path, config: StrategyConfig, budget: BudgetConfig | None, index: int = 0) -> SiloSession:
    spec, names = spec_of(config), list("abcd")
    keys = emulated_keys(names, folder / "keys", seed=1)
    owner = OwnerPolicy(privacy={} if budget is None else {ALL_DATA: budget}, ledgers=str(folder / "state"))
    identity = Identity(spec.dump(), index, names[index])
    return SiloSession(identity, spec, lambda name: replace(open_ring(keys.silos[name]), folder=None), owner)


def trained(folder: Path, budget: BudgetConfig) -> Completed:
    """The answer of the first of four silos to its first order."""
    silos = [session(folder, strategy(), budget, index) for index in range(4)]
    plan = spec_of(strategy()).encryption_plan(silos[0].layout)
    assert plan is not None
    aggregator = EncryptedAggregator(plan, emulated_keys(list("abcd"), folder / "keys", seed=1).server)
    for silo in silos:
        aggregator.greet(silo.name, silo.replica.holds, silo.replica.greeting())
    aggregator.begin(ORDER.update_id)
    return silos[0].train(ORDER, aggregator.outgoing("a"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        (["cipher={kind: plain}"], "each update with only its own share"),
        (["aggregation={kind: fedavg, weight: examples}"], "Write weight: silo"),
        (["stop={seconds: 60}", "privacy={kind: silo-noise, clip: 1, target_epsilon: 2}"], "whose length is open"),
        (["privacy={kind: silo-noise, clip: 1, noise_multiplier: 2, score_noise: 5}"], "protects rows, not whole"),
        (["evaluation={cross_site: {}}"], "models without noise"),
        (
            ["server_optimizer={kind: scaffold}", "aggregation={kind: fednova, weight: silo}"],
            "each silo's exact updates",
        ),
        (["task={kind: csv, files: [a.csv], target: ill, standardise: federated}"], "statistics of columns"),
        (["stop={rounds: 9, target_accuracy: 0.9}"], "scores, which are withheld"),
    ],
)
def test_what_noise_on_updates_does_not_hide_is_refused(changes: list[str], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        strategy("fedavg", *changes)


@pytest.mark.parametrize(
    ("cipher", "problem"),
    [
        ({"metrics": "sealed"}, "exact figures"),
        ({"only": ["*"]}, "tensors without noise"),
        ({"kept_versions": 8}, "Write kept_versions: 0"),
    ],
)
def test_a_cipher_that_leaves_exact_values_is_refused(cipher: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        strategy(**cipher)


def test_sums_in_which_all_silos_may_collude_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no noise of an honest silo"):
        session(tmp_path, strategy(members=1), None)


def test_statistics_of_norm_layers_may_not_take_the_clip(tmp_path: Path) -> None:
    task = "task={kind: images, model: cnn, norm: batch, data: {kind: digits28, samples: 80}}"
    with pytest.raises(ConfigError, match=r"take most of privacy\.clip\. Use group norm, or .*model\.private"):
        session(tmp_path, strategy("fedavg", task), None)
    session(tmp_path, strategy("fedavg", task, "model={private: ['*running_*', '*tracked']}"), None)


def test_a_target_that_no_noise_reaches_is_refused_in_a_line(tmp_path: Path) -> None:
    privacy = {"kind": "silo-noise", "clip": 1.0, "target_epsilon": 1e-3}
    with pytest.raises(ConfigError, match=r"^privacy\.target_epsilon: no noise is enough .* 0\.001\. Raise it"):
        session(tmp_path, strategy("fedavg", "stop={rounds: 1000}", privacy=privacy), None)


def test_each_order_is_one_release_of_the_whole_noise(tmp_path: Path) -> None:
    done = trained(tmp_path, SILO)
    assert done.report.loss is None and done.report.evaluation is None
    ledger = PrivacyLedger(ALL_DATA, SILO, tmp_path / "state" / f"{ALL_DATA}.jsonl").load()
    assert ledger.spent == Counter({Release(1.0, 2.0): 1})


def test_the_server_learns_the_public_number_of_rows(tmp_path: Path) -> None:
    """The owner's number, and not the number of rows in the file, as in runs that protect examples."""
    silo = session(tmp_path, strategy(), SILO.model_copy(update={"examples": 100}))
    assert silo._trainer.facts.examples != 100 and silo.facts.examples == 100


def test_a_target_gives_all_silos_the_noise_of_all_rounds(tmp_path: Path) -> None:
    aimed = {"kind": "silo-noise", "clip": 1.0, "target_epsilon": 5.0, "delta": 1e-2}
    plan = spec_of(strategy(privacy=aimed)).encryption_plan(session(tmp_path, strategy(), None).layout)
    assert plan is not None and plan.noise is not None and plan.noise.shares == 2
    assert 4.9 < epsilon({Release(1.0, plan.noise.multiplier): 4}, 1e-2, "rdp") <= 5.0


def test_an_order_beyond_the_silo_s_budget_is_refused(tmp_path: Path) -> None:
    small = SILO.model_copy(update={"epsilon": 1.1})
    assert epsilon({Release(1.0, 2.0): 1}, 1e-2, "rdp") > 1.1
    with pytest.raises(BudgetSpent):
        trained(tmp_path, small)


@pytest.mark.parametrize(
    ("privacy", "budget", "problem"),
    [
        (NOISY, BudgetConfig(epsilon=4.0, delta=1e-2), "protects another unit"),
        ({"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 2.0}, SILO, "protects another unit"),
        (NOISY, SILO.model_copy(update={"least_noise": 3.0}), "demands at least 3"),
        (NOISY, SILO.model_copy(update={"largest_clip": 0.5}), "allows at most 0.5"),
    ],
)
def test_the_owners_demand_is_kept(privacy: dict[str, Any], budget: BudgetConfig, problem: str, tmp_path: Path) -> None:
    with pytest.raises(OwnerRefusal, match=problem):
        session(tmp_path, strategy(privacy=privacy), budget)


def test_a_silo_s_budget_is_counted_by_the_bound_that_holds_for_discrete_noise() -> None:
    with pytest.raises(ValueError, match="write accountant: rdp"):
        BudgetConfig(unit="silo", epsilon=1.0, delta=1e-2)


def test_training_code_of_any_kind_takes_part(tmp_path: Path) -> None:
    """Noise on whole updates looks at no step, so a loop of the user's own needs no call for it."""
    (tmp_path / "app.py").write_text(SILO_APP.format(setup="pass", loss="pass", step="pass", evaluate="pass"))
    app = f"task={{kind: silo-app, file: {tmp_path / 'app.py'}}}"
    machines = ClusterConfig.model_validate({"silos": [{"name": "site", "count": 4, "speed": 100}]})
    summary = run_virtual(strategy("fedavg", app), machines, tmp_path / "out")
    assert summary["rounds"] == 4 and summary["lost"] == []


@pytest.mark.slow
def test_a_silo_without_budget_is_left_out_and_the_others_go_on(tmp_path: Path) -> None:
    small = {"unit": "silo", "epsilon": 2.5, "delta": 0.01, "accountant": "rdp"}
    silos = [{"name": name, "speed": 100} for name in "abc"] + [{"name": "d", "speed": 100, "privacy": small}]
    summary = run_virtual(strategy(), ClusterConfig.model_validate({"silos": silos}), tmp_path)
    assert summary["rounds"] == 4
    (lost,) = summary["lost"]
    assert lost["silo"] == "d" and "BUDGET" in lost["why"].upper()


def test_the_plan_tells_what_colluding_silos_leave() -> None:
    machines = ClusterConfig.model_validate({"silos": [{"name": "site", "count": 4, "speed": 100}]})
    planned = planned_spending(strategy(), machines)
    assert all(each.ends and each.epsilon == epsilon({Release(1.0, 2.0): 4}, 1e-2, "rdp") for each in planned)
    table = plan_table(strategy(), machines, planned)
    told = [list(column.cells) for column in table.columns]
    assert told[0] == ["0", "1 (cipher.colluding)", "2"]
    for colluding, (noise, spent) in enumerate(zip(told[1], told[2], strict=True)):
        left = 2.0 * ((3 - colluding) / 2) ** 0.5
        assert float(noise) == pytest.approx(left, abs=1e-3)
        assert float(spent) == pytest.approx(epsilon({Release(1.0, left): 4}, 1e-2, "rdp"), abs=2e-3)


@pytest.mark.parametrize("change", ["barrier={kind: buffered, size: 3}", "stop={seconds: 30}"])
def test_the_plan_tells_the_loss_of_the_silo_with_the_most_updates(change: str) -> None:
    silos = [{"name": name, "speed": speed} for name, speed in zip("abcd", (4000, 100, 100, 100), strict=True)]
    machines, config = ClusterConfig.model_validate({"silos": silos}), strategy("fedavg", change)
    planned = planned_spending(config, machines)
    most = max(each.epsilon or 0.0 for each in planned)
    table = plan_table(config, machines, planned)
    assert float(list(table.columns[2].cells)[1]) == pytest.approx(most, abs=1e-3)
    assert most > epsilon({Release(1.0, 2.0): 1 if "seconds" in change else 4}, 1e-2, "rdp")
    assert "of these machines in virtual time" in str(table.caption)


def test_a_target_is_refused_where_a_silo_may_send_more_than_one_update_in_a_round() -> None:
    barrier, privacy = "barrier={kind: buffered, size: 3}", {**NOISY, "noise_multiplier": None, "target_epsilon": 4.0}
    with pytest.raises(ConfigError, match=r"fast silos send more\. Write noise_multiplier"):
        strategy("fedavg", barrier, privacy=privacy)
    strategy("fedavg", barrier)


def test_the_plan_counts_the_silos_that_begin() -> None:
    """As the run does: a silo that joins later may be in sums, and no sum needs it."""
    late = [{"name": "early", "count": 3, "speed": 100}, {"name": "late", "speed": 100, "joins_at_s": 9}]
    machines, config = ClusterConfig.model_validate({"silos": late}), strategy(members=None)
    table = plan_table(config, machines, planned_spending(config, machines))
    sealed = sealing(RunSpec.of(config, machines, 4).cipher)
    assert sealed is not None and sealed.members == 3
    assert list(table.columns[0].cells) == ["0", "1 (cipher.colluding)", "2"]
