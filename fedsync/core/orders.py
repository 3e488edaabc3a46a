"""What a silo is asked to do, and what it says it did. Frozen values: they cross processes and journals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import StrEnum, auto
from typing import Any, Protocol, TypeVar

from fedsync.common.codec import Sum
from fedsync.core.silo_presence import Presence

V = TypeVar("V")

_ABSENT: Any = object()


def fast_dataclass(kind: type[V]) -> type[V]:
    """Give a frozen, slotted dataclass an ``__init__`` that does the same in half the time.

    What `dataclasses` writes for a frozen class sets each field by ``object.__setattr__``, which looks its slot up by
    name: 110 ns a field. This one calls the slots themselves: 60 ns. Frozen it is still.

    Args:
        kind: without ``__post_init__``, every field a parameter.
    """
    known: dict[str, Any] = {"_absent": _ABSENT}
    parameters, lines = ["self"], []
    for each in fields(kind):  # type: ignore[arg-type]  # any dataclass, which no type can say
        name, value = each.name, each.name
        known[f"_set_{name}"] = getattr(kind, name).__set__
        if each.default_factory is not MISSING:
            known[f"_make_{name}"] = each.default_factory
            parameters.append(f"{name}=_absent")
            value = f"_make_{name}() if {name} is _absent else {name}"
        elif each.default is not MISSING:
            known[f"_default_{name}"] = each.default
            parameters.append(f"{name}=_default_{name}")
        else:
            parameters.append(name)
        lines.append(f"    _set_{name}(self, {value})")
    exec("\n".join([f"def __init__({', '.join(parameters)}):", *lines]), known)  # as `dataclasses` does
    made = known["__init__"]
    made.__qualname__ = f"{kind.__qualname__}.__init__"
    made.__annotations__ = kind.__init__.__annotations__
    type.__setattr__(kind, "__init__", made)
    return kind


MISSIZED = "missized_step_count"
"""Metric of a report whose batches do not have the ordered size: its steps."""


class Split(StrEnum):
    """On which of a silo's samples a model is evaluated.

    What a run decides by, it decides by the validation split: stop rules, and which version is the best. A silo that
    holds out none has its test split in its place. Else the test split is evaluated once, when all is decided.
    """

    VALIDATION = auto()
    TEST = auto()


class Subject(StrEnum):
    """Which model is evaluated."""

    LAST = auto()
    """The newest version."""
    BEST = auto()
    """The version that was kept as the best; see `fedsync.evaluation.best_version`."""
    LOCAL = auto()
    """The silo's own, trained by it alone; see `fedsync.evaluation.local_baselines`."""
    TUNED = auto()
    """The silo's own, which it made of the best one."""

    @property
    def own(self) -> bool:
        """Whether it is a model that each silo trains for itself, and has."""
        return self in (Subject.LOCAL, Subject.TUNED)


@dataclass(frozen=True, slots=True)
class LocalWork:
    """The work of an average silo: ``steps`` (tau), ``batch_size`` (B, samples), ``learning_rate`` (eta)."""

    steps: int
    batch_size: int
    learning_rate: float


@fast_dataclass
@dataclass(frozen=True, slots=True)
class WorkOrder:
    """One order: train from ``base_version`` for ``max_steps`` local steps of ``batch_size`` samples.

    Args:
        update_id: the name of the update that the order asks for; unique within a run.
        base_version: model version to start from.
        round: the silo's own count of orders, from 1.
        batch_size: samples a local step (B in the papers).
        max_steps: local steps (tau).
        learning_rate: eta; 0 for an order that `scores_only`.
        seed: seeds everything random in the order.
        budget_s: seconds the silo may train, or None for no limit; it does one step at least.
        overrun: share of a step, 0..1, by which the last one may end after the budget; at 1 every step
            that begins in time is done.
        evaluate: evaluate the base model before training.
        subject: which model is trained, or evaluated where the order `scores_only`. One that the silo keeps for itself
            is brought on, and nothing travels back.
        after: orders of the subject behind that model, which begins with what comes along if there is none.
        share: send that model back, for other silos to evaluate; the silo does if its owner allows it.
        split: on which samples it is evaluated.
        behind: update id of the order that the silo trains first; empty where it begins at once.
        carry: share, 0..1, of that order's update that training begins with on top of the base model; said of every
            order of the run, so that silos keep their last update.
        config: JSON object of what the silo's own training code is told beside ``train_config``; empty for nothing.
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
    behind: str = ""
    carry: float = 0.0
    config: str = ""

    @property
    def planned_samples(self) -> int:
        """Samples that the whole order processes."""
        return self.batch_size * self.max_steps

    @property
    def scores_only(self) -> bool:
        """Whether the update changes nothing and only takes along what the silo found: the learning rate is 0."""
        return self.learning_rate == 0

    @property
    def apart(self) -> bool:
        """Whether it trains a model that the silo keeps for itself."""
        return self.subject.own and not self.scores_only


@dataclass(frozen=True, slots=True)
class Window:
    """Means over a few consecutive local steps.

    Args:
        speed: samples per second over the compute part.
        cpu: share available to the trainer, 0..1, of the processors that it may use at all (those it may
            run on, or its quota): 1 less what other programs take. What the trainer itself uses is
            available to it. None if the silo does not tell.
        memory: memory pressure, 0..1: the share in use, of the machine's memory or of the silo's limit,
            raised by the share of time in which programs waited for memory; on a GPU, the share of its
            memory that others hold or training needs. None if the silo does not tell.
    """

    speed: float
    cpu: float | None = None
    memory: float | None = None

    def coarse(self) -> Window:
        """The same with shares in two digits, for a server that may know no more of the machine."""
        cpu, memory = (None if share is None else round(share, 2) for share in (self.cpu, self.memory))
        return Window(self.speed, cpu, memory)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How a model did on one split of a silo. Sums, so that silos can be pooled.

    Args:
        loss: summed loss over the samples; None where training code of a silo's own tells none.
        correct: number of correct predictions (or the task's summed score); None where such code tells no score.
        samples: size of the split.
        metrics: other figures by name, which nothing decides by: means, and over how many samples.
        sums: of statistics, by key; see `fedsync.evaluation.metrics`.
        gains: how much better a model is than the silo's own local one, between which numbers by metric, by
            `Subject`: of the models that were tested before it, or of this one, tuned.
    """

    loss: float | None
    correct: float | None
    samples: int
    metrics: Mapping[str, tuple[float, int]] = field(default_factory=dict)
    sums: Mapping[str, tuple[Sum, ...]] = field(default_factory=dict)
    gains: Mapping[str, Mapping[str, tuple[float, float]]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Score:
    """How good a model ``version`` is: accuracy and mean loss over a split of several silos.

    None is what no silo tells.

    Accuracy is the share of correct predictions, or the mean of whatever else a task scores: any number, more being
    better.

    ``metrics`` are the numbers of `fedsync.evaluation.metrics` by name, worked out of the sums of these silos.
    """

    version: int
    accuracy: float | None
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict, hash=False)

    @property
    def numbers(self) -> Mapping[str, float]:
        """All of it by name, but what is None."""
        told = {"accuracy": self.accuracy, "loss": self.loss}
        return {**self.metrics, **{name: value for name, value in told.items() if value is not None}}


