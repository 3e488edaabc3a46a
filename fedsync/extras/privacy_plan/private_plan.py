"""Forecast of the privacy budget that each silo will spend in a run, by a rehearsal in virtual time.

| the run | the plan |
|---|---|
| has `bsp`, batch sizes independent of speed, silos that are always present, no time limit | exact on all machines |
| all of this, and either a stop rule depends on scores or the best version gets a final score | an upper bound |
| any other: its orders and batch sizes depend on speeds and absences | exact for the silo file in virtual time |

In the last case, real machines may spend more or less than planned, but never more than the silo's budget or the run's
target. A plan counts each order once; an order that is repeated after a crash counts again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import inf, sqrt
from typing import TYPE_CHECKING, cast

from rich.table import Table

from fedsync.common.errors import BudgetSpent, ConfigError
from fedsync.config.cipher import least_silos, sealing
from fedsync.config.cluster import ClusterConfig
from fedsync.config.private_runs import silo_noise
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import PrivacyConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import SiloFacts
from fedsync.extras.privacy_plan.private_rehearsal import RehearsedSilo, rehearse
from fedsync.model.layout import Layout
from fedsync.observe.tables import new_table
from fedsync.policies.balance.balancer_base import FixedBalancer
from fedsync.privacy.accounting import epsilon, shown
from fedsync.privacy.release import PrivateSettings, Release
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.owner.privacy_guard import check_budgets, privacy_guard
from fedsync.silo.owner.privacy_ledger import PrivacyTally, tally_of
from fedsync.silo.protocol import Identity
from fedsync.train.silo_trainer import SiloTrainer, TrainerFacts

if TYPE_CHECKING:
    from fedsync.cipher.encoding.silo_noise import SiloNoise
    from fedsync.tasks.task_protocol import SiloSlot, Task


class Basis(StrEnum):
    """Relation of a planned epsilon to what the run spends; see the module's table."""

    EXACT = "exact"
    BOUND = "an upper bound: the run may end earlier, or its last version may be the best"
    TIMED = "that of these machines in virtual time, and an estimate for others"


@dataclass(frozen=True, slots=True)
class PlannedSilo:
    """Privacy loss of a whole run at one silo.

    Args:
        settings: settings of the silo, without noise if it refuses the run.
        epsilon: None if the silo refuses the run, also for lack of budget.
        refusal: reason of a refusal, empty if the budget has no room, or no noise is enough.
        most: upper bound of epsilon on any machines; infinite if there is none.
        rates: sampling rates of its steps.
        ran_out: whether the budget has no room for one of the orders.
        releases: number of its updates, if the noise is on whole updates.
    """

    silo: str
    settings: PrivateSettings
    epsilon: float | None
    delta: float
    budget: float | None
    refusal: str = ""
    basis: Basis = Basis.EXACT
    most: float = inf
    rates: frozenset[float] = frozenset()
    ran_out: bool = False
    releases: int = 0

    @property
    def begins(self) -> bool:
        return self.epsilon is not None

    @property
    def ends(self) -> bool:
        return self.begins and not self.ran_out


class _Rows:
    """Trainer as far as a plan needs it: the silo's numbers of rows and persons; ``rows`` if ``task`` is None."""

    def __init__(self, task: Task | None, slot: SiloSlot, rows: int) -> None:
        self._task, self._slot, self._rows = task, slot, rows

    @cached_property
    def facts(self) -> TrainerFacts:
        data = None if self._task is None else self._task.data(self._slot)
        rows = self._rows if data is None else len(data.train)  # type: ignore[arg-type]  # torch declares no __len__
        validates = data is not None and bool(data.validation)
        return TrainerFacts(Layout((), ()), "", (), None, "cpu", rows, validates)

    def make_private(self, settings: PrivateSettings) -> int:
        if self._task is None or not settings.person_column:
            return self.facts.examples
        return len(set(self._task.persons(self._slot, settings.person_column).tolist()))


