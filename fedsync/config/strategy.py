"""A strategy file: everything that a run does, but for the silos it runs on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, ValidationError, model_validator

from fedsync.common.names import SILO_NAME, near_miss
from fedsync.config.cipher import CipherConfig, MaskedConfig, PlainConfig, sealed_metrics
from fedsync.config.evaluation import EvaluationConfig
from fedsync.config.exporters import ExportConfig
from fedsync.config.locate import beside, locate
from fedsync.config.model import ModelConfig
from fedsync.config.section import Section
from fedsync.config.selecting import needs_single_silos
from fedsync.config.stop import StopConfig, unreachable
from fedsync.config.tasks import TaskConfig
from fedsync.config.tasks_kinds import StatisticsSection
from fedsync.config.training import LocalConfig, PositiveInt
from fedsync.config.user_config import UserConfig
from fedsync.config.waiting import WaitingConfig
from fedsync.config.wire import WireConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.core.apart import CrossSite
from fedsync.core.errors import ConfigError
from fedsync.core.orders import LocalWork
from fedsync.core.state import Policies
from fedsync.policies.aggregate.base import AggregationPolicy
from fedsync.policies.aggregate.fednova import FedNova
from fedsync.policies.aggregate.kinds import FedAvg
from fedsync.policies.balance.base import BalancerPolicy
from fedsync.policies.barrier.base import Inner
from fedsync.policies.barrier.wrappers.minimum import MinimumSilos
from fedsync.policies.barrier.wrappers.resting import Resting
from fedsync.policies.predict.base import PredictorPolicy
from fedsync.policies.predict.ema import Ema
from fedsync.policies.schema import Chosen, PartOfOne, Policy

if TYPE_CHECKING:
    from fedsync.core.weighting import Solver

MAX_SEED = 2**63 - 1
"""Of 63 bits, as those that follow from it: PyTorch, NumPy and every message take such a number."""


def _usual_aggregation(sections: dict[str, Any]) -> AggregationPolicy:
    """For the barrier, which stands before."""
    barrier = sections.get("barrier")
    return FedNova() if barrier is not None and barrier.innermost.unequal_steps else FedAvg()


@cache
def _plug_in(path: str) -> None:
    """Run a user's file, which registers policies."""
    from fedsync.tasks.custom import run_file

    run_file(Path(path), "plugin")


