"""Fit of a federation's twin: a silo file with simulated machines that reproduce the timing in a run's journal.

| parameter | fitted to |
|---|---|
| speed, curve | seconds a step by batch size; affine if the sizes differ enough |
| jitter | variation of single steps, after removal of curve and load |
| contention, trace | step times that stay high or low for a while (`find_load`) |
| overhead | duration of an order minus its steps; the first order is left out, because it includes loading |
| bandwidth, latency | transfers that silos report; the latency only if sizes differ |
| crashes | durations of presence and absence |
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import SiloConfig
from fedsync.core.speed.curve import Curve
from fedsync.extras.tuning.records import TRANSFER, RunRecord, SiloRecord, Stretch
from fedsync.simulation.machine import MOST_FACTOR, Piece

Floats = NDArray[np.float64]

FEWEST = 12
"""Smallest number of points for any load."""

LEAST = 0.1
"""Smallest log ratio of slow to fast for two states."""

TWO_STATES = 0.15
"""Largest share of squares within two states; an even spread that is cut in two has 0.25."""


@dataclass(frozen=True, slots=True)
class TwoStates:
    """Load with an on state, which multiplies the speed by ``factor``, and an off state.

    ``on_s`` and ``off_s`` are mean durations [s]; ``on`` and ``off`` count the observed ends of each state.
    """

    factor: float
    on_s: float
    off_s: float
    on: int
    off: int


@dataclass(frozen=True, slots=True)
class LoadFound:
    """Load found in a series.

    Args:
        slowness: divisor of each point's time that removes the load, float64 [points].
        clean: points with a reliably known load, bool [points].
        pieces: trace of the speed; empty if two states describe the load.
    """

    slowness: Floats
    clean: NDArray[np.bool_]
    states: TwoStates | None = None
    pieces: tuple[Piece, ...] = ()


def find_load(stretches: Sequence[Stretch], ratios: Floats) -> LoadFound:
    """Detect load by other processes in points of ascending time: none, two lasting states, or a general trace.

    Neighbouring points of pure jitter are uncorrelated; under load they are correlated, because load lasts. If two
    levels explain nearly all of the load, it is a two-state Markov chain, else a trace. ``ratios`` are the times over
    the idle machine's, float64 [points].
    """
    count, logs = len(ratios), np.log(ratios)
    idle = LoadFound(np.ones(count), np.ones(count, dtype=np.bool_))
    centred = logs - logs.mean()
    squares = float(centred @ centred)
    if count < FEWEST or squares < count * 1e-6 or float(centred[1:] @ centred[:-1]) / squares < 2 / count**0.5:
        return idle
    slow = logs > _cut(np.sort(logs))
    # A point next to a change contains both states.
    changes = slow[1:] != slow[:-1]
    clean = ~(np.append(changes, False) | np.insert(changes, 0, False))
    if not ((clean & slow).any() and (clean & ~slow).any()):
        clean = idle.clean
    levels = np.where(slow, np.median(logs[clean & slow]), np.median(logs[clean & ~slow]))
    known = logs[clean]
    within = float(np.sum((known - levels[clean]) ** 2))
    if within < TWO_STATES * float(np.sum((known - known.mean()) ** 2)) and np.ptp(levels) > LEAST:
        return _two_states(stretches, slow, clean, float(np.ptp(levels)))
    return _trace(stretches, ratios)


def _cut(ordered: Floats) -> float:
    """Return the cut between two groups with the least squares within the groups."""
    count = np.arange(1, len(ordered))
    left, right = np.cumsum(ordered)[:-1], np.cumsum(ordered[::-1])[:-1][::-1]
    between = left**2 / count + right**2 / (len(ordered) - count)
    at = int(np.argmax(between))
    return float(ordered[at] + ordered[at + 1]) / 2


def _two_states(
    stretches: Sequence[Stretch], slow: NDArray[np.bool_], clean: NDArray[np.bool_], gap: float
) -> LoadFound:
    ends = [each.at_s + each.steps * each.step_s for each in stretches]
    begins = [each.at_s for each in stretches]
    edges = np.array([begins[0], *((e + b) / 2 for e, b in zip(ends[:-1], begins[1:], strict=True)), ends[-1]])
    seconds = np.diff(edges)
    on = int(np.sum(slow[:-1] & ~slow[1:]))
    off = int(np.sum(~slow[:-1] & slow[1:]))
    on_s, off_s = float(seconds[slow].sum()) / max(on, 1), float(seconds[~slow].sum()) / max(off, 1)
    slowness = np.where(slow, math.exp(gap), 1.0)
    return LoadFound(slowness, clean, TwoStates(math.exp(-gap), max(on_s, 1e-3), max(off_s, 1e-3), on, off))


def _trace(stretches: Sequence[Stretch], ratios: Floats) -> LoadFound:
    orders = np.array([each.order for each in stretches])
    weights = np.array([each.steps for each in stretches])
    slowness, pieces = np.ones(len(ratios)), list[Piece]()
    for number in np.unique(orders):
        these = orders == number
        slowness[these] = np.average(ratios[these], weights=weights[these])
        at_s = stretches[int(np.argmax(these))].at_s
        if not pieces or at_s > pieces[-1][0]:
            pieces.append((at_s, float(1 / slowness[these][0])))
    return LoadFound(slowness, np.ones(len(ratios), dtype=np.bool_), None, tuple(pieces))


LEAST_CHANGE = 0.02
"""Smallest change of the log batch between consecutive orders that tells of the curve."""

FEWEST_CHANGES = 3
"""Smallest number of such pairs for a curve other than a line through the origin."""

MANY_CHANGES = 8
SIMPLER, FEW_SIMPLER = 0.5, 0.1
"""Largest mean error of a richer curve over the simpler curve's, with `MANY_CHANGES` pairs and with fewer."""

