"""Table of what a run with noise on whole updates tells of a silo, by the number of silos that collude."""

from __future__ import annotations

from math import sqrt

from rich.table import Table

from fedsync.config.cipher import sealing
from fedsync.config.private_runs import silo_noise
from fedsync.config.run_spec import RunSpec
from fedsync.observe.tables import new_table
from fedsync.privacy.accounting import epsilon, shown
from fedsync.privacy.release import Release


def planned_by_colluders(spec: RunSpec, name: str) -> Table:
    """Return noise and epsilon of a silo for the whole run, with none to all but one of the other silos colluding.

    Raises:
        ConfigError: no share of the noise is left, or no noise reaches the target.
    """
    privacy, sealed = spec.privacy, sealing(spec.cipher)
    assert privacy is not None and sealed is not None
    rounds, members = 1 if spec.stop is None else spec.stop.rounds or 1, sealed.members or 1
    noise = silo_noise(privacy, rounds, members, sealed.colluding)
    assert noise is not None
    title = f"{name}: planned privacy loss of a silo in {rounds} rounds, in sums of {members} silos or more"
    table = new_table(title, "silos that collude", "noise", "epsilon", "delta")
    for colluding in range(members):
        left = noise.multiplier * sqrt((members - colluding) / noise.shares)
        told = f"{colluding} (cipher.colluding)" if colluding == sealed.colluding else str(colluding)
        spent = epsilon({Release(1.0, left): rounds}, privacy.delta, "rdp")
        table.add_row(told, f"{left:.3f}", shown(spent), f"{privacy.delta:g}")
    return table
