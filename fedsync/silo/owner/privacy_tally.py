"""Tally of what simulated silos spend of their privacy in one run, for the run's result.

A real silo's ledger stays with its owner (`fedsync.silo.owner.privacy_ledger`). In a simulation all silos are the
user's, so the result has what each has spent.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import PrivacyConfig
from fedsync.privacy.accounting import AccountantKind, epsilon
from fedsync.privacy.release import Release
from fedsync.silo.protocol import STATE

_FILE = "spent-{}.json"


@dataclass
class PrivacyTally:
    """Releases of one silo in one run.

    Args:
        budget: epsilon of the silo's budget; None without a budget.
        file: copy of the tally for the process that runs the simulation; None where both are one process.
    """

    silo: str
    delta: float
    budget: float | None = None
    accountant: AccountantKind = "pld"
    file: Path | None = None
    releases: Counter[Release] = field(default_factory=Counter)

    def add(self, releases: Mapping[Release, int]) -> None:
        self.releases.update(releases)
        if self.file is not None:
            counted = [[release.rate, release.noise, times] for release, times in self.releases.items()]
            text = json.dumps([self.silo, self.delta, self.budget, self.accountant, counted])
            write_atomically(self.file, text.encode(), OWNER_FILE, settle=False)

    def told(self) -> dict[str, float | None]:
        """Return the tally as ``summary.json`` has it."""
        return {
            "epsilon": epsilon(self.releases, self.delta, self.accountant),
            "delta": self.delta,
            "budget": self.budget,
        }


def tally_of(spec: RunSpec, config: PrivacyConfig, index: int) -> PrivacyTally:
    """Return the tally of silo ``index``; that of a real silo is in its memory only, and nobody reads it."""
    if not spec.emulate:
        return PrivacyTally("", config.delta)
    machine, root = spec.emulate[index], os.environ.get(STATE)
    file = None if root is None else Path(root) / _FILE.format(index)
    if file is not None and file.exists():  # of a trainer before this one
        return _read(file)
    own = machine.privacy
    if own is None:
        accountant: AccountantKind = "rdp" if config.kind == "silo-noise" else "pld"
        return PrivacyTally(machine.name, config.delta, None, accountant, file)
    return PrivacyTally(machine.name, own.delta, own.epsilon, own.accountant, file)


def spent_by(tallies: Iterable[PrivacyTally | None]) -> dict[str, Any]:
    """Return the part of ``summary.json`` about privacy; empty for a run without."""
    found = {each.silo: each.told() for each in tallies if each is not None}
    return {"privacy": found} if found else {}


def kept_tallies(state: Path) -> list[PrivacyTally]:
    """Return the tallies that trainers of emulated silos kept in the folder of trainers."""
    return sorted(map(_read, state.glob(_FILE.format("*"))), key=lambda each: each.silo)


def _read(file: Path) -> PrivacyTally:
    silo, delta, budget, accountant, counted = json.loads(file.read_bytes())
    releases = Counter({Release(rate, noise): times for rate, noise, times in counted})
    return PrivacyTally(silo, delta, budget, accountant, file, releases)