EXACT = 0.002
"""Mean error, as a logarithm, below which a curve is not refined."""

_FASTEST, _MOST_JITTER = 1e9, 2.0


@dataclass(frozen=True, slots=True)
class SiloFit:
    """Fitted machine of one silo.

    Args:
        config: its entry in the silo file, without a trace.
        speed_error: relative standard error of the speed.
        overheads: mean seconds of an order by kind.
        overhead_error: standard error of their sum, without transfers [s].
    """

    config: SiloConfig
    orders: int
    speed_error: float
    overheads: Mapping[str, float]
    overhead_error: float
    states: TwoStates | None = None
    pieces: tuple[Piece, ...] = ()
    crashes: int = 0

    @property
    def load(self) -> str:
        if self.states is not None:
            return f"x {self.states.factor:.2f} for {self.states.on_s:.3g} s, then {self.states.off_s:.3g} s without"
        return f"a trace of {len(self.pieces)} pieces" if self.pieces else "-"


@dataclass(frozen=True, slots=True)
class _Speed:
    curve: Curve
    jitter: float
    error: float
    load: LoadFound


def fit_silos(record: RunRecord) -> tuple[SiloFit, ...]:
    """Fit every silo that trained; raises `FedSyncError` if a silo's reports fit no machine."""
    fits = []
    for name, silo in record.silos.items():
        if silo.stretches:
            try:
                fits.append(_fit(name, silo, record))
            except ValidationError as error:
                first = error.errors()[0]
                where = ".".join(map(str, first["loc"]))
                raise FedSyncError(f"silo {name!r} fits no machine: {where}: {first['msg']}") from error
    return tuple(fits)


def _fit(name: str, silo: SiloRecord, record: RunRecord) -> SiloFit:
    speed = _fit_speed(silo.stretches)
    plain: dict[str, Any] = {"name": name, "speed": min(speed.curve.speed, _FASTEST), "jitter": speed.jitter}
    if speed.curve.launch_s or speed.curve.saturation:
        plain["curve"] = {
            "kind": "affine",
            "launch_s": speed.curve.launch_s,
            "saturation": round(speed.curve.saturation),
        }
    plain |= _line(silo)
    mean, error, kinds = _overhead(silo, transfers="bandwidth_mbps" in plain)
    plain |= {"overhead_s": mean, "examples": silo.facts.examples, "memory_samples": silo.facts.memory_samples}
    if name in record.emulated:
        plain |= {"node_config": record.emulated[name].node_config, "data": record.emulated[name].data}
    if record.runtime == "virtual":
        plain["joins_at_s"] = silo.joined_s
    states, pieces = speed.load.states, speed.load.pieces
    if states is not None:
        plain["contention"] = {"kind": "markov", "factor": states.factor, "on_s": states.on_s, "off_s": states.off_s}
    plain |= _presence(silo)
    config = SiloConfig.model_validate(plain)
    return SiloFit(config, len(silo.overheads), speed.error, kinds, error, states, pieces, len(silo.ups))


