"""Learning rates that fall from round to round, and settings by round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import cos, pi

from fedsync.policies.rounds.rounds_base import RATE, RoundPolicy, Scalar
from fedsync.policies.schema import PartOfOne, Positive, PositiveInt, Settings, Share, register


@register("decay")
@dataclass(frozen=True, slots=True)
class Decay(RoundPolicy):
    """The learning rate is multiplied by ``factor`` after each ``every`` rounds, and never falls below ``least``."""

    factor: Share = 0.99
    """What it is multiplied by."""

    every: PositiveInt = 1
    """Rounds that have the same rate."""

    least: PartOfOne = 0.0
    """Part of ``local.learning_rate`` below which it does not fall."""

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        return {RATE: learning_rate * max(self.factor ** ((round - 1) // self.every), self.least)}


@register("cosine")
@dataclass(frozen=True, slots=True)
class Cosine(RoundPolicy):
    """The learning rate falls along half a cosine within ``rounds`` rounds, from all of it to ``least``, and stays."""

    rounds: PositiveInt = 100
    """Rounds until it is at ``least``."""

    least: Share = 0.01
    """Part of ``local.learning_rate`` that it falls to."""

    def settings(self, round: int, learning_rate: float) -> Mapping[str, Scalar]:
        gone = min((round - 1) / self.rounds, 1.0)
        return {RATE: learning_rate * (self.least + (1 - self.least) * (1 + cos(pi * gone)) / 2)}


@dataclass(frozen=True, slots=True)
class FromRound(Settings):
    """What holds from a round on, until another entry says otherwise."""

    round: PositiveInt
    """First round for which it holds."""

    learning_rate: Positive | None = None
    """Learning rate of orders; left out, it stays."""

    train_config: dict[str, bool | int | float | str] = field(default_factory=dict)
    """Entries for training code of one's own, which join ``train_config`` or replace entries there."""

    def __post_init__(self) -> None:
        if self.learning_rate is None and not self.train_config:
            raise ValueError(f"round {self.round} changes nothing; write learning_rate or train_config")


@register("table")
@dataclass(frozen=True, slots=True)
class ByRound(RoundPolicy):
    """Settings by round, as in ``rounds: [{round: 1, train_config: {mix: 0.5}}, {round: 9, learning_rate: 0.01}]``."""

    rounds: list[FromRound] = field(default_factory=list)
    """What holds from which round on."""

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
