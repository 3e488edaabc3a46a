"""Plan of a run with noise on whole updates: what it tells of a silo, by the number of silos that collude."""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from rich.table import Table

from fedsync.config.cipher import sealing
from fedsync.config.private_runs import silo_noise
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.tables import new_table
from fedsync.privacy.accounting import epsilon, shown
from fedsync.privacy.release import Release

if TYPE_CHECKING:
    from fedsync.cipher.encoding.silo_noise import SiloNoise


def planned_noise(config: StrategyConfig, silos: int) -> tuple[SiloNoise, int]:
    """Return the noise, and the least number of silos in a sum, of a run that begins with ``silos`` silos.

    Raises:
        ConfigError: no share of the noise is left, or no noise reaches the target.
    """
    sealed = sealing(config.settled(silos))
    assert sealed is not None
    members = sealed.members or 1
    noise = silo_noise(config.privacy, config.stop.rounds, members, sealed.colluding)
    assert noise is not None
    return noise, members


def colluders_table(config: StrategyConfig, silos: int) -> Table:
    """Return noise and epsilon of a silo for the whole run, with none to all but one of the other silos colluding."""
    noise, members = planned_noise(config, silos)
    assert config.privacy is not None
    rounds, delta = config.stop.rounds or 1, config.privacy.delta
    title = f"{config.name}: planned privacy loss of a silo in {rounds} rounds, in sums of {members} silos or more"
    table = new_table(title, "silos that collude", "noise", "epsilon", "delta")
    for colluding in range(members):
        left = noise.multiplier * sqrt((members - colluding) / noise.shares)
        told = f"{colluding} (cipher.colluding)" if colluding == members - noise.shares else str(colluding)
        spent = epsilon({Release(1.0, left): rounds}, delta, "rdp")
        table.add_row(told, f"{left:.3f}", shown(spent), f"{delta:g}")
    return table
