"""Tables of a silo's privacy budgets, for its owner."""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from pathlib import Path
from typing import Any

from rich.table import Table

from fedsync.config.silo_start import SiloStartConfig
from fedsync.observe.tables import new_table
from fedsync.privacy.accounting import shown
from fedsync.silo.owner.owner_policy import ALL_DATA, OwnerPolicy
from fedsync.silo.owner.privacy_guard import ledger_of
from fedsync.silo.owner.privacy_ledger import ledger_file


def spending(config: SiloStartConfig) -> tuple[list[Table], list[str]]:
    """Tables of what runs spent, by budget, and notes on ledgers without budget; `ConfigError` for a damaged ledger."""
    policy, tables = OwnerPolicy.of(config), []
    for name, budget in policy.privacy.items():
        ledger = ledger_of(policy, name)
        title = f"{name}: epsilon {budget.epsilon:g} at delta {budget.delta:g}, for each {budget.unit}"
        table = new_table(title, "run", "steps and scores", "noise", "epsilon")
        for run, releases in ledger.by_run.items():
            noise = sorted({release.noise for release in releases})
            told = f"{noise[0]:g}" if len(noise) == 1 else f"{noise[0]:g} to {noise[-1]:g}"
            table.add_row(run, str(releases.total()), told, shown(ledger.epsilon(run)))
        spent = ledger.epsilon()
        table.add_section()
        table.add_row("all runs together", str(ledger.spent.total()), "", shown(spent))
        left = 0.0 if spent == inf else max(budget.epsilon - float(shown(spent)), 0.0)
        table.add_row("left", "", "", f"{left:.3f}")
        tables.append(table)
    known = {ledger_file(policy.ledgers, name) for name in policy.privacy}
    unnamed = [path for path in sorted(Path(policy.ledgers).glob("*.jsonl")) if path not in known]
    whole = ledger_file(policy.ledgers, ALL_DATA)
    notes = [
        f"{path} has entries, and no budget in silo.yaml is of that name"
        + (": they count in the budgets above" if whole in {path, *known} and policy.privacy else "")
        for path in unnamed
    ]
    return tables, notes or ([] if tables else ["there is no privacy budget in silo.yaml"])


def spent_table(summary: Mapping[str, Any]) -> Table:
    """Return the table of what each silo of a simulated run has spent, from the run's summary."""
    virtual = summary["runtime"] == "virtual"
    seeded = "; in virtual time noise comes from the seed and protects nobody" if virtual else ""
    table = new_table(f"{summary['strategy']}: privacy spent{seeded}", "silo", "epsilon", "delta", "budget")
    for name, spent in summary["privacy"].items():
        budget = "none" if spent["budget"] is None else f"{spent['budget']:g}"
        table.add_row(name, shown(spent["epsilon"]), f"{spent['delta']:g}", budget)
    return table