@dataclass(frozen=True, slots=True)
class PooledFigures:
    """What several silos found together in sealed updates, as each silo that opens the sums finds it.

    Means, rounded: they tell neither what a single silo found nor how many samples it has.

    Args:
        version: the newest commit whose updates are in them.
        loss: mean training loss over these updates; None in the answer to a question about what came of the run.
        score: of the newest model that was evaluated on the way; None if none was.
        best: score of the version whose model silos keep as the best so far; None before there is one.
        split: on which samples the score is.
        subject: which model it is of.
        spoiled: silos in sums of this very version that bring nothing, as one of them sealed what no silo may.
    """

    version: int
    loss: float | None
    score: Score | None = None
    best: Score | None = None
    split: Split = Split.VALIDATION
    subject: Subject = Subject.LAST
    spoiled: tuple[str, ...] = ()


@fast_dataclass
@dataclass(frozen=True, slots=True)
class WorkReport:
    """What a silo did for an order.

    Args:
        base_version: the version it started from.
        steps: local steps done.
        samples: samples processed.
        compute_s: seconds of training, device synchronised, without overhead.
        overhead_s: other seconds by kind, for example ``{"evaluate": 0.1, "load": 0.02}``.
        loss: mean training loss a sample; None where figures are sealed.
        windows: short series over the order, at most 64.
        batch_cap: largest batch that fits the silo's memory, if it ran out; None otherwise.
        evaluation: of the base model, if the order asked for it.
        metrics: any other figures, which nothing decides by, for example ``{"peak_memory_bytes": 1e9}``. The name
            ends in the unit; `fedsync.observe.quality.metric_pool` says how they are pooled.
        pooled: where figures are sealed, what silos found together in the commits that came with the order.
        presence: how long the silo is still there; None if it says nothing new.
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


@fast_dataclass
@dataclass(frozen=True, slots=True)
class UpdateMeta:
    """What policies may know of an update; the payload stays in the driver under ``update_id``.

    Args:
        update_id: as in the order.
        silo: who sent it.
        base_version: version it was trained from.
        steps: local steps behind it.
        samples: samples processed.
        examples: training samples the silo holds; see `SiloFacts`.
        nbytes: payload bytes.
        loss: mean training loss a sample; None where figures are sealed.
    """

    update_id: str
    silo: str
    base_version: int
    steps: int
    samples: int
    examples: int
    nbytes: int
    loss: float | None = 0.0

    @classmethod
    def of(cls, silo: str, order: WorkOrder, report: WorkReport, examples: int, nbytes: int) -> UpdateMeta:
        """What a silo with so many training samples says in its report of an order; the update has ``nbytes``."""
        return cls(
            order.update_id,
            silo,
            order.base_version,
            report.steps,
            report.samples,
            examples,
            nbytes,
            report.loss,
        )


class _Trained(Protocol):
    @property
    def samples(self) -> int: ...

    @property
    def loss(self) -> float | None: ...


def mean_loss(parts: Iterable[_Trained]) -> float | None:
    """Mean training loss a sample over several reports or updates; None where none tells its own."""
    told = [(part.loss, part.samples) for part in parts if part.loss is not None]
    return sum([loss * samples for loss, samples in told]) / sum([samples for _, samples in told]) if told else None


@dataclass(frozen=True, slots=True)
class SiloFacts:
    """What a silo says of itself when it joins.

    Args:
        examples: training samples it holds; where figures are sealed, a number that all silos of the run say.
        memory_samples: largest batch its memory takes, or None if unknown.
        declared_speed: samples per second from its own file, or None.
        device: for people, for example ``cpu`` or ``cuda:0``.
        validates: whether it holds out a validation split, by which rounds are evaluated; see `Split`.
        presence: how long it is still there; None if always.
        least_batch: smallest batch that its owner allows.
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
        """Largest batch, by its data, its memory, and what it ``found`` when one did not fit."""
        cap = self.examples
        for limit in (self.memory_samples, found):
            if limit is not None and limit < cap:
                cap = limit
        return cap
