"""Sections of a strategy file, as checked objects."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from fedsync.common.names import SILO_NAME
from fedsync.config.cipher import CipherConfig, PlainConfig
from fedsync.config.sections.evaluation import EvaluationConfig, StopConfig
from fedsync.config.sections.privacy import PrivacyConfig
from fedsync.config.sections.section import Section, SparingSection
from fedsync.config.training import LocalConfig, UserConfig
from fedsync.model.plain_wire import FP32, Bf16, Fp16, Int8, TopK, Wire, WireFormat
from fedsync.model.tensor_parts import PartPatterns
from fedsync.policies.aggregate.aggregate_kinds import FedAvg, FedNova
from fedsync.policies.aggregate.weighers import AggregationPolicy
from fedsync.policies.balance.balancer_base import BalancerPolicy
from fedsync.policies.barrier.barrier_base import Inner
from fedsync.policies.extensions.feature_base import FeaturePolicy
from fedsync.policies.optimize.optimizer_policies import ServerOptimizerPolicy
from fedsync.policies.predict.predictor_base import Ema, PredictorPolicy
from fedsync.policies.rounds.settings_by_round import RoundPolicy
from fedsync.policies.schema import Chosen, PartOfOne, Positive, PositiveInt
from fedsync.tasks.task_section import AnyTask

if TYPE_CHECKING:
    from fedsync.core.silo_weight import Solver

_MOST_PATTERNS = 1000

Pattern = Annotated[str, Field(min_length=1, max_length=256)]


class ModelConfig(Section):
    """Tensors of the model that travel, and tensors that stay at their silo.

    Names are the names in the model's state dict; in patterns, ``*`` and ``?`` match other characters. A tensor that
    is neither shared nor private is frozen: it keeps its built or loaded value, which must be the same at every silo.
    """

    share: Annotated[list[Pattern], Field(min_length=1, max_length=_MOST_PATTERNS)] | None = None
    """Tensors that travel, as in ``["adapters.*"]``; left out, all tensors with a gradient, and all buffers."""

    private: Annotated[list[Pattern], Field(max_length=_MOST_PATTERNS)] = Field(default_factory=list)
    """Tensors that each silo trains and keeps, as in ``["*norm*", "head.*"]``."""

    def build(self) -> PartPatterns:
        return PartPatterns(None if self.share is None else tuple(self.share), tuple(self.private))


Format = Literal["fp32", "bf16", "fp16", "int8"]

_FORMATS: dict[str, WireFormat] = {"fp32": FP32, "bf16": Bf16(), "fp16": Fp16(), "int8": Int8()}


class WireConfig(Section):
    """Number formats of models and updates in runs without encryption; encryption sets its own bits."""

    up: Format = "fp32"
    """Format of updates to the server. ``fp32`` takes 4 bytes per value; ``bf16`` and ``fp16`` take 2, ``fp16`` with
    higher precision; ``int8`` takes 1, and its rounding error is added to the silo's next update."""

    down: Format = "fp32"
    """Format of models to the silos. With fewer than 32 bits, a silo keeps the model and receives only the changes of
    each later version. A silo without a recent model receives the whole model as ``fp32``."""

    top_k: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Share of an update that is sent: the values of largest magnitude, each with 4 more bytes for its position. The
    other values are added to the silo's next update."""

    @property
    def formats(self) -> Wire:
        up = _FORMATS[self.up]
        return Wire(up if self.top_k is None else TopK(self.top_k, up), _FORMATS[self.down])

    @property
    def set(self) -> bool:
        return self != WireConfig()


class WaitingConfig(Section):
    """Timeouts of silos in real time. Virtual time has no timeouts."""

    silence_s: Positive = 3600.0
    """Time without progress after which an order has failed [s]. Every finished step is progress."""

    order_s: Positive | None = None
    """Time after which an order has failed, even if it makes progress [s]; left out, there is no limit."""

    idle_s: Positive | None = None
    """Time after which a run has failed if no silo had any work [s]. Left out, 180, and 600 in Flower's simulation;
    ``fedsync server run`` waits without limit. A run that all silos refuse fails at once."""


class PrometheusConfig(Section):
    """Endpoint ``/metrics`` for Prometheus in the server's process, available during the run."""

    port: Annotated[int, Field(ge=0, le=65535)] = 9464
    """Port of ``/metrics``; 0 takes a free port, which is written to ``metrics.url`` in the run's folder."""

    host: Annotated[str, Field(min_length=1)] = "127.0.0.1"
    """Address to listen on. Everyone who can reach the address can read the metrics: there is neither encryption nor a
    password."""


class ExportConfig(Section):
    """Further targets of a run's metrics."""

    csv: bool = False
    """Whether to write rounds.csv, rounds-silos.csv and rounds-metrics.csv into the run's folder."""

    tensorboard: Annotated[str, Field(min_length=1)] | None = None
    """Folder for TensorBoard, relative to the run's folder."""

    mlflow: Annotated[str, Field(min_length=1)] | None = None
    """Tracking URI of MLflow, without a user name or password."""

    prometheus: PrometheusConfig | None = None
    """Prometheus endpoint; left out, there is none."""

    @model_validator(mode="after")
    def _no_secret(self) -> Self:
        """Refuse credentials: the run's folder repeats its configuration, and such folders are shared."""
        if self.mlflow is not None and "@" in urlsplit(self.mlflow).netloc:
            raise ValueError(
                "export.mlflow has a user name or a password in it; leave them out, and set "
                "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD where the server runs"
            )
        return self


