"""The kinds of predictors that exist, and what each can be told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field

from fedsync.config.section import Section
from fedsync.config.training import PositiveInt
from fedsync.core.errors import ConfigError
from fedsync.core.protocols import AnyPredictor
from fedsync.policies.predict.arima import Arima
from fedsync.policies.predict.ema import Ema
from fedsync.policies.predict.kalman import Kalman
from fedsync.policies.predict.lstm import LstmPredictor
from fedsync.policies.predict.mixture import Mixture
from fedsync.policies.predict.narx import Narx, load
from fedsync.policies.predict.rnn import RnnPredictor

Share = Annotated[float, Field(gt=0, le=1)]
Positive = Annotated[float, Field(gt=0)]
Order = Annotated[int, Field(ge=0, le=5)]
Hidden = Annotated[int, Field(ge=1, le=64)]
Memory = Annotated[int, Field(ge=50, le=10_000)]


class MemorylessConfig(Section):
    """Tomorrow is as today."""

    kind: Literal["memoryless"]

    def build(self) -> Ema:
        """The policy."""
        return Ema(alpha=1.0)


class EmaConfig(Section):
    """Exponential moving average of the speed."""

    kind: Literal["ema"]
    alpha: Share = 0.2
    """Weight of the newest speed; 1 is ``memoryless``."""

    def build(self) -> Ema:
        """The policy."""
        return Ema(self.alpha)


class ArimaConfig(Section):
    """Autoregressive integrated moving average of order (p, d, q).

    A moving average before there are ``samples`` orders, and where no fit succeeds.
    """

    kind: Literal["arima"]
    p: Order = 2
    """Order of the autoregressive part."""

    d: Annotated[int, Field(ge=0, le=2)] = 2
    """How often the series is differenced."""

    q: Order = 1
    """Order of the moving average."""

    samples: PositiveInt = 60
    """Orders of a silo before the first fit."""

    memory: Memory = 300
    """Newest orders that it is fitted to."""

    renew: PositiveInt = 100
    """Orders between two fits."""

    def build(self) -> Arima:
        """The policy."""
        return Arima((self.p, self.d, self.q), self.samples, self.memory, self.renew)


class RnnConfig(Section):
    """A plain recurrent network over the last two speeds; a moving average before there are ``samples`` orders."""

    kind: Literal["rnn"]
    samples: PositiveInt = 500
    """Orders of a silo before the first training."""

    hidden: Hidden = 16
    """Width of the recurrent layer."""

    memory: Memory = 1000
    """Newest orders that it is trained on."""

    renew: PositiveInt = 100
    """Orders between two trainings."""

    def build(self) -> RnnPredictor:
        """The policy."""
        return RnnPredictor(self.samples, self.hidden, self.memory, self.renew)


class LstmConfig(Section):
    """Long short-term memory over the last two speeds; a moving average before there are ``samples`` orders."""

    kind: Literal["lstm"]
    samples: PositiveInt = 500
    """Orders of a silo before the first training."""

    hidden: Hidden = 16
    """Width of the recurrent layer."""

    memory: Memory = 1000
    """Newest orders that it is trained on."""

    renew: PositiveInt = 100
    """Orders between two trainings."""

    def build(self) -> LstmPredictor:
        """The policy."""
        return LstmPredictor(self.samples, self.hidden, self.memory, self.renew)


class NarxConfig(Section):
    """A network over past speeds, processors and memory, trained on the windows that silos report.

    A moving average before there are ``samples`` windows of a silo.
    """

    kind: Literal["narx"]
    samples: PositiveInt = 500
    """Windows of a silo before the first training; an order has several."""

    hidden: Hidden = 8
    """Width of the hidden layer."""

    memory: Memory = 2000
    """Newest windows that it is trained on."""

    renew: PositiveInt = 50
    """Windows between two trainings."""

    warm_start: str | None = None
    """The ``predictor.json`` of a former run, as a path from where the server runs: training begins there, and
    sooner."""

    def build(self) -> Narx:
        """The policy.

        Raises:
            ConfigError: ``warm_start`` is not what a run has left, or was left by another network.
        """
        return Narx(self.samples, self.hidden, self.memory, self.renew, self._start())

    def _start(self) -> tuple[float, ...] | None:
        if self.warm_start is None:
            return None
        try:
            content = json.loads(Path(self.warm_start).read_text(encoding="utf-8"))
            return load(content if isinstance(content, dict) else {}, self.hidden)
        except (OSError, ValueError) as error:
            raise ConfigError(
                "predictor.warm_start",
                f"{self.warm_start}: {error}",
                "Name the predictor.json in the folder of a run whose narx has the same `hidden`, or leave it out",
            ) from error


class KalmanConfig(Section):
    """A drifting level with change points: two orders in a row beyond ``gate`` standard deviations are one."""

    kind: Literal["kalman"]
    drift: Positive = 0.2
    """Variance of the level's drift in an order, against that of the noise, which is learned."""

    gate: Positive = 3.0
    """Standard deviations beyond which a speed is not believed at once."""

    def build(self) -> Kalman:
        """The policy."""
        return Kalman(self.drift, self.gate)


ExpertConfig = Annotated[
    MemorylessConfig | EmaConfig | ArimaConfig | RnnConfig | LstmConfig | NarxConfig | KalmanConfig,
    Field(discriminator="kind"),
]


def _experts() -> list[ExpertConfig]:
    return [
        MemorylessConfig(kind="memoryless"),
        EmaConfig(kind="ema"),
        ArimaConfig(kind="arima"),
        RnnConfig(kind="rnn"),
        LstmConfig(kind="lstm"),
        NarxConfig(kind="narx"),
        KalmanConfig(kind="kalman"),
    ]


class MixtureConfig(Section):
    """The mean of other predictors' forecasts, weighed by how well each has done lately."""

    kind: Literal["mixture"]
    experts: Annotated[list[ExpertConfig], Field(min_length=1)] = Field(default_factory=_experts)
    """The predictors; left out, one of each other kind."""

    power: Positive = 8.0
    """Power of the inverse mean squared error that is an expert's weight."""

    forget: Share = 0.01
    """Weight of the newest squared error in that mean."""

    def build(self) -> Mixture:
        """The policy."""
        return Mixture(tuple(expert.build() for expert in self.experts), self.power, self.forget)


PredictorConfig = Annotated[
    MemorylessConfig | EmaConfig | ArimaConfig | RnnConfig | LstmConfig | NarxConfig | KalmanConfig | MixtureConfig,
    Field(discriminator="kind"),
]

PREDICTORS: tuple[str, ...] = ("memoryless", "ema", "arima", "rnn", "lstm", "narx", "kalman", "mixture")
"""All kinds, in the order of tables."""


def default_predictor(kind: str) -> AnyPredictor:
    """A predictor of a kind in `PREDICTORS`, as a strategy file that names nothing but the kind has it."""
    config = next(config for config in [*_experts(), MixtureConfig(kind="mixture")] if config.kind == kind)
    return config.build()