def _fit_speed(stretches: Sequence[Stretch]) -> _Speed:
    times = np.array([each.step_s for each in stretches])
    batches = np.array([each.batch for each in stretches])
    steps = np.array([each.steps for each in stretches])
    curve = _shape(batches, times)
    curve = curve.scaled(float(np.sum(steps * times) / np.sum(steps * [curve.step_s(batch) for batch in batches])))
    shape = curve.launch_s + np.maximum(batches, curve.saturation) / curve.speed
    load = find_load(stretches, times / shape)
    clean = load.clean
    ratios = (times / (shape * load.slowness))[clean]
    weights = steps[clean]
    level = float(np.average(ratios, weights=weights))
    variance = float(np.sum(weights * (ratios / level - 1) ** 2)) / max(len(ratios) - 1, 1)
    jitter = min(math.sqrt(math.log1p(variance)), _MOST_JITTER) if variance > 1e-10 else 0.0
    # A machine's curve describes the median step, but the measured level is a mean.
    curve = curve.scaled(level / math.exp(jitter**2 / 2))
    if load.pieces:
        held = [(max(at_s, 0.0), min(factor, MOST_FACTOR)) for at_s, factor in load.pieces]
        load = LoadFound(load.slowness, load.clean, None, ((0.0, held[0][1]), *(p for p in held[1:] if p[0] > 0)))
    return _Speed(curve, jitter, math.sqrt(variance / float(weights.sum())), load)


def _shape(batches: Floats, times: Floats) -> Curve:
    """Fit the shape of step time over batch, without its level, to consecutive orders of different sizes.

    Load lasts from one order to the next, and balancers react to load with other sizes. So the fit uses changes of time
    at changes of size. A richer shape must explain far more than the simplest one.
    """
    changed = np.abs(np.diff(np.log(batches))) > LEAST_CHANGE
    if changed.sum() < FEWEST_CHANGES:
        return Curve(1.0)
    largest, gone = float(batches.max()), np.diff(np.log(times))[changed]

    def loss(curve: Curve) -> float:
        steps = curve.launch_s + np.maximum(batches, curve.saturation) / curve.speed
        return float(np.abs(gone - np.diff(np.log(steps))[changed]).mean())

    def affine(shares: Floats) -> tuple[float, float]:
        return min((loss(Curve(1 / (1 - share), share * largest)), float(share)) for share in shares)

    simpler = FEW_SIMPLER if changed.sum() < MANY_CHANGES else SIMPLER
    best, unexplained = Curve(1.0), loss(Curve(1.0))
    # Fixed share of a step's time at the largest batch.
    _, share = affine(np.linspace(0.02, 0.98, 97))
    found, share = affine(np.linspace(share - 0.01, share + 0.01, 101))
    if unexplained > EXACT and found < simpler * unexplained:
        best, unexplained = Curve(1 / (1 - share), share * largest), found
    bends = np.unique(batches)[1:-1]
    for bend in bends[:: max(len(bends) // 16, 1)]:
        bent = Curve(1.0, 0.0, float(bend))
        if unexplained > EXACT and loss(bent) < simpler / 2 * unexplained:
            best, unexplained = bent, loss(bent)
    return best


def _overhead(silo: SiloRecord, *, transfers: bool) -> tuple[float, float, dict[str, float]]:
    """Return mean, standard error and kinds of the overhead; transfers are excluded if the machine has a bandwidth."""
    later = silo.overheads[1:] or silo.overheads
    kinds = {kind: fmean(each.get(kind, 0.0) for each in later) for kind in sorted({k for each in later for k in each})}
    kinds = {kind: mean for kind, mean in kinds.items() if mean > 1e-9}
    sums = [sum(s for kind, s in each.items() if not (transfers and kind == TRANSFER)) for each in later]
    error = stdev(sums) / math.sqrt(len(sums)) if len(sums) > 1 else 0.0
    mean = fmean(sums)
    return (mean if mean > 1e-9 else 0.0), error, kinds


def _line(silo: SiloRecord) -> dict[str, float]:
    seconds = np.array([each.get(TRANSFER, 0.0) for each in silo.overheads])
    sizes = np.array(silo.sizes, dtype=np.float64)
    if seconds.max() <= 0 or sizes.max() <= 0:
        return {}
    slope, latency_s = float(seconds.sum() / sizes.sum()), 0.0
    if sizes.max() > 1.2 * sizes.min():
        fitted, constant = np.polyfit(sizes, seconds, 1)
        if fitted > 0 and constant >= 0:
            slope, latency_s = float(fitted), float(constant) / 2
    return {"bandwidth_mbps": 8e-6 / slope, "latency_s": latency_s if latency_s > 1e-6 else 0.0}


def _presence(silo: SiloRecord) -> dict[str, Any]:
    if not silo.ups:
        return {}
    if not silo.downs and silo.lost_s is not None:
        return {"leaves_at_s": silo.lost_s}
    last_s = 0.0 if silo.here_s is None else silo.stretches[-1].at_s - silo.here_s
    up_s = sum(silo.ups) + max(last_s, 0.0)
    return {"crashes": {"mtbf_s": up_s / len(silo.ups), "repair_s": fmean(silo.downs)}}
