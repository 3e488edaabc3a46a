"""Encryption settings that silos and server agree on before the first update: values, bits, weights."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import compress
from typing import TYPE_CHECKING

import numpy as np

from fedsync.cipher.encoding.packing import Packing
from fedsync.cipher.encoding.quantization import QuantizationGrid
from fedsync.cipher.encoding.sums import slots_of
from fedsync.cipher.encoding.tally import MOST_SUMS, HeaderForm, header_form
from fedsync.cipher.suites.suite import MASKED, Form, form_of
from fedsync.common.errors import ConfigError
from fedsync.core.report_checks import MAX_EXAMPLES
from fedsync.core.silo_weight import PRECISION_UNIT, Weighting
from fedsync.evaluation.metrics.metric_types import AnyMetric, Statistic, statistics_of
from fedsync.evaluation.version_scores import Selection
from fedsync.model.layout import Layout, Vector, matches
from fedsync.model.running_statistics import INSTEAD, Ranges
from fedsync.model.running_statistics import statistics_of as statistics_in
from fedsync.model.server_optimizer import ServerOptimizer

if TYPE_CHECKING:
    from fedsync.cipher.encoding.silo_noise import SiloNoise

_grid = lru_cache(maxsize=256)(QuantizationGrid)

CAP = 2**20
"""Largest weight n_i where silos weigh by samples; times `PRECISION_UNIT` by precision. No silo's count is told."""

FIRST_EXPONENT = 0  # exponent of every tensor before silos have voted

_EXACT_BITS = 12  # fewest for running statistics


