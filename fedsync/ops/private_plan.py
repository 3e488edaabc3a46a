"""Table of what each emulated silo will spend in a private run, worked out before the run."""

from __future__ import annotations

from dataclasses import replace

from rich.table import Table

from fedsync.config.cluster import ClusterConfig
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig, PrivacyConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.tables import new_table
from fedsync.ops.silo_noise_plan import planned_by_colluders
from fedsync.privacy.accounting import LEAST_NOISE, shown
from fedsync.privacy.privacy_plan import PrivacyPlan
from fedsync.privacy.release import PrivateSettings


def planned_spending(config: StrategyConfig, cluster: ClusterConfig) -> Table | None:
    """Return noise and epsilon of each silo for the whole run; None for a run without privacy.

    Batches are taken to be of ``local.batch_size``; a silo that a balancer gives larger batches spends more.

    Raises:
        ConfigError: the data cannot be read.
    """
    privacy, stop = config.privacy, config.stop
    if privacy is not None and privacy.kind == "silo-noise":
        return planned_by_colluders(RunSpec.of(config, cluster, len(cluster.silos)), config.name)
    if privacy is None or config.task.own_loop:
        return None
    from fedsync.tasks.task_protocol import SiloSlot

    task = config.task.emulated({each.name: each.data for each in cluster.silos}).build_by_row()
    rounds = stop.rounds or 1
    title = f"{config.name}: planned privacy loss of {rounds} rounds of {config.local.steps} steps"
    table = new_table(title, "silo", "rows", "rate", "noise", "epsilon", "delta", "budget")
    plan = PrivacyPlan(rounds, config.local.steps, config.local.batch_size, privacy.score_noise)
    for index, silo in enumerate(cluster.silos):
        delta = privacy.delta if silo.privacy is None else silo.privacy.delta
        slot = SiloSlot(silo.name, index, len(cluster.silos), config.seed)
        told = None if silo.privacy is None else silo.privacy.examples
        units = told or len(task.data(slot).train)  # type: ignore[arg-type]  # torch declares no __len__
        settings = PrivateSettings(privacy.clip, privacy.noise_multiplier, units)
        if settings.noise is None:
            settings = replace(settings, noise=_noise(privacy, plan, settings, silo.privacy))
        cost = None if settings.noise is None else plan.epsilon(settings, delta)
        spent, budget = "too much" if cost is None else shown(cost), "none"
        if silo.privacy is not None:
            beyond = cost is None or cost > silo.privacy.epsilon
            budget = f"{silo.privacy.epsilon:g}{', exceeded' if beyond else ''}"
        rate = f"{settings.rate(config.local.batch_size):.4f}"
        noise = "none is enough" if settings.noise is None else f"{settings.noise:.3f}"
        table.add_row(silo.name, str(settings.units), rate, noise, spent, f"{delta:g}", budget)
    return table


def _noise(run: PrivacyConfig, plan: PrivacyPlan, settings: PrivateSettings, own: BudgetConfig | None) -> float | None:
    """Return the noise for the run's target, or for a budget that is smaller; None if none is enough."""
    assert run.target_epsilon is not None
    try:
        noise = plan.noise(settings, run.target_epsilon, run.delta, LEAST_NOISE if own is None else own.least_noise)
        return noise if own is None else plan.noise(settings, own.epsilon, own.delta, noise)
    except ValueError:
        return None
