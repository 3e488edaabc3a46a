"""Specification of a run, as silos receive it. Every request contains it, so any process of a silo can answer."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, ClassVar

from pydantic import Field, ValidationError

from fedsync.common.errors import ConfigError, ProtocolError
from fedsync.config.cipher import CipherConfig, MaskedConfig, PlainConfig, sealing, with_members
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.private_runs import silo_noise
from fedsync.config.sections.evaluation import EvaluationConfig, StopConfig
from fedsync.config.sections.privacy import PrivacyConfig
from fedsync.config.sections.section import Section, SparingSection
from fedsync.config.sections.strategy_sections import ModelConfig, WireConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.training import LocalConfig, UserConfig
from fedsync.core.report_checks import MAX_EXAMPLES
from fedsync.model.layout import Layout
from fedsync.policies.aggregate.aggregate_kinds import FedAvg
from fedsync.policies.aggregate.weighers import AggregationPolicy
from fedsync.policies.optimize.optimizer_policies import ServerOptimizerPolicy
from fedsync.policies.rounds.settings_by_round import RoundPolicy, told_of
from fedsync.policies.schema import Chosen
from fedsync.tasks.task_section import AnyTask
from fedsync.train.silo_trainer import Throttle

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan


class SealedSurvey(Section):
    """Result of the survey before the run, encrypted for the silos: the specification of its own run, as JSON; whether
    each column is numeric; and the catch-up with the encrypted sums, from the beginning, base64.
    """

    spec: str
    columns: dict[str, bool]
    sums: str


class RunSpec(SparingSection):
    """Specification of one run, as silos see it; for the sections of a strategy file, see `StrategySections`.

    Args:
        silos: number of shares that the data is split into.
        emulate: emulated machines, by partition; empty in a real federation.
        aggregation: weights of updates in a commit; silos apply their part before they encrypt.
        server_optimizer: optimiser step on decrypted sums, or control variates of local steps; None without both.
        quorum: number of updates after which silos agree on how to round the next updates.
        run: identity of the run, which outlives the server; silos store their state under it.
        began: identity under which the run began, if it differs from ``run``; silos encrypt for that identity.
        survey: encrypted result of a survey before the run.
        versions: limit of versions that silos train, where rollbacks make versions beside the rounds; else None.
        admitted: names of the silos that may take part; empty for all registered silos.
    """

    features: ClassVar[tuple[str, ...]] = ("privacy", "versions")

    seed: int
    silos: Annotated[int, Field(ge=1)]
    task: AnyTask
    local: LocalConfig
    model: ModelConfig = Field(default_factory=ModelConfig)
    emulate: list[SiloConfig] = Field(default_factory=list)
    cipher: CipherConfig = Field(default_factory=lambda: PlainConfig(kind="plain"))
    wire: WireConfig = Field(default_factory=WireConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    aggregation: Annotated[AggregationPolicy, Chosen("aggregation")] = Field(default_factory=FedAvg)
    server_optimizer: Annotated[ServerOptimizerPolicy, Chosen("server_optimizer")] | None = None
    train_config: UserConfig = Field(default_factory=dict)
    evaluate_config: UserConfig = Field(default_factory=dict)
    quorum: Annotated[int, Field(ge=1)] = 1
    run: str = ""
    began: str = ""
    survey: SealedSurvey | None = None
    on_round: Annotated[RoundPolicy, Chosen("on_round")] | None = None
    stop: StopConfig | None = None
    versions: Annotated[int, Field(ge=1)] | None = None
    admitted: list[str] = Field(default_factory=list)
    privacy: PrivacyConfig | None = None

    @classmethod
    def of(cls, config: StrategyConfig, cluster: ClusterConfig | None, silos: int) -> RunSpec:
        at_start = None if cluster is None else cluster.at_start
        quorum = _quorum(config, config.quorum(at_start))
        config.check_machines({} if cluster is None else {silo.name: silo.speed for silo in cluster.silos})
        emulate, plain = cluster.silos if cluster is not None else [], isinstance(config.cipher, PlainConfig)
        task = config.task.emulated({silo.name: silo.data for silo in emulate})
        alike = ("seed", "local", "model", "wire", "evaluation", "train_config", "evaluate_config", "stop", "privacy")
        return cls(
            **{name: getattr(config, name) for name in alike},
            silos=silos,
            task=task,
            emulate=list(emulate),
            cipher=with_members(config.settled(at_start), quorum),
            # Silos weigh only updates that they encrypt. Silos do not have a user's own aggregation, so its updates
            # are never encrypted.
            aggregation=config.aggregation if config.aggregation.is_shipped() else FedAvg(),
            server_optimizer=None if plain and not config.controlled else config.server_optimizer,
            admitted=list(config.silos or ()),
            quorum=quorum,
            # Between two rollbacks there is a round.
            versions=2 * config.stop.rounds if config.stop.rounds and config.barrier.innermost.rolls_back else None,
            on_round=told_of(config.on_round),
        )

    def encryption_plan(self, layout: Layout) -> EncryptionPlan | None:
        """Encryption of updates with this layout; None in the clear. Raises `ConfigError` if `EncryptionPlan` does."""
        sealed = sealing(self.cipher)
        if sealed is None:
            return None
        from fedsync.cipher.plan import EncryptionPlan

        weighting = self.aggregation.weigher(self.local.solver(self.task)).weighting
        if weighting is None:
            problem = f"{self.aggregation.kind!r} as configured needs a server that sees the updates"
            raise ConfigError("aggregation.kind", problem, "Choose fedavg, fednova or fedbuff with constant staleness")
        judged, members = sealed.metrics == "sealed", sealed.members or 1
        metrics = self.evaluation.built(self.task) if judged else ()
        return EncryptionPlan(
            *(self.cipher.kind, sealed.bits, layout, weighting, self.quorum, tuple(sealed.only), judged),
            *(members, sealed.colluding, sealed.examples or MAX_EXAMPLES, metrics),
            selection=self.evaluation.best.build(metrics) if judged else None,
            optimizer=None if self.server_optimizer is None else self.server_optimizer.build().fitted(layout),
            work_ratio=self.cipher.work_ratio if isinstance(self.cipher, MaskedConfig) else 1.0,
            noise=silo_noise(self.privacy, None if self.stop is None else self.stop.rounds, members, sealed.colluding),
        )

    @property
    def controls(self) -> bool:
        return self.server_optimizer is not None and self.server_optimizer.controls

    @property
    def fastest(self) -> float:
        return max(silo.speed for silo in self.emulate)

    @property
    def origin(self) -> str:
        return self.began or self.run

    def throttle(self, index: int) -> Throttle | None:
        if not self.emulate:
            return None
        machine = self.emulate[index]
        return Throttle(machine.build_curve(), self.fastest / machine.speed)

    def dump(self) -> str:
        plain = type(self).model_validate_json(self.model_dump_json())
        return json.dumps(plain.model_dump(mode="json"), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RunSpec:
        """Parse the output of `dump`; raises `ProtocolError` for other text, because the text identifies a run."""
        try:
            spec = cls.model_validate_json(text)
        except ValidationError as error:
            raise ProtocolError("server", "run specification", str(error.errors(include_url=False)[0])) from error
        if spec.dump() != text:
            raise ProtocolError("server", "run specification", "it is not in its canonical form")
        return spec


def _quorum(config: StrategyConfig, silos: int) -> int:
    """Updates of a round; limited to the capacity of an encrypted sum, if no commit has more updates than that."""
    asked, most, sealed = config.barrier.sampled(silos), config.barrier.innermost.most_updates, sealing(config.cipher)
    if sealed is None or most is None or most > sealed.limit:
        return asked
    return min(asked, sealed.limit)