def planned_spending(config: StrategyConfig, cluster: ClusterConfig) -> list[PlannedSilo]:
    """Return each silo's spending in the whole run; empty without privacy, or if training code reads its own data."""
    privacy = config.privacy
    if privacy is None or (privacy.kind == "dp-sgd" and config.task.own_loop):
        return []
    from fedsync.tasks.task_protocol import SiloSlot

    whole, spec = privacy.kind == "silo-noise", RunSpec.of(config, cluster, len(cluster.silos))
    noise = planned_noise(config, cluster.at_start)[0] if whole else None
    task, text = None if whole else spec.task.build_by_row(), spec.dump()
    planned, rehearsed = list[PlannedSilo](), dict[str, RehearsedSilo]()
    for index, silo in enumerate(cluster.silos):
        rows = _Rows(task, SiloSlot(silo.name, index, len(cluster.silos), config.seed), silo.examples)
        tally = replace(tally_of(spec, privacy, index), file=None, releases=Counter())
        each = PlannedSilo(silo.name, PrivateSettings(privacy.clip, None, 1), None, tally.delta, tally.budget)
        try:
            rehearsed[silo.name] = _begun(spec, Identity(text, index, silo.name), rows, noise, tally)
        except BudgetSpent:
            each = replace(each, settings=replace(each.settings, units=rows.facts.examples))
        except ConfigError as error:
            each = replace(each, refusal=str(error))
        planned.append(each)
    rehearse(config, cluster, rehearsed)
    basis = _basis(config, cluster, rehearsed.values())
    return [_spent(each, rehearsed[each.silo], basis, privacy) if each.silo in rehearsed else each for each in planned]


def _begun(
    spec: RunSpec, identity: Identity, rows: _Rows, noise: SiloNoise | None, tally: PrivacyTally
) -> RehearsedSilo:
    guard = privacy_guard(
        spec, identity, check_budgets(spec, identity, OwnerPolicy()), cast(SiloTrainer, rows), noise, seeded=True
    )
    assert guard is not None
    guard.tally, machine = tally, spec.emulate[identity.index]
    facts = SiloFacts(guard.settings.units, machine.memory_samples, machine.speed, validates=rows.facts.validates)
    silo = RehearsedSilo(guard, facts)
    silo.estimate(spec.local.batch_size)
    return silo


def _basis(config: StrategyConfig, cluster: ClusterConfig, silos: Iterable[RehearsedSilo]) -> Basis:
    absent = ("joins_at_s", "leaves_at_s", "faults", "crashes", "presence")
    sizes = isinstance(config.balancer, FixedBalancer) or config.balancer.spends
    if not (config.barrier.lockstep and sizes) or config.stop.seconds is not None:
        return Basis.TIMED
    if any(getattr(silo, name) for silo in cluster.silos for name in absent):
        return Basis.TIMED
    scored = config.privacy is not None and config.privacy.score_noise is not None
    ends_by_best = scored and any(silo.facts.validates for silo in silos)
    return Basis.BOUND if config.stop.by_score or ends_by_best else Basis.EXACT


def _spent(before: PlannedSilo, silo: RehearsedSilo, basis: Basis, privacy: PrivacyConfig) -> PlannedSilo:
    assert silo.guard.tally is not None
    found = silo.guard.tally.told()["epsilon"]
    assert found is not None
    target = privacy.target_epsilon if privacy.kind == "dp-sgd" else None
    return replace(
        before,
        settings=silo.guard.settings,
        epsilon=found,
        basis=basis,
        most=min(before.budget or inf, target or inf) if basis is Basis.TIMED else found,
        rates=frozenset(silo.rates),
        ran_out=silo.ran_out,
        releases=silo.guard.tally.releases.total(),
    )


def _caption(planned: Sequence[PlannedSilo]) -> str:
    return "".join(f"Epsilon is {basis}." for basis in {each.basis for each in planned if each.begins})


