"""Plan of what each silo will spend in a private run, worked out before the run.

With noise on whole updates, all silos have one plan, which depends on the number of silos that collude.
"""

from __future__ import annotations

from math import sqrt
from typing import TYPE_CHECKING

from fedsync.config.cipher import sealing
from fedsync.config.private_runs import silo_noise

if TYPE_CHECKING:
    from fedsync.cipher.encoding.silo_noise import SiloNoise

from collections.abc import Sequence
from dataclasses import dataclass, replace

from rich.table import Table

from fedsync.common.errors import ConfigError
from fedsync.config.cipher import least_silos
from fedsync.config.cluster import ClusterConfig
from fedsync.config.sections.privacy import BudgetConfig, PrivacyConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.tables import new_table
from fedsync.privacy.accounting import LEAST_NOISE, PrivacyPlan, epsilon, shown
from fedsync.privacy.release import PrivateSettings, Release


@dataclass(frozen=True, slots=True)
class PlannedSilo:
    """Privacy loss of a whole run at one silo.

    Args:
        settings: settings of the silo, without noise if no noise is enough.
        epsilon: None if no noise is enough.
    """

    silo: str
    settings: PrivateSettings
    epsilon: float | None
    delta: float
    budget: float | None

    @property
    def begins(self) -> bool:
        return self.epsilon is not None

    @property
    def ends(self) -> bool:
        return self.epsilon is not None and (self.budget is None or self.epsilon <= self.budget)


def planned_spending(config: StrategyConfig, cluster: ClusterConfig) -> list[PlannedSilo]:
    """Return what each silo will spend in the whole run; empty for a run without privacy.

    Batches are taken to be of ``local.batch_size``; a silo that a balancer gives larger batches spends more. Raises
    `ConfigError` if the data cannot be read.
    """
    privacy = config.privacy
    if privacy is not None and privacy.kind == "silo-noise":
        return _planned_updates(config, cluster)
    if privacy is None or config.task.own_loop:
        return []
    from fedsync.tasks.task_protocol import SiloSlot

    task = config.task.emulated({each.name: each.data for each in cluster.silos}).build_by_row()
    plan = PrivacyPlan(_rounds(config), config.local.steps, config.local.batch_size, privacy.score_noise)
    found = []
    for index, silo in enumerate(cluster.silos):
        own = silo.privacy
        delta = privacy.delta if own is None else own.delta
        slot = SiloSlot(silo.name, index, len(cluster.silos), config.seed)
        told = None if own is None else own.examples
        units = told or len(task.data(slot).train)  # type: ignore[arg-type]  # torch declares no __len__
        settings = PrivateSettings(privacy.clip, privacy.noise_multiplier, units)
        if settings.noise is None:
            settings = replace(settings, noise=_noise(privacy, plan, settings, own))
        cost = None if settings.noise is None else plan.epsilon(settings, delta)
        found.append(PlannedSilo(silo.name, settings, cost, delta, None if own is None else own.epsilon))
    return found


def _planned_updates(config: StrategyConfig, cluster: ClusterConfig) -> list[PlannedSilo]:
    assert config.privacy is not None
    noise, _ = planned_noise(config, cluster.at_start)
    found, settings = [], PrivateSettings(config.privacy.clip, noise.multiplier, 1)
    for silo in cluster.silos:
        delta = config.privacy.delta if silo.privacy is None else silo.privacy.delta
        cost = epsilon({Release(1.0, noise.multiplier): _rounds(config)}, delta, "rdp")
        found.append(
            PlannedSilo(silo.name, settings, cost, delta, None if silo.privacy is None else silo.privacy.epsilon)
        )
    return found


def plan_table(config: StrategyConfig, cluster: ClusterConfig, planned: Sequence[PlannedSilo]) -> Table:
    if config.privacy is not None and config.privacy.kind == "silo-noise":
        return colluders_table(config, cluster.at_start)
    title = f"{config.name}: planned privacy loss of {_rounds(config)} rounds of {config.local.steps} steps"
    table = new_table(title, "silo", "rows", "rate", "noise", "epsilon", "delta", "budget")
    for each in planned:
        beyond = "" if each.ends else ", exceeded"
        table.add_row(
            each.silo,
            str(each.settings.units),
            f"{each.settings.rate(config.local.batch_size):.4f}",
            "none is enough" if each.settings.noise is None else f"{each.settings.noise:.3f}",
            "too much" if each.epsilon is None else shown(each.epsilon),
            f"{each.delta:g}",
            "none" if each.budget is None else f"{each.budget:g}{beyond}",
        )
    return table


def check_plan(config: StrategyConfig, cluster: ClusterConfig, planned: Sequence[PlannedSilo]) -> list[str]:
    """Return warnings about silos that the run will lose by their budgets. Raises `ConfigError` if fewer silos are left
    than the run needs to begin, or to end.
    """
    refused = [each.silo for each in planned if not each.begins]
    spent = [each.silo for each in planned if each.begins and not each.ends]
    at_start = cluster.at_start
    begin, end = config.quorum(at_start), max(config.min_silos or 1, least_silos(config.settled(at_start)))
    remedy = "Ask for fewer rounds or steps, smaller batches or more score_noise; raise budgets; or lower min_silos"
    if refused and len(planned) - len(refused) < begin:
        problem = f"no noise is enough at {', '.join(refused)}, and the run needs {begin} silos to begin"
        raise ConfigError("privacy", problem, remedy)
    if (out := [*refused, *spent]) and len(planned) - len(out) < end:
        problem = f"the run exceeds the budget of {', '.join(out)}, and needs {end} silos to end"
        raise ConfigError("privacy", problem, remedy)
    warnings = [f"no noise is enough at {', '.join(refused)}: the run goes on without"] if refused else []
    if spent:
        warnings.append(f"the run exceeds the budget of {', '.join(spent)}, and goes on without when it is spent")
    return warnings


def _rounds(config: StrategyConfig) -> int:
    return config.stop.rounds or 1


def _noise(run: PrivacyConfig, plan: PrivacyPlan, settings: PrivateSettings, own: BudgetConfig | None) -> float | None:
    """Return the noise for the run's target, or for a budget that is smaller; None if none is enough."""
    assert run.target_epsilon is not None
    try:
        noise = plan.noise(settings, run.target_epsilon, run.delta, LEAST_NOISE if own is None else own.least_noise)
        return noise if own is None else plan.noise(settings, own.epsilon, own.delta, noise)
    except ValueError:
        return None


def planned_noise(config: StrategyConfig, silos: int) -> tuple[SiloNoise, int]:
    """Return the noise, and the least number of silos in a sum, of a run that begins with ``silos`` silos. Raises
    `ConfigError` if no share of the noise is left, or no noise reaches the target.
    """
    sealed = sealing(config.settled(silos))
    assert sealed is not None
    members = sealed.members or 1
    noise = silo_noise(config.privacy, config.stop.rounds, members, sealed.colluding)
    assert noise is not None
    return noise, members


def colluders_table(config: StrategyConfig, silos: int) -> Table:
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
