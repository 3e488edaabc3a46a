"""What a silo has to know of a run, beside its orders. Travels with every message, so that any process can serve it."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field, ValidationError

from fedsync.common.errors import ProtocolError
from fedsync.config.cipher import CipherConfig, PlainConfig, encryption_plan, sealed_metrics, sealing, with_members
from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.compatibility import queues
from fedsync.config.sections.evaluation import EvaluationConfig
from fedsync.config.sections.model import ModelConfig
from fedsync.config.sections.section import Section
from fedsync.config.sections.stop import StopConfig
from fedsync.config.sections.wire import WireConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks.task_kinds import TaskConfig
from fedsync.config.tasks.user_config import UserConfig
from fedsync.config.training import LocalConfig
from fedsync.model.layout import Layout
from fedsync.policies.aggregate.aggregate_base import AggregationPolicy
from fedsync.policies.aggregate.aggregate_kinds import FedAvg
from fedsync.policies.optimize.optimizer_base import ServerOptimizerPolicy
from fedsync.policies.rounds.rounds_base import RoundPolicy, told_of
from fedsync.policies.schema import Chosen
from fedsync.train.machine.throttle import Throttle

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.evaluation.best_version import Selection
    from fedsync.evaluation.metrics.metric_types import AnyMetric


class SealedSurvey(Section):
    """What silos found out together before the run, as only they can open it.

    Args:
        spec: of the run in which they did, as JSON.
        columns: by name, whether they are numeric.
        sums: a catch-up with it, from the beginning, base64.
    """

    spec: str
    columns: dict[str, bool]
    sums: str


class RunSpec(Section):
    """One run, as silos see it.

    Args:
        seed: of the run.
        silos: number of shares that the data is split into.
        task: what is trained.
        local: how.
        model: which of its tensors travel.
        emulate: the machines that silos pretend to be, by partition; empty in a real federation.
        cipher: how updates are sealed.
        wire: how what is not sealed travels.
        evaluation: what silos measure of a model.
        aggregation: how a commit weighs them, of which silos do their part before they seal.
        server_optimizer: what silos make of sums that they open, or correct their steps by; None where they do neither.
        train_config: what a silo's own training code is told; whoever starts the run says it.
        evaluate_config: the same for its evaluation.
        quorum: updates after which silos agree on how to round the next ones.
        run: the run's identity, which outlives the server: what silos keep, they keep for it.
        began: the identity under which the run began, where it has another now; silos seal for that one.
        survey: what silos found out before, where it is sealed.
        queues: a silo may be given an order while it has one in work.
        on_round: what orders say to training code beside ``train_config``; where it is the user's own, anything.
        stop: when the server says that the run ends.
        admitted: the silos that it says may take part; empty for all that are registered.
    """

    seed: int
    silos: Annotated[int, Field(ge=1)]
    task: TaskConfig
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
    queues: bool = False
    on_round: Annotated[RoundPolicy, Chosen("on_round")] | None = None
    stop: StopConfig | None = None
    admitted: list[str] = Field(default_factory=list)

    @classmethod
    def of(cls, config: StrategyConfig, cluster: ClusterConfig | None, silos: int) -> RunSpec:
        """Spec of a strategy, on emulated machines if there is a cluster."""
        at_start = None if cluster is None else cluster.at_start
        quorum = _quorum(config, config.quorum(at_start))
        config.check_machines({} if cluster is None else {silo.name: silo.speed for silo in cluster.silos})
        emulate, plain = cluster.silos if cluster is not None else [], isinstance(config.cipher, PlainConfig)
        task = config.task.emulated({silo.name: silo.data for silo in emulate})
        return cls(
            seed=config.seed,
            silos=silos,
            task=task,
            local=config.local,
            model=config.model,
            emulate=list(emulate),
            cipher=with_members(config.settled(at_start), quorum),
            wire=config.wire,
            evaluation=config.evaluation,
            # Silos weigh only what they seal; a user's own aggregation, which they do not have, is never sealed.
            aggregation=config.aggregation if config.aggregation.is_shipped() else FedAvg(),
            server_optimizer=None if plain and not config.controlled else config.server_optimizer,
            train_config=config.train_config,
            evaluate_config=config.evaluate_config,
            stop=config.stop,
            admitted=list(config.silos or ()),
            quorum=quorum,
            queues=queues(config),
            on_round=told_of(config.on_round),
        )

    def encryption_plan(self, layout: Layout) -> EncryptionPlan | None:
        """How updates of a model with this layout are sealed; None in the clear.

        Raises:
            ConfigError: the options do not fit the model or the number of silos.
        """
        solver = self.task.solver(self.local)
        judged: tuple[tuple[AnyMetric, ...], Selection] | tuple[()] = ()
        if sealed_metrics(self.cipher) is not None:
            metrics = self.evaluation.built(self.task)
            judged = metrics, self.evaluation.best.build(metrics)
        plan = encryption_plan(self.cipher, self.aggregation, solver, layout, self.quorum, *judged)
        if plan is None:
            return None
        optimizer = None if self.server_optimizer is None else self.server_optimizer.build().fitted(layout)
        return replace(plan, optimizer=optimizer)

    @property
    def controls(self) -> bool:
        """Whether silos correct their steps by control variates."""
        return self.server_optimizer is not None and self.server_optimizer.controls

    @property
    def fastest(self) -> float:
        """Speed of the fastest emulated machine [samples/s]."""
        return max(silo.speed for silo in self.emulate)

    @property
    def origin(self) -> str:
        """The identity under which the run began."""
        return self.began or self.run

    def throttle(self, index: int) -> Throttle | None:
        """The brake to the pace of the machine that a silo emulates, by its place; None where none is emulated."""
        if not self.emulate:
            return None
        machine = self.emulate[index]
        return Throttle(machine.build_curve(), self.fastest / machine.speed)

    def dump(self) -> str:
        """The one text of this run, which `parse` takes."""
        plain = type(self).model_validate_json(self.model_dump_json())
        return json.dumps(plain.model_dump(mode="json"), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RunSpec:
        """The inverse of `dump`, and of nothing else: one run has one text, by which silos know it.

        Raises:
            ProtocolError: the server sent something else.
        """
        try:
            spec = cls.model_validate_json(text)
        except ValidationError as error:
            raise ProtocolError("server", "run specification", str(error.errors(include_url=False)[0])) from error
        if spec.dump() != text:
            raise ProtocolError("server", "run specification", "it is not in its canonical form")
        return spec


def _quorum(config: StrategyConfig, silos: int) -> int:
    """Updates of a round; of more silos than one sum holds, what it holds, if no commit has more."""
    asked, most, sealed = config.barrier.sampled(silos), config.barrier.innermost.most_updates, sealing(config.cipher)
    if sealed is None or most is None or most > sealed.limit:
        return asked
    return min(asked, sealed.limit)