def plan_table(config: StrategyConfig, cluster: ClusterConfig, planned: Sequence[PlannedSilo]) -> Table:
    if config.privacy is not None and config.privacy.kind == "silo-noise":
        return colluders_table(config, cluster.at_start, planned)
    stop = config.stop
    length = f"{stop.seconds:g} s" if stop.rounds is None else f"{stop.rounds} rounds"
    title = f"{config.name}: planned privacy loss of {length}, in orders of {config.local.steps} steps"
    table = new_table(title, "silo", "rows", "rate", "noise", "epsilon", "at most", "delta", "budget")
    table.caption = _caption(planned)
    for each in planned:
        beyond = "" if each.ends or each.refusal else ", exceeded"
        rates = sorted({f"{rate:.4f}" for rate in (min(each.rates), max(each.rates))}) if each.rates else ["-"]
        noise = "none is enough" if each.settings.noise is None else f"{each.settings.noise:.3f}"
        spent = "too much" if each.epsilon is None else shown(each.epsilon)
        most = "-" if each.most == inf else shown(each.most)
        figures = (str(each.settings.units), " to ".join(rates), noise, spent, most)
        table.add_row(
            each.silo,
            *(("-", "-", "refused", "-", "-") if each.refusal else figures),
            f"{each.delta:g}",
            "none" if each.budget is None else f"{each.budget:g}{beyond}",
        )
    return table


def check_plan(config: StrategyConfig, cluster: ClusterConfig, planned: Sequence[PlannedSilo]) -> list[str]:
    """Warnings about silos that the run will lose; `ConfigError` if too few are left for the run to begin or to end."""
    silos: dict[str, list[str]] = {}
    for each in planned:
        if not each.begins:
            silos.setdefault(each.refusal, []).append(each.silo)
    target = config.privacy is not None and config.privacy.kind == "dp-sgd" and config.privacy.target_epsilon
    spent_at = "no noise is enough" if target else "the budget has no room"
    refused = [
        f"the run is refused by {', '.join(names)} ({why})" if why else f"{spent_at} at {', '.join(names)}"
        for why, names in silos.items()
    ]
    spent = [each.silo for each in planned if each.begins and not each.ends]
    exceeded = [f"the run exceeds the budget of {', '.join(spent)}"] if spent else []
    at_start, left = cluster.at_start, sum(each.begins for each in planned)
    begin, end = config.quorum(at_start), max(config.min_silos or 1, least_silos(config.settled(at_start)))
    remedy = "Ask for fewer rounds or steps, smaller batches or more score_noise; raise budgets; or lower min_silos"
    if any(silos):  # these have told a reason of their own
        remedy = f"Remove these reasons. {remedy}"
    if refused and left < begin:
        raise ConfigError("privacy", f"{'; '.join(refused)}, and the run needs {begin} silos to begin", remedy)
    if (refused or spent) and left - len(spent) < end:
        raise ConfigError("privacy", f"{'; '.join([*refused, *exceeded])}, and {end} silos are needed to end", remedy)
    warnings = [f"{each}: the other silos continue" for each in refused]
    return [*warnings, *(f"{each}: the other silos continue when it is spent" for each in exceeded)]


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


def colluders_table(config: StrategyConfig, silos: int, planned: Sequence[PlannedSilo]) -> Table:
    noise, members = planned_noise(config, silos)
    assert config.privacy is not None
    updates, delta = max(each.releases for each in planned) or config.stop.rounds or 1, config.privacy.delta
    title = f"{config.name}: planned privacy loss of a silo in {updates} updates, in sums of {members} silos or more"
    table = new_table(title, "silos that collude", "noise", "epsilon", "delta")
    table.caption = _caption(planned)
    for colluding in range(members):
        left = noise.multiplier * sqrt((members - colluding) / noise.shares)
        told = f"{colluding} (cipher.colluding)" if colluding == members - noise.shares else str(colluding)
        spent = epsilon({Release(1.0, left): updates}, delta, "rdp")
        table.add_row(told, f"{left:.3f}", shown(spent), f"{delta:g}")
    return table
