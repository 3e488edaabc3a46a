"""The sections of a strategy file, each by itself."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator

from fedsync.common.names import SILO_NAME
from fedsync.config.cipher import CipherConfig, PlainConfig
from fedsync.config.sections.evaluation import EvaluationConfig
from fedsync.config.sections.exporter_section import ExportConfig
from fedsync.config.sections.model import ModelConfig
from fedsync.config.sections.section import Section
from fedsync.config.sections.stop import StopConfig
from fedsync.config.sections.waiting import WaitingConfig
from fedsync.config.sections.wire import WireConfig
from fedsync.config.tasks.task_kinds import TaskConfig
from fedsync.config.tasks.user_config import UserConfig
from fedsync.config.training import LocalConfig, PositiveInt
from fedsync.policies.aggregate.aggregate_base import AggregationPolicy
from fedsync.policies.aggregate.aggregate_kinds import FedAvg
from fedsync.policies.aggregate.fednova import FedNova
from fedsync.policies.balance.balancer_base import BalancerPolicy
from fedsync.policies.barrier.barrier_base import Inner
from fedsync.policies.features.feature_base import FeaturePolicy
from fedsync.policies.optimize.optimizer_base import ServerOptimizerPolicy
from fedsync.policies.predict.ema import Ema
from fedsync.policies.predict.predictor_base import PredictorPolicy
from fedsync.policies.rounds.rounds_base import RoundPolicy
from fedsync.policies.schema import Chosen, PartOfOne

if TYPE_CHECKING:
    from fedsync.core.weighting import Solver

MAX_SEED = 2**63 - 1
"""Of 63 bits, as those that follow from it: PyTorch, NumPy and every message take such a number."""


def _usual_aggregation(sections: dict[str, Any]) -> AggregationPolicy:
    """For the barrier, which stands before."""
    barrier = sections.get("barrier")
    return FedNova() if barrier is not None and barrier.innermost.unequal_steps else FedAvg()


@cache
def _plug_in(name: str) -> None:
    """Run a user's code, which registers policies."""
    from fedsync.common.sandbox.named_code import run_plugin

    run_plugin(name)


class StrategySections(Section):
    """What a strategy file says; `fedsync.config.strategy` makes a run of it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Names the run's folder and the rows of tables."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """Everything random in the run follows from it."""

    min_silos: PositiveInt | None = None
    """Silos that must have joined before the run begins; left out, all of the silo file, or of ``silos``, or 2. If you
    give a number, a run that ends with fewer silos has failed: see ``on_lost_silo``."""

    on_lost_silo: Literal["warn", "fail"] = "warn"
    """The effect on the run of a silo that is gone, or whose last three orders failed, or of which no update is in the
    model. With ``warn`` the run goes on and says so at once and in its result, and fails where it ends with fewer silos
    than ``min_silos``. With ``fail`` it fails at once."""

    most_examples: PositiveInt | None = None
    """Training samples that a silo may say it holds; one that says more does not take part. Left out, a billion: where
    updates are weighed by examples, a silo with a hundred times as many as all others decides alone."""

    plugin: str | None = None
    """Code of yours that registers policies with ``fedsync.register``: a Python file, relative to this one, or the name
    of an installed module, as in ``my_package.policies``. The server alone runs it."""

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

    server_optimizer: Annotated[ServerOptimizerPolicy, Chosen("server_optimizer")] | None = None
    """What a commit's sum of weighted updates is made into before the model moves; left out, it moves by the sum."""

    cipher: CipherConfig = Field(default_factory=lambda: PlainConfig(kind="plain"))
    """How updates are hidden from the server."""

    wire: WireConfig = Field(default_factory=WireConfig)
    """How many bits travel where nothing is encrypted."""

    task: TaskConfig
    """What is trained, and on which data."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """Which tensors of the model travel, and which stay at their silo; left out, the task decides."""

    initial_model: str | None = None
    """A state dict that the run begins with, such as ``model.pt`` of an earlier run: a path relative to this file or to
    where the run is started. The server alone reads it. Left out, the run begins with the task's own model."""

    train_config: UserConfig = Field(default_factory=dict)
    """What training code of one's own is told, as with Flower's strategies: numbers, text and switches."""

    evaluate_config: UserConfig = Field(default_factory=dict)
    """The same for its evaluation."""

    fraction_evaluate: PartOfOne = 1.0
    """Part of the silos that evaluates each version, drawn anew; at least two of them. With 0 nobody evaluates; under
    encryption that is refused: silos get the last version with its evaluation."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """What is worked out of evaluations."""

    waiting: WaitingConfig = Field(default_factory=WaitingConfig)
    """How long silos are waited for."""

    export: ExportConfig | None = None
    """Where else the run's figures go while it goes on."""

    on_round: Annotated[RoundPolicy, Chosen("on_round")] | None = None
    """Settings that change from round to round: the learning rate, and entries for training code of one's own. An order
    has the round of its base version + 1, also where a strategy has no rounds."""

    extensions: Annotated[tuple[FeaturePolicy, ...], Chosen("extension", several=True)] | None = None
    """Optional features of your own, which ``plugin`` registers: rules that end a run, messages to elsewhere."""

    @model_serializer(mode="wrap")
    def _without_features(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """As any section, but a run without optional features does not mention them."""
        plain: dict[str, Any] = handler(self)
        for name in ("extensions", "on_round", "initial_model"):
            if getattr(self, name) is None:
                plain.pop(name, None)
        return plain

    @model_validator(mode="before")
    @classmethod
    def _knows_what_is_plugged_in(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("plugin"), str):
            _plug_in(data["plugin"])
        return data

    @property
    def controlled(self) -> bool:
        """Whether silos correct their steps by control variates."""
        return self.server_optimizer is not None and self.server_optimizer.controls

    @property
    def solver(self) -> Solver:
        """What becomes of a constant gradient over a silo's local steps."""
        return self.task.solver(self.local)
