"""Settings of differential privacy: the budget that a silo's owner allows, and the noise that a strategy requests."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsync.config.sections.section import Section
from fedsync.privacy.accounting import LEAST_NOISE, MOST_NOISE, AccountantKind

Epsilon = Annotated[float, Field(gt=0, le=100)]
Delta = Annotated[float, Field(gt=0, le=0.1)]
Noise = Annotated[float, Field(ge=LEAST_NOISE, le=MOST_NOISE)]
Clip = Annotated[float, Field(ge=1e-6, le=1e6)]
"""Far above the smallest float32: noise on a smaller scale would be rounded to zero, and gradients would not."""

Public = Literal["loss", "scores", "speed", "statistics"]


class BudgetConfig(Section):
    """Privacy budget of a data set: the most that all runs together may disclose of any one example or person."""

    epsilon: Epsilon
    """Largest epsilon that all runs together may spend. A change of this file does not reset what is spent."""

    delta: Delta
    """Probability that belongs to ``epsilon``; well below one over the number of examples or persons."""

    unit: Literal["example", "person", "silo"] = "example"
    """Unit that is protected: one training row, all rows of one person, or all that this silo's updates tell together
    (``privacy.kind: silo-noise``)."""

    person_column: str | None = None
    """Column that names the person of a row, for ``unit: person``. The run's task must not use it (``task.ignore``). A
    row without a name counts as a person of its own."""

    least_noise: Noise = 0.5
    """Smallest noise multiplier that a run may use."""

    largest_clip: Clip = 10.0
    """Largest norm of a unit's gradient that a run may use (``privacy.clip``)."""

    examples: Annotated[int, Field(ge=1)] | None = None
    """Public number of training rows (of persons, for ``unit: person``), from which sampling rates are computed. Left
    out, the exact number, which is then public."""

    public: list[Public] = Field(default=["speed"])
    """Figures that the owner declares public, so that they are sent without noise: ``loss`` of training, ``scores`` of
    evaluations, ``speed`` (times, memory, load of the machine) and ``statistics`` of columns. The time at which an
    answer arrives tells the speed in any case."""

    accountant: AccountantKind = "pld"
    """Method of adding up. ``pld`` is exact for batch sizes that do not depend on the results of training. ``rdp``
    costs about a fifth more, and is the safer choice against a server that chooses batch sizes by the results."""

    @model_validator(mode="after")
    def _names_persons(self) -> Self:
        if (self.unit == "person") != (self.person_column is not None):
            raise ValueError(
                f"unit {self.unit} with{'out' if self.person_column is None else ''} person_column; write unit: person "
                "and person_column: NAME together, or leave both out"
            )
        if self.unit == "silo" and self.accountant != "rdp":
            raise ValueError("unit silo: only accountant rdp covers sums of discrete noise; write accountant: rdp")
        return self


class PrivacyConfig(Section):
    """Differential privacy of the training. Give ``noise_multiplier``, or ``target_epsilon``, from which it follows.

    ``dp-sgd`` protects examples or persons from everybody who sees the model. Each step at a silo clips the gradient of
    each of them and adds Gaussian noise. ``silo-noise`` protects whole silos from each other and from all who get the
    model. Each silo clips its update and adds a share of the noise before it encrypts; see ``cipher.members`` and
    ``cipher.colluding``.
    """

    kind: Literal["dp-sgd", "silo-noise"]
    clip: Clip
    """Largest norm of a unit's gradient, or of a silo's update; longer ones are scaled down."""

    noise_multiplier: Noise | None = None
    """Standard deviation of the noise, divided by ``clip``; with ``silo-noise``, of the sum of all shares except those
    of silos that collude."""

    target_epsilon: Epsilon | None = None
    """Epsilon of the whole run at a silo, from ``stop.rounds``, ``local.steps`` and ``local.batch_size``. A silo with
    less left in its budget aims at what is left."""

    delta: Delta = 1e-5
    """Probability that belongs to ``target_epsilon``."""

    score_noise: Noise | None = None
    """Standard deviation of the noise on the number of right predictions of an evaluation. Left out, scores are not
    sent, unless the owner declares them public."""

    @model_validator(mode="after")
    def _has_one_noise(self) -> Self:
        if (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError("noise_multiplier or target_epsilon is needed, and not both; write one")
        return self
