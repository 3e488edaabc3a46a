"""Orders (requests for local training) and silos' reports: immutable values, sent between processes and journaled."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum, auto

from fedsync.common.codec import Sum

MAX_AWAY_S = 3 * 86_400.0
"""Upper bound of both durations of a daily window [s], above 48 h: the hour lost in spring may skip a daily window."""


@dataclass(frozen=True, slots=True)
class Presence:
    """Time left in a silo's window (``left_s``, 0 outside) and until its next window, relative to the report."""

    left_s: float
    back_s: float

    @property
    def sound(self) -> bool:
        """Whether the durations are possible for a daily window; False for NaN."""
        return 0 <= self.left_s <= self.back_s <= MAX_AWAY_S


MISSIZED = "missized_step_count"
"""Metric of a report: number of steps, if the batches did not have the ordered size."""

UNCHANGED = "unchanged_step_count"
"""Metric of a report: number of steps, if they changed no tensor that travels."""


class Split(StrEnum):
    """Samples of a silo on which a model is evaluated.

    Decisions, such as stop rules and the best version, use the validation split. A silo without one uses its test split
    instead. In other silos, the test split is evaluated once, after all decisions.
    """

    VALIDATION = auto()
    TEST = auto()


class Subject(StrEnum):
    """Model that a silo trains or evaluates."""

    LAST = auto()
    """The newest version."""
    BEST = auto()
    """The version kept as the best; see `fedsync.evaluation.version_scores`."""
    LOCAL = auto()
    """A silo's own model, trained by the silo alone; see `fedsync.evaluation.local_baselines`."""
    TUNED = auto()
    """A silo's own model, fine-tuned from the best version."""

    @property
    def own(self) -> bool:
        """Whether each silo trains and keeps its own model."""
        return self in (Subject.LOCAL, Subject.TUNED)


@dataclass(frozen=True, slots=True)
class LocalWork:
    """Work of one order: ``steps`` (tau), ``batch_size`` (B, samples), ``learning_rate`` (eta)."""

    steps: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class WorkOrder:
    """Order to train from ``base_version`` for ``max_steps`` (tau) local steps of ``batch_size`` (B) samples.

    Args:
        update_id: id of the resulting update; unique within a run.
        round: the silo's own count of orders, from 1.
        learning_rate: eta; 0 for an order that `scores_only`.
        seed: seeds everything random in the order.
        budget_s: seconds the silo may train, or None for no limit; at least one step is done.
        overrun: share of a step, 0..1, by which the last step may exceed the budget; at 1 every step that begins in
            time is done.
        evaluate: evaluate the base model before training.
        subject: model to train, or to evaluate if the order `scores_only`. A silo trains its own model further, and
            sends it back only with ``share``.
        after: finished orders of this subject; at 0 training starts from the model sent with the order.
        share: send the silo's own model back for evaluation by other silos, if its owner allows it.
        config: JSON object for the silo's own training code, in addition to ``train_config``; empty for none.
    """

    update_id: str
    base_version: int
    round: int
    batch_size: int
    max_steps: int
    learning_rate: float
    seed: int
    budget_s: float | None = None
    overrun: float = 1.0
    evaluate: bool = True
    subject: Subject = Subject.LAST
    after: int = 0
    share: bool = False
    split: Split = Split.VALIDATION
    config: str = ""

    @property
    def planned_samples(self) -> int:
        return self.batch_size * self.max_steps

    @property
    def scores_only(self) -> bool:
        """Whether the order only evaluates: at learning rate 0 the update changes nothing."""
        return self.learning_rate == 0

    @property
    def apart(self) -> bool:
        return self.subject.own and not self.scores_only