@dataclass(frozen=True)
class EncryptionPlan:
    """Encryption settings of one model's updates; the same at the server and at every silo.

    Args:
        kind: name of the suite.
        bits: bits of a quantised value.
        quorum: number of updates after which silos agree on the next exponents.
        only: patterns of tensor names; others travel in the clear. Empty: all tensors are sealed.
        seal_metrics: losses and evaluations travel in the header chunk instead of the report. A silo's number of
            examples and its other figures do not travel at all.
        members: silos open a version only if it adds at least this number of updates.
        colluding: number of silos that may lie; their votes must not change the exponents.
        examples: with `seal_metrics`, the number of examples that every silo reports instead of its own.
        metrics: with `seal_metrics`, metrics that silos compute together from the sums in headers.
        selection: with `seal_metrics`, rule by which silos find and keep the best version; None: they keep none.
        optimizer: optimizer that every silo applies to the sums before its model moves.
        work_ratio: with masks, largest allowed ratio of the work of two updates in one sum.
        noise: clipping and noise of whole updates; exponents then follow from it, and not from votes.

    Raises `ConfigError` if a pattern matches no tensor; a sum of ``quorum`` updates, or the sums of metrics, do not
    fit; or ``members`` exceeds the updates of a round.
    """

    kind: str
    bits: int
    layout: Layout
    weighting: Weighting
    quorum: int
    only: tuple[str, ...] = ()
    seal_metrics: bool = False
    members: int = 1
    colluding: int = 1
    examples: int = MAX_EXAMPLES
    metrics: tuple[AnyMetric, ...] = ()
    selection: Selection | None = None
    optimizer: ServerOptimizer | None = None
    work_ratio: float = 1.0
    noise: SiloNoise | None = None

    def __post_init__(self) -> None:
        for pattern in self.only:
            if not any(fnmatch.fnmatchcase(name, pattern) for name in self.layout.names):
                known = ", ".join(self.layout.names[:8])
                raise ConfigError("cipher.only", f"no tensor matches {pattern!r}", f"The model has {known}")
        if self.quorum > self.limit:
            problem = f"{self.quorum} silos, but sums of {self.bits} bits hold {self.limit} updates"
            remedy = "Choose 16 bits, another suite, or a barrier that commits fewer at a time: `buffered`"
            raise ConfigError("cipher.bits", problem, remedy)
        if self.members > self.quorum:
            problem = f"{self.members} updates in each version, but rounds have {self.quorum} silos"
            raise ConfigError("cipher.members", problem, "Write as many as rounds have at most")
        if self.bits < _EXACT_BITS and self.averages:
            problem = f"{self.bits} bits round running statistics of norm layers until a variance is below 0"
            raise ConfigError("cipher.bits", problem, f"Write bits: 16, use {INSTEAD}")
        check_sums(self.metrics if self.seal_metrics else ())

    @cached_property
    def form(self) -> Form:
        return form_of(self.kind)

    @cached_property
    def packing(self) -> Packing:
        return Packing(self.bits, self.form.slot_bits)

    @cached_property
    def headroom(self) -> int:
        """Bits by which the next updates may grow without being clipped. Of 16 bits, three can be spared. Of 8 bits,
        each counts, and clipping a few values costs less.
        """
        return 3 if self.bits == 16 else 1

    @cached_property
    def masked(self) -> bool:
        return self.form is MASKED

    @cached_property
    def cap(self) -> int:
        return {"silo": 1, "precision": PRECISION_UNIT * CAP}.get(self.weighting.by, CAP)

    @cached_property
    def limit(self) -> int:
        return self.form.limit(self.packing)

    @cached_property
    def _hidden(self) -> tuple[bool, ...]:
        return tuple(not self.only or matches(name, self.only) for name in self.layout.names)

    @cached_property
    def sealed(self) -> Layout:
        return self._part(self._hidden)

    def _part(self, chosen: Sequence[bool]) -> Layout:
        names, shapes = self.layout.names, self.layout.shapes
        return Layout(tuple(compress(names, chosen)), tuple(compress(shapes, chosen)))

    @cached_property
    def averages(self) -> Ranges:
        """Running statistics among the sealed values."""
        return statistics_in(self.sealed)

    @cached_property
    def clear_averages(self) -> Ranges:
        """Running statistics among the values in the clear."""
        return statistics_in(self._part([not hidden for hidden in self._hidden]))

    @cached_property
    def statistics(self) -> tuple[Statistic, ...]:
        known = statistics_of(self.metrics) if self.seal_metrics else {}
        return tuple(known[key] for key in sorted(known))

    @cached_property
    def header(self) -> HeaderForm:
        return header_form(len(self.sealed.names), self.statistics)

    @property
    def most_models(self) -> int:
        """Arrays, as large as the model, in a silo's state: newest model, moments, best model and its candidate."""
        moments = 0 if self.optimizer is None else self.optimizer.vectors
        return 1 + moments + (0 if self.selection is None else 2)

    def grid(self, exponents: Sequence[int]) -> QuantizationGrid:
        return _grid(self.sealed, self.packing, tuple(exponents), self.cap, self.statistics)

    @property
    def first_exponents(self) -> tuple[int, ...]:
        exponent = FIRST_EXPONENT if self.noise is None else self.noise.fit(self.sealed.size, self.bits).exponent
        return (exponent,) * len(self.sealed.names)

    @cached_property
    def chunks(self) -> int:
        return self.grid(self.first_exponents).chunks

    @cached_property
    def clear_values(self) -> int:
        return self.layout.size - self.sealed.size

    def divide(self, vector: Vector) -> tuple[Vector, Vector]:
        """Split a whole vector into sealed and clear values, float32 [sealed.size] and [clear_values]."""
        if not self.clear_values:
            return vector, np.empty(0, dtype=np.float32)
        sealed, clear = (np.empty(size, dtype=np.float32) for size in (self.sealed.size, self.clear_values))
        for hidden, inside, whole in self._spans():
            (sealed if hidden else clear)[inside] = vector[whole]
        return sealed, clear

    def unite(self, sealed: Vector, clear: Vector) -> Vector:
        if not self.clear_values:
            return sealed
        vector = np.empty(self.layout.size, dtype=np.float32)
        for hidden, inside, whole in self._spans():
            vector[whole] = (sealed if hidden else clear)[inside]
        return vector

    def _spans(self) -> Iterator[tuple[bool, slice, slice]]:
        start, inside = 0, {True: 0, False: 0}
        for size, hidden in zip(self.layout.sizes, self._hidden, strict=True):
            yield hidden, slice(inside[hidden], inside[hidden] + size), slice(start, start + size)
            start += size
            inside[hidden] += size


def check_sums(metrics: Sequence[AnyMetric]) -> None:
    left, known = MOST_SUMS, statistics_of(metrics)
    for statistic in (known[key] for key in sorted(known)):
        needs = slots_of(statistic)
        if needs > left:
            metric = next(each.name for each in metrics if each.statistic == statistic)
            takes = f"{metric!r} needs {statistic.size} sums ({statistic.key}), which take {needs} slots"
            problem = f"{takes} of a sealed header, and {left} of {MOST_SUMS} are left"
            remedy = "Remove metrics, choose fewer bins or classes, or write `metrics: plain` below `cipher`"
            raise ConfigError("evaluation.metrics", problem, remedy)
        left -= needs