class StrategyConfig(Section):
    """One runnable strategy."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Names the run's folder and the rows of tables."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """Everything random in the run follows from it."""

    min_silos: PositiveInt | None = None
    """Silos that must have joined before the run begins; left out, all of the silo file, or of ``silos``, or 2."""

    plugin: str | None = None
    """A Python file of yours that registers policies with ``fedsync.register``, relative to this one. The server alone
    runs it."""

    silos: Annotated[list[Annotated[str, Field(pattern=SILO_NAME)]], Field(min_length=1)] | None = None
    """Names of the silos that may take part; left out, every one that the server lets in."""

    stop: StopConfig
    """When the run ends."""

    local: LocalConfig = Field(default_factory=LocalConfig)
    """What a silo does with an order, and on what."""

    predictor: Annotated[PredictorPolicy[Any], Chosen("predictor")] = Field(default_factory=Ema)
    """How fast each silo will be in its next order."""

    balancer: Annotated[BalancerPolicy, Chosen("balancer")]
    """How much work each silo gets."""

    barrier: Inner
    """When updates are committed, and who may go on."""

    aggregation: Annotated[AggregationPolicy, Chosen("aggregation")] = Field(default_factory=_usual_aggregation)
    """How a commit weighs its updates; left out, FedNova where silos do unequal numbers of steps, else FedAvg."""

    cipher: CipherConfig = Field(default_factory=lambda: PlainConfig(kind="plain"))
    """How updates are hidden from the server."""

    wire: WireConfig = Field(default_factory=WireConfig)
    """How many bits travel where nothing is encrypted."""

    task: TaskConfig
    """What is trained, and on which data."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """Which tensors of the model travel, and which stay at their silo; left out, the task decides."""

    train_config: UserConfig = Field(default_factory=dict)
    """What training code of one's own is told, as with Flower's strategies: numbers, text and switches."""

    evaluate_config: UserConfig = Field(default_factory=dict)
    """The same for its evaluation."""

    fraction_evaluate: PartOfOne = 1.0
    """Part of the silos that evaluates each version, drawn anew; at least two of them. With 0 nobody evaluates."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """What is worked out of evaluations."""

    waiting: WaitingConfig = Field(default_factory=WaitingConfig)
    """How long silos are waited for."""

    export: ExportConfig | None = None
    """Where else the run's figures go while it goes on."""

    @model_validator(mode="before")
    @classmethod
    def _knows_what_is_plugged_in(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("plugin"), str):
            _plug_in(data["plugin"])
        return data

    @model_validator(mode="after")
    def _names_silos(self) -> Self:
        names = self.silos or []
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"silos names {name!r} twice; name each silo once")
        if names and (self.min_silos or 0) > len(names):
            raise ValueError(f"min_silos {self.min_silos} of {len(names)} silos can never join; lower it, or name more")
        return self

    @model_validator(mode="after")
    def _can_be_reached(self) -> Self:
        if self.stop.target_accuracy is not None:
            problem, remedy = unreachable(self.stop.target_accuracy, self.task)
            if problem:
                raise ValueError(f"stop.target_accuracy {problem}; {remedy}")
        return self

    @model_validator(mode="after")
    def _is_evaluated(self) -> Self:
        if self.fraction_evaluate == 0 and self.stop.by_score:
            raise ValueError("fraction_evaluate 0 leaves stop's target and patience nothing to go by; write 1.0")
        if self.evaluation.cross_site is not None:
            self.evaluation.cross_site.check(self.cipher, self.fraction_evaluate)
        masked = isinstance(self.cipher, MaskedConfig)
        if self.fraction_evaluate < 1 and (masked or sealed_metrics(self.cipher) is not None):
            raise ValueError(
                f"fraction_evaluate {self.fraction_evaluate:g}: with sealed metrics or masks all silos of a round "
                "evaluate, or none of their evaluations opens; write 1.0"
            )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        balancer, barrier = self.balancer, self.barrier.innermost
        balancer.check(self.local.batch_size)
        if balancer.scales_steps and barrier.sets_steps:
            raise ValueError(f"balancer.scale 'steps' has no effect: barrier.kind {barrier.kind} sets the steps")
        if balancer.needs_lockstep and not barrier.lockstep:
            raise ValueError(
                f"balancer.kind {balancer.kind} compares the times of rounds, and barrier.kind {barrier.kind} has no "
                "rounds in which all silos do the same steps; write balancer: {kind: equalise}, or barrier: {kind: bsp}"
            )
        return self

    @model_validator(mode="after")
    def _trains_in_processes(self) -> Self:
        if self.local.processes > 1 and self.task.own_loop:
            raise ValueError(
                f"local.processes {self.local.processes}: task.kind {self.task.kind} has a training loop of its own, "
                "which runs in one process; leave it out"
            )
        return self

    @model_validator(mode="after")
    def _normalises(self) -> Self:
        swings = self.local.learning_rate * self.local.proximal >= 1 or self._solver.pull > 1
        if self.aggregation.normalises and swings:
            raise ValueError(
                f"local.proximal {self.local.proximal:g} times local.learning_rate {self.local.learning_rate:g} is not "
                "below 1: silos would swing around the model they start from"
            )
        return self

    @model_validator(mode="after")
    def _discounts(self) -> Self:
        if self.barrier.innermost.needs_discount and not self.aggregation.discounts:
            raise ValueError(
                "barrier.late 'stale' wants stale updates discounted, which aggregation does not do; "
                "give aggregation a staleness: {kind: polynomial}, or write late: next"
            )
        return self

    @model_validator(mode="after")
    def _statistics_add_up(self) -> Self:
        if isinstance(self.task, StatisticsSection):
            self.task.check(self.local)
        return self

    @model_validator(mode="after")
    def _travels_in_the_clear(self) -> Self:
        if not isinstance(self.cipher, PlainConfig) and self.wire.set:
            place = "cipher.inner.bits" if isinstance(self.cipher, MaskedConfig) else "cipher.bits"
            raise ValueError(
                f"wire is for runs in the clear, and cipher.kind {self.cipher.kind!r} has bits of its own; leave wire "
                f"out, and write {place}: 8, 12 or 16"
            )
        return self

    @model_validator(mode="after")
    def _can_be_added(self) -> Self:
        if not isinstance(self.cipher, PlainConfig) and self.aggregation.weigher(self._solver).weighting is None:
            remedy = "write staleness: {kind: constant}" if self.aggregation.additive else "choose fedbuff"
            raise ValueError(
                f"aggregation.kind {self.aggregation.kind!r} as configured needs a server that sees the updates, and "
                f"cipher.kind {self.cipher.kind!r} hides them: {remedy}"
            )
        if not isinstance(self.cipher, PlainConfig) and not self.aggregation.is_shipped():
            raise ValueError(
                f"aggregation.kind {self.aggregation.kind!r} is your own, and with cipher.kind {self.cipher.kind!r} "
                "silos, which do not have it, weigh updates themselves; choose one that is part of FedSync"
            )
        if isinstance(self.cipher, MaskedConfig) and self.barrier.mixes_rounds:
            raise ValueError(
                "cipher.kind 'masked' opens sums of one round only, and barrier as configured may commit an update "
                "alone or with later ones: choose bsp, a-bsp or elastic, or write late: drop"
            )
        if isinstance(self.cipher, MaskedConfig) and self.barrier.draws:
            raise ValueError(
                "cipher.kind 'masked' opens sums in which nearly all silos are, and barrier has a part of them in each "
                "round; leave the fraction out, or write cipher.kind: bfv"
            )
        if isinstance(self.cipher, MaskedConfig) and self.balancer.scales_rates:
            raise ValueError(
                "balancer.scale 'learning_rate' gives silos different learning rates, and masks (cipher.kind 'masked') "
                "come off only where all train at one; write balancer.scale: batch, or cipher.kind: bfv"
            )
        most, members = self.barrier.innermost.most_updates, getattr(self.cipher, "members", 1)
        if most is not None and members > most:
            raise ValueError(
                f"cipher.members {members}: barrier.kind {self.barrier.innermost.kind!r} as configured commits {most} "
                f"at a time, so silos would open no version; write members: {most}, or choose a barrier that commits "
                "many: bsp, a-bsp, fsp or elastic"
            )
        silos = len(self.silos or ()) or self.min_silos
        if silos is not None and members > (part := self.barrier.sampled(silos)) and self.barrier.draws:
            raise ValueError(
                f"cipher.members {members}: barrier has {part} of {silos} silos in each round, so silos would open no "
                f"version; raise share, or write barrier.least: {members}"
            )
        return self

    @model_validator(mode="after")
    def _goes_without_single_figures(self) -> Self:
        cipher, barrier = sealed_metrics(self.cipher), self.barrier.innermost
        if cipher is None:
            return self
        plain = "or write cipher.metrics: plain, if the silos' owners allow it"
        if barrier.needs_losses:
            raise ValueError(
                f"barrier.kind {barrier.kind!r} as configured goes by the loss of each round, and with sealed metrics "
                f"the server learns it too late; where it has an interval write interval: {{kind: fixed}}, {plain}"
            )
        passes = f"barrier.kind {barrier.kind!r}" if barrier.needs_examples else "stop.relative_change"
        if cipher.examples is None and (barrier.needs_examples or self.stop.relative_change is not None):
            raise ValueError(
                f"{passes} goes by passes of silos over their data, and with sealed metrics the server does not learn "
                f"how much that is; write cipher.examples: how many samples count as a pass for all silos, {plain}"
            )
        if problem := needs_single_silos(self.evaluation.best):
            raise ValueError(f"{problem}, {plain}")
        weighting = self.aggregation.weigher(self._solver).weighting
        if cipher.only and weighting is not None and weighting.by == "examples":
            raise ValueError(
                "aggregation.weight 'examples' needs the number of each silo's samples for what cipher.only leaves in "
                f"the clear, and with sealed metrics the server does not learn it; write weight: silo, {plain}"
            )
        return self

    @classmethod
    def load(cls, name: str | Path, overrides: Sequence[str] = ()) -> StrategyConfig:
        """Read a strategy file.

        Paths inside ``task`` are relative to the file, where something is there; otherwise they stay
        as they are, relative to where a silo runs.

        Args:
            name: path of a file, or name of a shipped strategy.
            overrides: ``a.b=value`` assignments.

        Raises:
            ConfigError: anything is wrong; names the place and the remedy.
        """
        path = locate(name)
        file = YamlFile.read(path)
        file.override(overrides)
        if isinstance(plugin := file.data.get("plugin"), str):
            file.data["plugin"] = str(beside(path, plugin, f"{name}, plugin"))
        config = file.validate(cls)

        def relocated(relative: str) -> str:
            candidate = beside(path, relative, f"{name}, task")
            return str(candidate) if candidate.exists() else relative

        return config.model_copy(update={"task": config.task.relocated(relocated)})

    def with_policies(self, policies: Mapping[str, Policy]) -> StrategyConfig:
        """The same with ready policies, which need not be registered, in the place of what their sections say.

        Args:
            policies: by section: ``predictor``, ``balancer``, ``barrier``, ``aggregation``.

        Raises:
            ConfigError: one does not belong in its section, or they do not fit the rest.
        """
        for section, policy in policies.items():
            if not isinstance(policy, Policy) or policy.section != section or section not in type(self).model_fields:
                problem = f"{type(policy).__name__} is no {section} policy"
                raise ConfigError(f"policies[{section!r}]", problem, f"Subclass fedsync.{section.title()}Policy")
        return self._with("policies", policies, "Choose policies that fit the strategy")

    def told(self, train: Mapping[str, Any], evaluate: Mapping[str, Any]) -> StrategyConfig:
        """The same with further entries of `train_config` and `evaluate_config`.

        Raises:
            ConfigError: they are no such entries.
        """
        told = self._with("train_config", {"train_config": {**self.train_config, **train}})
        return told._with("evaluate_config", {"evaluate_config": {**self.evaluate_config, **evaluate}})

    def _with(self, place: str, sections: Mapping[str, Any], remedy: str = "Change it") -> StrategyConfig:
        try:
            return self.model_validate({**{name: getattr(self, name) for name in self.model_fields_set}, **sections})
        except ValidationError as error:
            problem, _, better = error.errors()[0]["msg"].removeprefix("Value error, ").partition("; ")
            raise ConfigError(place, problem, better[:1].upper() + better[1:] or remedy) from None

    @property
    def report_s(self) -> float | None:
        """How often the server hears of orders in work [s]; None where no barrier wants to."""
        return self.barrier.innermost.needs_progress

    def check_silos(self, names: Iterable[str]) -> None:
        """Check that silos of these names may take part.

        Raises:
            ConfigError: one is not listed.
        """
        for name in names:
            if self.silos is not None and name not in self.silos:
                remedy = near_miss(name, self.silos) + "; or leave `silos` out"
                raise ConfigError("silos", f"the silo file has {name!r}, which is not listed", remedy)

    def check_target(self, target: float | None) -> None:
        """Check that a target of the command line is one that this task may reach.

        Raises:
            ConfigError: it is not.
        """
        if target is not None:
            problem, remedy = unreachable(target, self.task)
            if problem:
                raise ConfigError("--target-accuracy", problem, remedy.capitalize())

    def quorum(self, silos: int | None = None) -> int:
        """How many silos must have joined before the run begins.

        Args:
            silos: number of silos in the silo file that are there at the start, or None without one.
        """
        return self.min_silos or silos or self.shares

    @property
    def shares(self) -> int:
        """Into how many shares the data is split where no silo file says it."""
        return len(self.silos or ()) or self.min_silos or 2

    @property
    def _solver(self) -> Solver:
        return self.task.solver(self.local)

    def policies(self, silos: int | None = None) -> Policies:
        """Everything that decides.

        Args:
            silos: number of silos in the silo file, or None without one.
        """
        local, sealed, compared = self.local, sealed_metrics(self.cipher), self.evaluation.cross_site
        metrics = self.evaluation.built(self.task)
        return Policies(
            seed=self.seed,
            predictor=self.predictor.loaded(),
            sizing=self.balancer.sizing(LocalWork(local.steps, local.batch_size, local.learning_rate)),
            barrier=MinimumSilos(Resting(self.barrier), self.quorum(silos)),
            weigher=self.aggregation.weigher(self._solver),
            stop=self.stop.build(metrics),
            declared_speeds=self.balancer.declared,
            tally=0 if sealed is None else sealed.limit,
            evaluate=self.fraction_evaluate,
            metrics=metrics,
            selection=self.evaluation.best.build(metrics),
            cross_site=CrossSite() if compared is None else compared.build(share=isinstance(self.cipher, PlainConfig)),
        )