@dataclass(frozen=True, slots=True)
class Window:
    """Means over a few consecutive local steps; ``cpu`` and ``memory`` are None if not reported.

    Args:
        speed: samples per second over the compute part.
        cpu: share, 0..1, of the trainer's allowed processors (affinity or quota) that other programs leave to it.
        memory: memory pressure, 0..1: used share of the machine's memory or of the silo's limit, raised by the share of
            time in which programs waited for memory. On a GPU, the share of its memory that other programs hold or
            training needs.
    """

    speed: float
    cpu: float | None = None
    memory: float | None = None

    def coarse(self) -> Window:
        cpu, memory = (None if share is None else round(share, 2) for share in (self.cpu, self.memory))
        return Window(self.speed, cpu, memory)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Evaluation of a model on one split of a silo, as sums that can be pooled over silos.

    Args:
        loss: summed loss over the samples; None if the silo's own training code reports none.
        correct: number of correct predictions, or the task's summed score; None as for the loss.
        samples: size of the split.
        metrics: name -> mean and number of samples, for metrics that no decision uses.
        sums: statistic key -> sums; see `fedsync.evaluation.metrics`.
        gains: `Subject` -> metric -> interval of the gain over the silo's own local model. The evaluation of the local
            model holds the gains of all models evaluated before; each later evaluation holds its own model's gain.
    """

    loss: float | None
    correct: float | None
    samples: int
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    sums: Mapping[str, tuple[Sum, ...]] = field(default_factory=dict)
    gains: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """Quality of a model ``version`` over a split of several silos; numbers that no silo reports are None.

    Accuracy is the share of correct predictions, or the mean of another score of the task; higher is better. The loss
    is a mean. ``metrics`` are the metrics of `fedsync.evaluation.metrics` by name, from the pooled sums of the silos.
    """

    version: int
    accuracy: float | None
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def numbers(self) -> Mapping[str, float]:
        told = {"accuracy": self.accuracy, "loss": self.loss}
        return {**self.metrics, **{name: value for name, value in told.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class PooledFigures:
    """Pooled figures (metrics) of several silos, computed by each silo that decrypts the sums of sealed updates.

    Means are rounded: they reveal neither a single silo's figures nor its number of samples.

    Args:
        version: newest commit whose updates are included.
        loss: mean training loss over these updates; None in the final evaluation, or if a silo reports no loss.
        score: score of the newest evaluated model among them, by ``split`` and ``subject``; None if there is none.
        best: score of the version that silos keep as the best; None before there is one.
        spoiled: silos in the unusable sums of this version; one of them sealed invalid data.
    """

    version: int
    loss: float | None
    score: Score | None = None
    best: Score | None = None
    split: Split = Split.VALIDATION
    subject: Subject = Subject.LAST
    spoiled: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkReport:
    """Report of a silo on an order: ``steps`` finished from ``base_version``, ``samples`` processed.

    Args:
        compute_s: seconds of training, device synchronised, without overhead.
        overhead_s: other seconds by kind, for example ``{"evaluate": 0.1, "load": 0.02}``.
        loss: mean training loss a sample; None if figures are sealed.
        windows: short series over the order, at most 64.
        batch_cap: largest batch that fits the silo's memory, if it ran out of memory; None otherwise.
        evaluation: evaluation of the base model, if the order requested it.
        metrics: further metrics, which no decision uses, for example ``{"peak_memory_bytes": 1e9}``. The name ends in
            the unit; `fedsync.observe.rounds` defines the pooling.
        pooled: if figures are sealed, pooled figures of the commits that came with the order.
        presence: the silo's remaining time; None if unchanged.
        precision: weight of the update in a private run; see `fedsync.privacy.release.PrivateSettings.precision`.
    """

    base_version: int
    steps: int
    samples: int
    compute_s: float
    loss: float | None
    overhead_s: Mapping[str, float] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    batch_cap: int | None = None
    evaluation: Evaluation | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    pooled: tuple[PooledFigures, ...] = ()
    presence: Presence | None = None
    precision: int | None = None


@dataclass(frozen=True, slots=True)
class UpdateMeta:
    """Metadata of an update for policies; the driver keeps the payload (``nbytes``) under ``update_id``.

    ``examples`` are the silo's training samples, ``samples`` those processed. Other fields are as in `WorkReport`.
    """

    update_id: str
    silo: str
    base_version: int
    steps: int
    samples: int
    examples: int
    nbytes: int
    loss: float | None = 0.0
    precision: int | None = None

    @classmethod
    def of(cls, silo: str, order: WorkOrder, report: WorkReport, examples: int, nbytes: int) -> UpdateMeta:
        return cls(
            order.update_id,
            silo,
            order.base_version,
            report.steps,
            report.samples,
            examples,
            nbytes,
            report.loss,
            report.precision,
        )


def mean_loss(parts: Iterable[WorkReport | UpdateMeta]) -> float | None:
    told = [(part.loss, part.samples) for part in parts if part.loss is not None]
    return sum([loss * samples for loss, samples in told]) / sum([samples for _, samples in told]) if told else None


@dataclass(frozen=True, slots=True)
class SiloFacts:
    """Facts that a silo reports when it joins.

    Args:
        examples: training samples; if figures are sealed, a number common to all silos of the run.
        memory_samples: largest batch that fits its memory, or None if unknown.
        declared_speed: speed in the silo's configuration file [samples/s], or None.
        device: for users, for example ``cpu`` or ``cuda:0``.
        validates: whether the silo has a validation split; see `Split`.
        presence: the silo's remaining time; None if always available.
        least_batch: smallest batch that its owner and its model allow [samples].
        least_samples: fewest samples of an order that its owner allows.
    """

    examples: int
    memory_samples: int | None = None
    declared_speed: float | None = None
    device: str = "cpu"
    validates: bool = False
    presence: Presence | None = None
    least_batch: int = 1
    least_samples: int = 1

    def fits(self, found: int | None) -> int:
        cap = self.examples
        for limit in (self.memory_samples, found):
            if limit is not None and limit < cap:
                cap = limit
        return cap


@dataclass(frozen=True, slots=True)
class Cursor:
    """Progress of a silo that must survive a restart.

    Args:
        epoch: completed passes over the data.
        position: samples of the current pass already taken.
        state: JSON that the silo's own training code keeps between orders.
        private: model parts that stay at the silo; see `fedsync.train.module_parts.PrivateParts`.
    """

    epoch: int = 0
    position: int = 0
    state: str = "{}"
    private: bytes = b""
