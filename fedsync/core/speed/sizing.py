"""Sizes of the silos' local training: batch sizes from the balancer (`fedsync.policies.balance`), within limits."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import partial
from math import ceil, inf
from statistics import median
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import PolicyError
from fedsync.core.actions import Action, Note
from fedsync.core.orders import LocalWork, WorkReport
from fedsync.core.protocols import AnyAdaptiveBalancer, Balancer, Bounds, RoundSeen
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.evenness import most_even
from fedsync.core.speed.fitting import CurveFitter
from fedsync.core.views import SiloView

_BANDS = 33
"""Number of size bands tried when `Sizing.within` limits the spread of sizes."""


class Scale(StrEnum):
    """Quantity that follows a silo's speed.

    ``BATCH`` is LB-BSP. The others exist to show how much accuracy they lose on non-i.i.d. data (LB-BSP, section 5.5).
    """

    BATCH = "batch"
    STEPS = "steps"
    LEARNING_RATE = "learning_rate"


@dataclass(frozen=True, slots=True)
class Sizing:
    """Conversion of forecasts into work.

    A balancer's curves include the silo's overhead, spread over its steps; `proportional` uses their speed only. With
    ``noise``, sizes can be more even than the balancer's, see `fedsync.core.speed.evenness`.

    Args:
        work: work of every silo without balancing.
        balancer: divides the total; None keeps ``work`` for every silo (FedAvg).
        floor, cap: smallest and largest batch of a silo [samples].
        adaptive: replaces ``balancer``; uses the durations of earlier rounds, see `Adaptation`.
        noise: share of rounds that is due to noisy gradients, if sizes are equal; 0 for the balancer's sizes.
        within: largest allowed ratio between the work of two silos; None for no limit.
        fitter: learns the curves of the balancers; None assumes a step time proportional to the batch.

    Source: LB-BSP, Algorithm 1 and section 3.5: the total stays X = n x B.
    """

    work: LocalWork
    balancer: Balancer | None = None
    scale: Scale = Scale.BATCH
    floor: int = 1
    cap: int | None = None
    adaptive: AnyAdaptiveBalancer | None = None
    fitter: CurveFitter | None = None
    noise: float = 0.0
    within: float | None = None

    @property
    def balances(self) -> bool:
        return self.balancer is not None or self.adaptive is not None

    def plan(
        self, silos: Mapping[str, SiloView], found_caps: Mapping[str, int], state: Any = None
    ) -> dict[str, LocalWork]:
        """Return the work of every connected silo, by name; a silo without a forecast counts as the median silo.
        ``found_caps``: largest batches found after running out of memory [samples]. ``state``: of the adaptive
        balancer. Raises `PolicyError` if the balancer broke its contract.
        """
        caps, floors = self._caps(silos, found_caps), [self._floor(silo) for silo in silos.values()]
        batches = [min(self.work.batch_size, cap) for cap in caps]
        steps = [self.work.steps] * len(caps)
        if caps and self.adaptive is not None:
            total, bounds = self._share(self.work.batch_size, caps, floors)
            state = self.adaptive.init() if state is None else state
            adaptive = partial(self.adaptive.plan, state, list(silos))
            batches = self._comparable(adaptive, total, bounds, []).tolist()
        elif caps and self.balancer is not None:
            forecasts = _curves(silos)
            if self.scale is Scale.STEPS:
                curves = [curve.of_steps(batch) for curve, batch in zip(forecasts, batches, strict=True)]
                most = [self.work.steps * len(caps)] * len(caps)
                total, bounds = self._share(self.work.steps, most, [1] * len(caps))
                per_order = 1
            else:
                curves = [curve.spread(self.work.steps) for curve in forecasts]
                total, bounds = self._share(self.work.batch_size, caps, floors)
                per_order = self.work.steps
            balanced = partial(self._balanced, curves, forecasts, per_order)
            found = self._comparable(balanced, total, bounds, curves).tolist()
            steps, batches = (found, batches) if self.scale is Scale.STEPS else (steps, found)
        return {
            name: LocalWork(self._steps(silos[name], batch, step), batch, self._learning_rate(batch))
            for name, batch, step in zip(silos, batches, steps, strict=True)
        }

    def _balanced(
        self, curves: list[Curve], forecasts: list[Curve], per_order: int, total: int, bounds: Bounds
    ) -> NDArray[np.int64]:
        """Return the balancer's sizes, or more even sizes if they promise less time to a target. ``curves`` include
        the overhead; an order takes ``per_order`` units of their time.
        """
        assert self.balancer is not None
        sizes = self.balancer.plan(curves, total, bounds)
        if self.noise == 0:
            return sizes
        equal = [Curve(1.0)] * len(curves)
        overhead_s = np.array([curve.overhead_s for curve in forecasts])
        orders = [curve.scaled(per_order) for curve in curves]
        limits = most_even(sizes, self.balancer.plan(equal, total, bounds), orders, overhead_s, self.noise, bounds)
        return sizes if limits is sizes else self.balancer.plan(equal, total, Bounds(bounds.floor, limits))

    def _comparable(
        self, plan: Callable[[int, Bounds], NDArray[np.int64]], total: int, bounds: Bounds, curves: Sequence[Curve]
    ) -> NDArray[np.int64]:
        """Return sizes, int64 [n], whose largest is at most `within` times the smallest, if the bounds allow it. Of
        evenly spaced narrow bands, the band in which the slowest silo ends first wins; without curves, the lowest.
        """
        sizes = _checked(plan(total, bounds), total, bounds)
        if self.within is None or sizes.max() <= self.within * sizes.min():
            return sizes
        best, best_s = sizes, inf
        least = max(1, ceil(total / len(sizes) / self.within))
        for floor in np.unique(np.linspace(least, max(least, total // len(sizes)), _BANDS).astype(np.int64)):
            band = Bounds(np.maximum(bounds.floor, floor), np.minimum(bounds.cap, int(self.within * floor)))
            if (band.floor > band.cap).any() or not band.floor.sum() <= total <= band.cap.sum():
                continue
            found = _checked(plan(total, band), total, band)
            ends_s = max((curve.step_s(int(size)) for curve, size in zip(curves, found, strict=False)), default=0.0)
            if ends_s < best_s:
                best, best_s = found, ends_s
        return best

    def alone(self, silo: SiloView, found_cap: int | None) -> LocalWork:
        batch = min(self.work.batch_size, self._cap(silo, found_cap))
        if batch == self.work.batch_size:
            return self.work
        return replace(self.work, batch_size=batch, steps=self._steps(silo, batch, self.work.steps))

    def seen(
        self,
        silos: Mapping[str, SiloView],
        found_caps: Mapping[str, int],
        seconds: Mapping[str, float],
        memory: Mapping[str, float],
    ) -> RoundSeen:
        floors = [self._floor(silo) for silo in silos.values()]
        total, bounds = self._share(self.work.batch_size, self._caps(silos, found_caps), floors)
        examples = {name: silo.facts.examples for name, silo in silos.items()}
        return RoundSeen(tuple(silos), seconds, memory, total, bounds, examples)

    @staticmethod
    def _share(mean: int, caps: list[int], floors: list[int]) -> tuple[int, Bounds]:
        cap = np.asarray(caps, dtype=np.int64)
        return min(mean * len(caps), int(cap.sum())), Bounds(np.minimum(floors, cap), cap)

    def _caps(self, silos: Mapping[str, SiloView], found_caps: Mapping[str, int]) -> list[int]:
        return [self._cap(silo, found_caps.get(name)) for name, silo in silos.items()]

    def _cap(self, silo: SiloView, found: int | None) -> int:
        cap = silo.facts.fits(found)
        return cap if self.cap is None else min(cap, self.cap)

    def _floor(self, silo: SiloView) -> int:
        facts = silo.facts
        owned = max(facts.least_batch, -(-facts.least_samples // self.work.steps))
        return max(self.floor, min(owned, self.work.batch_size))

    def _steps(self, silo: SiloView, batch: int, steps: int) -> int:
        """Return the steps; a small batch gets more steps, so that the order meets the owner's minimum of samples. If
        the minimum exceeds a mean order, no steps are added, and the owner refuses the order.
        """
        least = silo.facts.least_samples
        return steps if least > self.work.steps * self.work.batch_size else max(steps, -(-least // batch))

    def _learning_rate(self, batch: int) -> float:
        if not self.balances or self.scale is not Scale.LEARNING_RATE:
            return self.work.learning_rate
        return self.work.learning_rate * batch / self.work.batch_size


class Plan(Mapping[str, LocalWork]):
    """Lazy result of `Sizing.plan`. The arguments are live objects, so use a plan at once."""

    def __init__(
        self, sizing: Sizing, silos: Mapping[str, SiloView], found_caps: Mapping[str, int], state: Any = None
    ) -> None:
        self._sizing, self._silos, self._found_caps, self._state = sizing, silos, found_caps, state
        self._work: dict[str, LocalWork] | None = None

    def __getitem__(self, name: str) -> LocalWork:
        if self._work is None and not self._sizing.balances:
            return self._sizing.alone(self._silos[name], self._found_caps.get(name))
        return self._all()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, LocalWork]:
        if self._work is None:
            self._work = self._sizing.plan(self._silos, self._found_caps, self._state)
        return self._work


@dataclass(slots=True)
class Adaptation:
    """State of an adaptive balancer and the observations for its next call. Picklable. A round begins with the first
    release of a silo from a version; the balancer is called only then.
    """

    sizing: Sizing
    state: Any = None
    version: int | None = None
    _seconds: dict[str, float] = field(default_factory=dict)
    _memory: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.sizing.adaptive is not None:
            self.state = self.sizing.adaptive.init()

    def observe(self, name: str, report: WorkReport, seconds: float) -> None:
        if self.sizing.adaptive is None:
            return
        self._seconds[name] = seconds
        known = [window.memory for window in report.windows if window.memory is not None]
        if known:
            self._memory[name] = max(known)

    def advance(
        self, version: int, silos: Mapping[str, SiloView], found_caps: Mapping[str, int], actions: list[Action]
    ) -> bool:
        if self.sizing.adaptive is None or version == self.version:
            return False
        self.version = version
        seen = self.sizing.seen(silos, found_caps, self._seconds, self._memory)
        self.state, notes = self.sizing.adaptive.advance(self.state, seen)
        self._seconds, self._memory = {}, {}
        actions.extend(Note(text) for text in notes)
        return True

    def plan(self, silos: Mapping[str, SiloView], found_caps: Mapping[str, int]) -> Plan:
        return Plan(self.sizing, silos, found_caps, self.state)


def _checked(sizes: NDArray[np.int64], total: int, bounds: Bounds) -> NDArray[np.int64]:
    made = np.asarray(sizes)
    whole = made.dtype.kind in "iu" and made.shape == bounds.cap.shape and made.sum() == total
    if not whole or (made < bounds.floor).any() or (made > bounds.cap).any():
        wanted = f"{len(bounds.cap)} whole numbers within its bounds, with the sum {total}"
        raise PolicyError(f"the balancer gives {sizes!r:.200}, but must give {wanted}. This is a bug in your policy")
    return made


def _curves(silos: Mapping[str, SiloView]) -> list[Curve]:
    """Return all forecasts; an unmeasured silo gets the component-wise median of the measured silos."""
    known = [silo.forecast for silo in silos.values() if silo.forecast is not None]
    if len(known) == len(silos):
        return known
    usual = Curve(1.0)
    if known:
        usual = Curve(
            median(curve.speed for curve in known),
            median(curve.launch_s for curve in known),
            median(curve.saturation for curve in known),
            median(curve.overhead_s for curve in known),
        )
    return [silo.forecast or usual for silo in silos.values()]