MAX_SEED = 2**63 - 1
"""Largest seed: PyTorch, NumPy and messages take numbers of 63 bits."""


def _usual_aggregation(sections: dict[str, Any]) -> AggregationPolicy:
    barrier, balancer = sections.get("barrier"), sections.get("balancer")
    unequal = barrier and balancer and (balancer.scales_steps or barrier.innermost.unequal_steps)
    return FedNova() if unequal else FedAvg()


@cache
def _plug_in(name: str) -> None:
    from fedsync.common.sandbox.named_code import run_plugin

    run_plugin(name)


class StrategySections(SparingSection):
    """Sections of a strategy file, without the checks across sections in `fedsync.config.strategy`."""

    features: ClassVar[tuple[str, ...]] = ("extensions", "on_round", "initial_model", "privacy")

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    """Name of the strategy: part of the name of the run's folder, and label in tables."""

    seed: Annotated[int, Field(ge=0, le=MAX_SEED)] = 0
    """Seed of all random numbers of the run."""

    min_silos: PositiveInt | None = None
    """Number of silos that must be present together before the run begins. Left out, all silos of the silo file, or of
    ``silos``, or 2. If given, a run that ends with fewer silos has failed; see ``on_lost_silo``."""

    on_lost_silo: Literal["warn", "fail"] = "warn"
    """Reaction to a lost silo: it is gone, its last three orders failed, or the model contains no update of it.
    ``warn``: the run continues, warns at once and in its result, and fails if it ends with fewer silos than
    ``min_silos``. ``fail``: the run fails at once."""

    most_examples: PositiveInt | None = None
    """Largest number of training samples that a silo may report; a silo that reports more is excluded. Left out, a
    billion. Where updates are weighed by examples, a silo that reports a hundred times as many as all others dominates
    the model."""

    plugin: str | None = None
    """Your own code that registers policies with ``fedsync.register``: a Python file, relative to this file, or the
    name of an installed module, as in ``my_package.policies``. Only the server runs this code."""

    silos: Annotated[list[Annotated[str, Field(pattern=SILO_NAME)]], Field(min_length=1)] | None = None
    """Names of the silos that may take part; left out, all silos that the server admits."""

    stop: StopConfig
    """Rules that end the run."""

    local: LocalConfig = Field(default_factory=LocalConfig)
    """Local training of a silo."""

    predictor: Annotated[PredictorPolicy[Any], Chosen("predictor")] = Field(default_factory=Ema)
    """Prediction of each silo's speed in its next order."""

    balancer: Annotated[BalancerPolicy, Chosen("balancer")]
    """Distribution of work among silos."""

    barrier: Inner
    """Rule that decides when updates are committed, and which silos may continue."""

    aggregation: Annotated[AggregationPolicy, Chosen("aggregation")] = Field(default_factory=_usual_aggregation)
    """Weights of updates in a commit; left out, FedNova where silos do unequal numbers of steps, else FedAvg."""

    server_optimizer: Annotated[ServerOptimizerPolicy, Chosen("server_optimizer")] | None = None
    """Optimiser that turns the weighted sum of a commit's updates into a step of the model. Left out, the model moves
    by the sum."""

    cipher: CipherConfig = Field(default_factory=lambda: PlainConfig(kind="plain"))
    """Encryption that hides updates from the server."""

    wire: WireConfig = Field(default_factory=WireConfig)
    """Number formats of unencrypted messages."""

    task: AnyTask
    """Model and data."""

    model: ModelConfig = Field(default_factory=ModelConfig)
    """Tensors of the model that travel, and tensors that stay at their silo; left out, the task decides."""

    initial_model: str | None = None
    """State dict that the run begins with, such as ``model.pt`` of an earlier run. The path is relative to this file or
    to the working folder, and only the server reads it. Left out, the run begins with the task's own model."""

    train_config: UserConfig = Field(default_factory=dict)
    """Settings for your own training code, as in Flower's strategies: numbers, text, true or false."""

    evaluate_config: UserConfig = Field(default_factory=dict)
    """Settings for your own evaluation code, like ``train_config``."""

    fraction_evaluate: PartOfOne = 1.0
    """Share of the silos that evaluates each version, drawn anew each time; at least two silos. With 0, no silo
    evaluates. Encrypted runs refuse 0, because silos receive the last version with its evaluation."""

    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """Metrics of evaluations, choice of the best version, and comparison with models trained alone."""

    waiting: WaitingConfig = Field(default_factory=WaitingConfig)
    """Timeouts of silos."""

    export: ExportConfig | None = None
    """Further targets of the run's metrics."""

    on_round: Annotated[RoundPolicy, Chosen("on_round")] | None = None
    """Settings that change from round to round: the learning rate, and entries for your own training code. The round of
    an order is its base version + 1, also where a strategy has no rounds."""

    privacy: PrivacyConfig | None = None
    """Differential privacy of the examples or persons behind the updates; left out, updates have no noise."""

    extensions: Annotated[tuple[FeaturePolicy, ...], Chosen("extension", several=True)] | None = None
    """Optional features of your own, which ``plugin`` registers, such as stop rules or notifications."""

    @model_validator(mode="before")
    @classmethod
    def _knows_what_is_plugged_in(cls, data: Any) -> Any:
        if isinstance(data, Mapping) and isinstance(data.get("plugin"), str):
            _plug_in(data["plugin"])
        return data

    @property
    def controlled(self) -> bool:
        return self.server_optimizer is not None and self.server_optimizer.controls

    @property
    def solver(self) -> Solver:
        return self.local.solver(self.task)
