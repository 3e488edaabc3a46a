"""Forecast of the privacy budget that each silo will spend in a run, computed by the silos' own budget checks.

With noise on whole updates, all silos have the same plan, which depends on the number of silos that collude.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import sqrt
from typing import TYPE_CHECKING, cast

from rich.table import Table

from fedsync.common.errors import BudgetSpent, ConfigError
from fedsync.config.cipher import least_silos, sealing
from fedsync.config.cluster import ClusterConfig
from fedsync.config.private_runs import silo_noise
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.model.layout import Layout
from fedsync.observe.tables import new_table
from fedsync.privacy.accounting import epsilon, shown
from fedsync.privacy.release import PrivateSettings, Release
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.owner.privacy_guard import check_budgets, privacy_guard
from fedsync.silo.owner.privacy_ledger import tally_of
from fedsync.silo.protocol import Identity
from fedsync.train.silo_trainer import SiloTrainer, TrainerFacts

if TYPE_CHECKING:
    from fedsync.cipher.encoding.silo_noise import SiloNoise
    from fedsync.tasks.task_protocol import SiloSlot, Task


@dataclass(frozen=True, slots=True)
class PlannedSilo:
    """Privacy loss of a whole run at one silo.

    Args:
        settings: settings of the silo, without noise if it refuses the run.
        epsilon: None if the silo refuses the run.
        refusal: reason of a refusal, empty where no noise is enough.
    """

    silo: str
    settings: PrivateSettings
    epsilon: float | None
    delta: float
    budget: float | None
    refusal: str = ""

    @property
    def begins(self) -> bool:
        return self.epsilon is not None

    @property
    def ends(self) -> bool:
        return self.epsilon is not None and (self.budget is None or self.epsilon <= self.budget)


class _Rows:
    """Trainer as far as a plan needs it: the silo's numbers of rows and persons. ``task`` is None if nobody reads."""

    def __init__(self, task: Task | None, slot: SiloSlot) -> None:
        self._task, self._slot = task, slot

    @cached_property
    def facts(self) -> TrainerFacts:
        data = None if self._task is None else self._task.data(self._slot)
        rows = 1 if data is None else len(data.train)  # type: ignore[arg-type]  # torch declares no __len__
        validates = data is not None and bool(data.validation)
        return TrainerFacts(Layout((), ()), "", (), None, "cpu", rows, validates)

    def make_private(self, settings: PrivateSettings) -> int:
        if self._task is None or not settings.person_column:
            return self.facts.examples
        return len(set(self._task.persons(self._slot, settings.person_column).tolist()))


def planned_spending(config: StrategyConfig, cluster: ClusterConfig) -> list[PlannedSilo]:
    """Return what each silo will spend in the whole run; empty for a run without privacy.

    Batches are taken to be of ``local.batch_size``; a silo that a balancer gives larger batches spends more.
    """
    privacy = config.privacy
    if privacy is None or (privacy.kind == "dp-sgd" and config.task.own_loop):
        return []
    from fedsync.tasks.task_protocol import SiloSlot

    whole, spec = privacy.kind == "silo-noise", RunSpec.of(config, cluster, len(cluster.silos))
    noise = planned_noise(config, cluster.at_start)[0] if whole else None
    task, text = None if whole else spec.task.build_by_row(), spec.dump()
    slots = [SiloSlot(silo.name, index, len(cluster.silos), config.seed) for index, silo in enumerate(cluster.silos)]
    return [_planned(spec, Identity(text, slot.index, slot.name), _Rows(task, slot), noise) for slot in slots]


def _planned(spec: RunSpec, identity: Identity, rows: _Rows, noise: SiloNoise | None) -> PlannedSilo:
    assert spec.privacy is not None
    tally, trainer = replace(tally_of(spec, spec.privacy, identity.index), file=None), cast(SiloTrainer, rows)
    settings = PrivateSettings(spec.privacy.clip, None, 1)
    try:
        ledgers = check_budgets(spec, identity, OwnerPolicy())
        guard = privacy_guard(spec, identity, ledgers, trainer, noise, seeded=True)
        assert guard is not None
    except BudgetSpent:
        return PlannedSilo(identity.name, replace(settings, units=rows.facts.examples), None, tally.delta, tally.budget)
    except ConfigError as error:
        return PlannedSilo(identity.name, settings, None, tally.delta, tally.budget, str(error))
    tally.add(guard.planned(spec.local.batch_size, spec.local.steps))
    told = tally.told()
    return PlannedSilo(identity.name, guard.settings, told["epsilon"], tally.delta, tally.budget)


def plan_table(config: StrategyConfig, cluster: ClusterConfig, planned: Sequence[PlannedSilo]) -> Table:
    if config.privacy is not None and config.privacy.kind == "silo-noise":
        return colluders_table(config, cluster.at_start)
    title = f"{config.name}: planned privacy loss of {_rounds(config)} rounds of {config.local.steps} steps"
    table = new_table(title, "silo", "rows", "rate", "noise", "epsilon", "delta", "budget")
    for each in planned:
        beyond = "" if each.ends or each.refusal else ", exceeded"
        rows, rate = str(each.settings.units), f"{each.settings.rate(config.local.batch_size):.4f}"
        noise = "none is enough" if each.settings.noise is None else f"{each.settings.noise:.3f}"
        spent = "too much" if each.epsilon is None else shown(each.epsilon)
        table.add_row(
            each.silo,
            *(("-", "-", "refused", "-") if each.refusal else (rows, rate, noise, spent)),
            f"{each.delta:g}",
            "none" if each.budget is None else f"{each.budget:g}{beyond}",
        )
    return table


def check_plan(config: StrategyConfig, cluster: ClusterConfig, planned: Sequence[PlannedSilo]) -> list[str]:
    """Return warnings about silos that the run will lose. Raises `ConfigError` if fewer silos are left than the run
    needs to begin, or to end.
    """
    silos: dict[str, list[str]] = {}
    for each in planned:
        if not each.begins:
            silos.setdefault(each.refusal, []).append(each.silo)
    refused = [
        f"the run is refused by {', '.join(names)} ({why})" if why else f"no noise is enough at {', '.join(names)}"
        for why, names in silos.items()
    ]
    spent = [each.silo for each in planned if each.begins and not each.ends]
    exceeded = [f"the run exceeds the budget of {', '.join(spent)}"] if spent else []
    at_start, left = cluster.at_start, sum(each.begins for each in planned)
    begin, end = config.quorum(at_start), max(config.min_silos or 1, least_silos(config.settled(at_start)))
    remedy = "Ask for fewer rounds or steps, smaller batches or more score_noise; raise budgets; or lower min_silos"
    if any(silos):  # these have told a reason of their own
        remedy = f"Correct what they name. {remedy}"
    if refused and left < begin:
        raise ConfigError("privacy", f"{'; '.join(refused)}, and the run needs {begin} silos to begin", remedy)
    if (refused or spent) and left - len(spent) < end:
        raise ConfigError("privacy", f"{'; '.join([*refused, *exceeded])}, and needs {end} silos to end", remedy)
    warnings = [f"{each}: the run goes on without" for each in refused]
    return [*warnings, *(f"{each}, and goes on without when it is spent" for each in exceeded)]


def _rounds(config: StrategyConfig) -> int:
    return config.stop.rounds or 1


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
