"""How much each silo is asked to do: forecasts and limits in, batch sizes, steps and learning rates out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median

import numpy as np

from fedsync.core.curve import Curve
from fedsync.core.protocols import Balancer, Bounds
from fedsync.core.views import SiloView


class Scale(StrEnum):
    """What follows a silo's speed.

    ``BATCH`` is LB-BSP. The other two are the variants that LB-BSP, section 5.5, shows to cost
    accuracy on non-i.i.d. data; they exist to show why not.
    """

    BATCH = "batch"
    STEPS = "steps"
    LEARNING_RATE = "learning_rate"


@dataclass(frozen=True, slots=True)
class LocalWork:
    """The work of an average silo: ``steps`` (tau), ``batch_size`` (B, samples), ``learning_rate`` (eta)."""

    steps: int
    batch_size: int
    learning_rate: float


@dataclass(frozen=True, slots=True)
class Sizing:
    """Turns forecasts into work.

    Args:
        work: what every silo does when nothing is balanced.
        balancer: shares the total; None keeps ``work`` for every silo (FedAvg).
        scale: what the shares set.
        floor: smallest batch a silo may get [samples].
        cap: largest batch a silo may get [samples], or None.

    Source: LB-BSP, Algorithm 1 and section 3.5: the total stays X = n x B.
    """

    work: LocalWork
    balancer: Balancer | None = None
    scale: Scale = Scale.BATCH
    floor: int = 1
    cap: int | None = None

    def plan(self, silos: Mapping[str, SiloView], found_caps: Mapping[str, int]) -> dict[str, LocalWork]:
        """Work of every silo, by name.

        Args:
            silos: all silos present; those without a forecast count as the median of the others.
            found_caps: largest batches found by running out of memory, by silo.
        """
        caps = [self._cap(silo, found_caps.get(name)) for name, silo in silos.items()]
        batches = [min(self.work.batch_size, cap) for cap in caps]
        steps = [self.work.steps] * len(caps)
        if self.balancer is not None and caps:
            curves = _curves(silos)
            if self.scale is Scale.STEPS:
                most = self.work.steps * len(caps)
                steps = _share(self.balancer, curves, self.work.steps, [most] * len(caps), floor=1)
            else:
                batches = _share(self.balancer, curves, self.work.batch_size, caps, self.floor)
        return {
            name: LocalWork(step, batch, self._learning_rate(batch))
            for name, batch, step in zip(silos, batches, steps, strict=True)
        }

    def alone(self, silo: SiloView, found_cap: int | None) -> LocalWork:
        """Work of one silo where nothing is balanced: as `plan`, without looking at the others."""
        batch = min(self.work.batch_size, self._cap(silo, found_cap))
        return self.work if batch == self.work.batch_size else replace(self.work, batch_size=batch)

    def _cap(self, silo: SiloView, found: int | None) -> int:
        """Largest batch of a silo: its data, its memory, what it found out, the configured cap."""
        cap = silo.facts.examples
        for limit in (silo.facts.memory_samples, found, self.cap):
            if limit is not None and limit < cap:
                cap = limit
        return cap

    def _learning_rate(self, batch: int) -> float:
        if self.balancer is None or self.scale is not Scale.LEARNING_RATE:
            return self.work.learning_rate
        return self.work.learning_rate * batch / self.work.batch_size


class Plan(Mapping[str, LocalWork]):
    """`Sizing.plan`, worked out when first looked at: a barrier that does not care pays nothing."""

    def __init__(self, sizing: Sizing, silos: Mapping[str, SiloView], found_caps: Mapping[str, int]) -> None:
        self._sizing, self._silos, self._found_caps = sizing, silos, found_caps
        self._work: dict[str, LocalWork] | None = None

    def __getitem__(self, name: str) -> LocalWork:
        if self._work is None and self._sizing.balancer is None:
            return self._sizing.alone(self._silos[name], self._found_caps.get(name))
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, LocalWork]:
        if self._work is None:
            self._work = self._sizing.plan(self._silos, self._found_caps)
        return self._work


def _share(balancer: Balancer, curves: list[Curve], mean: int, caps: list[int], floor: int) -> list[int]:
    """Share ``n x mean``, or all that the caps allow if that is less."""
    cap = np.asarray(caps, dtype=np.int64)
    total = min(mean * len(caps), int(cap.sum()))
    return [int(size) for size in balancer.plan(curves, total, Bounds(np.minimum(floor, cap), cap))]


def _curves(silos: Mapping[str, SiloView]) -> list[Curve]:
    """Forecasts of all silos; a silo nobody has measured counts as the median of the measured ones."""
    known = [silo.forecast.speed for silo in silos.values() if silo.forecast is not None]
    usual = Curve(speed=median(known)) if known else Curve(speed=1.0)
    return [silo.forecast or usual for silo in silos.values()]
