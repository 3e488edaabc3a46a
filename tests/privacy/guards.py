"""Silos under a guard of budgets, small ones: their strategies, owners, sessions and ledgers."""

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np

from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig, PrivacyConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import Cursor, Evaluation, Window, WorkOrder, WorkReport
from fedsync.privacy.release import PrivateSettings, Release
from fedsync.silo.owner.owner_policy import ALL_DATA, OwnerPolicy
from fedsync.silo.owner.privacy_guard import PrivacyGuard
from fedsync.silo.owner.privacy_ledger import PrivacyLedger
from fedsync.silo.protocol import Identity
from fedsync.silo.session.session import SiloSession
from fedsync.train.silo_trainer import Outcome, SiloTrainer

ROWS, TRAIN, BATCH = 50, 42, 8
"""Rows of the silo's file, those of them that it trains on, and the batch of an order."""

BUDGET = BudgetConfig(epsilon=8.0, delta=1e-3)
PRIVATE = {"kind": "dp-sgd", "clip": 1.0, "noise_multiplier": 1.0}
STEP = Release(BATCH / TRAIN, 1.0)
SCORED = Release(1.0, 5.0)
ORDER = WorkOrder("a/1", 0, 1, BATCH, 3, 0.1, seed=1, evaluate=False)
FOUND = Evaluation(3.5, 6.0, 10, {"own": (0.5, 10)}, {"sum": (1.0,)}, {"local": {"accuracy": (0.1, 0.2)}})
REPORT = WorkReport(
    0, 3, 24, compute_s=0.25, loss=0.7, overhead_s={"load": 0.1}, windows=(Window(96.0, 0.5, 0.5),), batch_cap=17,
    evaluation=FOUND, metrics={"peak_memory_bytes": 1e9},
)  # fmt: skip


def strategy(folder: Path, privacy: Mapping[str, Any] | None = None, **more: Any) -> StrategyConfig:
    task = {
        "kind": "csv",
        "files": [str(folder / "a.csv")] * 3,
        "target": "ill",
        "ignore": ["person"],
        "standardise": {"x": [0, 1], "y": [0, 1]},
        **more,
    }
    given = [f"task={json.dumps(task)}", "local.threads=1", f"privacy={json.dumps(privacy)}"]
    return StrategyConfig.load("fedavg", given)


def owner(folder: Path, budget: BudgetConfig | None = BUDGET) -> OwnerPolicy:
    budgets = {} if budget is None else {ALL_DATA: budget}
    return OwnerPolicy(privacy=budgets, ledgers=str(folder / "state"))


def begun(
    config: StrategyConfig, rules: OwnerPolicy | None = None, machines: ClusterConfig | None = None
) -> SiloSession:
    """A silo's part of a run."""
    spec = RunSpec.of(config, machines, 3)
    return SiloSession(Identity(spec.dump(), 0, "a"), spec, owner=rules)


def session(
    folder: Path, privacy: Mapping[str, Any] | None = None, budget: BudgetConfig | None = BUDGET
) -> SiloSession:
    return begun(strategy(folder, {**PRIVATE, **(privacy or {})}), owner(folder, budget))


def guard_of(session: SiloSession) -> PrivacyGuard:
    return next(each for each in session._extensions if isinstance(each, PrivacyGuard))


def entered(folder: Path, budget: BudgetConfig = BUDGET) -> Counter[Release]:
    return PrivacyLedger(ALL_DATA, budget, folder / "state" / f"{ALL_DATA}.jsonl").load().spent


def guard(
    folder: Path, *budgets: BudgetConfig, score_noise: float | None = None, seeded: bool = False, counts: bool = True
) -> PrivacyGuard:
    ledgers = tuple(
        PrivacyLedger(f"data-{number}", budget, folder / f"data-{number}.jsonl").load()
        for number, budget in enumerate(budgets)
    )
    config = PrivacyConfig(kind="dp-sgd", clip=1.0, noise_multiplier=1.0, score_noise=score_noise)
    settings = PrivateSettings(1.0, 1.0, TRAIN, seeded=seeded)
    return PrivacyGuard(config, ledgers, settings, cast(SiloTrainer, None), "run", rounds=10, counts=counts)


def outcome(report: WorkReport = REPORT) -> Outcome:
    return Outcome(np.ones(3, np.float32), report, Cursor())
