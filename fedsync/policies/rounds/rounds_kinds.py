"""Learning rate schedules, and settings by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import cos, pi

from fedsync.policies.rounds.rounds_base import RATE, RoundPolicy, Scalar
from fedsync.policies.schema import PartOfOne, Positive, PositiveInt, Settings, Share, register


@register("decay")
@dataclass(frozen=True, slots=True)
class Decay(RoundPolicy):
    """Learning rate that is multiplied by ``factor`` after every ``every`` rounds, down to ``least``."""

    factor: Share = 0.99
    """Factor of the learning rate."""

    every: PositiveInt = 1
    """Number of rounds with the same rate."""

    least: PartOfOne = 0.0
    """Lower limit of the rate, as a share of ``local.learning_rate``."""

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        return {RATE: learning_rate * max(self.factor ** ((round - 1) // self.every), self.least)}


@register("cosine")
@dataclass(frozen=True, slots=True)
class Cosine(RoundPolicy):
    """Learning rate that falls along half a cosine to ``least`` within ``rounds`` rounds, and then stays there."""

    rounds: PositiveInt = 100
    """Number of rounds until the rate reaches ``least``."""

    least: Share = 0.01
    """Final rate, as a share of ``local.learning_rate``."""

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        gone = min((round - 1) / self.rounds, 1.0)
        return {RATE: learning_rate * (self.least + (1 - self.least) * (1 + cos(pi * gone)) / 2)}


@dataclass(frozen=True, slots=True)
class FromRound(Settings):
    """Settings that hold from a round on, until another entry changes them."""

    round: PositiveInt
    """First round to which the entry applies."""

    learning_rate: Positive | None = None
    """Learning rate of orders. Default: unchanged."""

    train_config: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Entries for the user's own training code, which are added to ``train_config`` or replace its entries."""

    def __post_init__(self) -> None:
        if self.learning_rate is None and not self.train_config:
            raise ValueError(f"round {self.round} changes nothing; write learning_rate or train_config")


@register("table")
@dataclass(frozen=True, slots=True)
class ByRound(RoundPolicy):
    """Settings by round, as in ``rounds: [{round: 1, train_config: {mix: 0.5}}, {round: 9, learning_rate: 0.01}]``."""

    rounds: list[FromRound] = field(default_factory=list)
    """Settings with the round from which each applies; one entry per round."""

    def __post_init__(self) -> None:
        numbers = [each.round for each in self.rounds]
        if not numbers or len(set(numbers)) < len(numbers):
            raise ValueError(
                f"rounds has {numbers or 'no entry'}; write one entry for each round that changes something"
            )

    @property
    def changes_rate(self) -> bool:
        return any(each.learning_rate is not None for each in self.rounds)

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        settings: dict[str, Scalar] = {}
        for each in sorted(self.rounds, key=lambda entry: entry.round):
            if each.round <= round:
                settings |= each.train_config
                settings |= {} if each.learning_rate is None else {RATE: each.learning_rate}
        return settings
