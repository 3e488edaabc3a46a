"""Twin of a federation: simulation of strategies on machines fitted to a real run, with confidence intervals.

Fitted parameters are uncertain. So each draw has other parameters, within their errors, and other load, jitter, crashes
and trace offsets. The overhead of an order is known only for the strategy that ran: real silos share a server,
and another strategy makes more or fewer silos arrive at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from fedsync.common.errors import RunError
from fedsync.common.files import write_result
from fedsync.common.rng import Stream, generator
from fedsync.config.cipher import PlainConfig
from fedsync.config.cluster import ClusterConfig, CrashesConfig, MarkovConfig, SiloConfig
from fedsync.config.sections.evaluation import EvaluationConfig, StopConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.tuning.fit import SiloFit, fit_silos
from fedsync.extras.tuning.records import RunRecord, seconds_a_round
from fedsync.observe.ledger import Ledger
from fedsync.simulation.machine import Piece
from fedsync.simulation.timing_only import run_timing

DRAWS = 10
"""Number of replays of a strategy."""

STUDENT = {3: 2.920, 10: 1.833}
"""95 % quantile of Student's t by number of values: two tails together leave out a tenth."""

LEAST_HALF, LEAST_HALF_REAL = 0.01, 0.03
"""Smallest half width of an interval, as a share, on virtual and real machines: outputs are rounded, fits inexact."""

OVERHEAD_SPREAD = 0.67
"""Standard deviation of a real federation's overhead between strategies, as a logarithm: nine in ten have from a third
to three times as much. Chosen on runs of `bench/papers/foretold.py`, with five silos, concurrent or in turn."""

MOST_ROUNDS = 40
"""Limit of a replay's rounds, as a multiple of the fitted run's rounds."""

_TRACE_ROWS, _TRACE_LENGTHS = 5000, 20


@dataclass(frozen=True, slots=True)
class Interval:
    """Positive number with a 90 % interval for one more draw."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float], wider: float = 0.0, least: float = LEAST_HALF) -> Interval:
        """Return Student's interval of the logarithms of positive ``values``; their number is a key of `STUDENT`.

        The half width is at least ``least``; then ``wider`` is added; both are logarithms.
        """
        logs, count = [math.log(value) for value in values], len(values)
        half = max(STUDENT[count] * stdev(logs) * math.sqrt(1 + 1 / count), least) + wider
        centre = fmean(logs)
        return cls(fmean(values), math.exp(centre - half), math.exp(centre + half))

    def misses(self, value: float) -> float:
        """Return the distance of a value from the interval, as a logarithm; 0 inside."""
        return max(math.log(self.low / value), math.log(value / self.high), 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True)
class Predicted:
    """Prediction of a strategy on the twin: time between commits [s], and throughput of all silos [samples/s]."""

    round_s: Interval
    samples_a_second: float


@dataclass(frozen=True, slots=True)
class MapPlace:
    """Place of a federation on the map of docs/benchmarks/map.md, at the batch size and the local steps of its run.

    Args:
        spread: time of a local step of the slowest silo over that of the fastest.
        overhead: mean overhead of an order over the time of a local step of the slowest silo.
        bound: seconds of a round with perfect balance over those with equal batches, if steps are linear in samples.
    """

    spread: float
    overhead: float
    bound: float

    @classmethod
    def of(cls, fits: tuple[SiloFit, ...], batch_size: int, steps: int) -> MapPlace:
        seconds = [fit.config.build_curve().step_s(batch_size) for fit in fits]
        overhead = fmean(sum(fit.overheads.values()) for fit in fits) / max(seconds)
        balanced = 1 / fmean(1 / each for each in seconds) / max(seconds)
        return cls(max(seconds) / min(seconds), overhead, (steps * balanced + overhead) / (steps + overhead))

    def __str__(self) -> str:
        return (
            f"On the map (docs/benchmarks/map.md): speeds 1 to {self.spread:.2g}, overhead {self.overhead:.2g} of the "
            f"slowest silo's step; a round with perfect balance takes {self.bound:.2f} of one with equal batches"
        )


@dataclass(frozen=True, slots=True)
class Twin:
    """Fitted federation.

    Args:
        actual_s: seconds a round of the run, or None.
        horizon_s: duration of the run [s].
        spread: see `OVERHEAD_SPREAD`; 0 if silos share nothing.
        wider: extra half width of intervals: the distance between the run's actual time and its predicted interval.
    """

    fits: tuple[SiloFit, ...]
    config: StrategyConfig
    model_bytes: int
    actual_s: float | None
    horizon_s: float
    rounds: int
    spread: float = 0.0
    wider: float = 0.0

    @classmethod
    def of(cls, record: RunRecord) -> Twin:
        """Fit the twin of a run's federation; raises `FedSyncError` if a silo's reports fit no machine."""
        rounds = record.rounds
        actual_s, horizon_s = seconds_a_round(rounds), rounds[-1].at_s
        spread = 0.0 if record.runtime == "virtual" else OVERHEAD_SPREAD
        return cls(fit_silos(record), record.config, record.model_bytes, actual_s, horizon_s, len(rounds), spread)

    def checked(self) -> tuple[Twin, Predicted]:
        """Replay the run's strategy; return a twin with intervals widened by the error, and the prediction."""
        replayed = replace(self, spread=0.0).predict(self.config)
        missed = 0.0 if self.actual_s is None else replayed.round_s.misses(self.actual_s)
        return replace(self, wider=missed), replayed

    def predict(self, config: StrategyConfig) -> Predicted:
        """Replay a strategy without training, for the run's duration or two longer rounds; raises as `run_timing`."""
        seconds, samples = [], []
        for draw in range(DRAWS):
            kept = self._replayed(config, draw, StopConfig(seconds=self.horizon_s, rounds=self.rounds * MOST_ROUNDS))
            if len(kept.ledger.rounds) < 2:
                with suppress(RunError):  # silos that left at the end of the run are away
                    kept = self._replayed(config, draw, StopConfig(seconds=self.horizon_s * MOST_ROUNDS, rounds=2))
            rounds = kept.ledger.rounds
            end_s = max(rounds[-1].at_s if rounds else self.horizon_s, 1e-9)
            seconds.append(max(seconds_a_round(rounds) or end_s, 1e-9))
            samples.append(kept.samples / end_s)
        return Predicted(self.interval(seconds), fmean(samples))

    def _replayed(self, config: StrategyConfig, draw: int, stop: StopConfig) -> _Kept:
        quiet = {"cipher": PlainConfig(kind="plain"), "stop": stop, "evaluation": EvaluationConfig(), "export": None}
        timed, kept = config.model_copy(update={**quiet, "seed": config.seed + 1 + draw}), _Kept()
        with TemporaryDirectory(prefix="fedsync-twin-") as folder:
            cluster, out = self.cluster(Path(folder), draw), Path(folder)
            run_timing(timed, cluster, out, listeners=[kept], model_bytes=self.model_bytes, journal=False)
        return kept

    def interval(self, seconds: list[float]) -> Interval:
        return Interval.of(seconds, self.wider, LEAST_HALF_REAL if self.spread else LEAST_HALF)

    def cluster(self, folder: Path, draw: int | None = None) -> ClusterConfig:
        silos = []
        for fit in self.fits:
            drawn, pieces = (fit.config, fit.pieces) if draw is None else _drawn(fit, self, draw)
            if pieces:
                path = folder / f"{drawn.name}.csv"
                write_trace(path, _repeated(pieces, self.horizon_s))
                drawn = drawn.model_copy(update={"trace": str(path)})
            silos.append(drawn)
        return ClusterConfig(silos=silos)

    def write(self, path: Path) -> list[Path]:
        files, entries = [path], []
        for fit in self.fits:
            plain = fit.config.model_dump(mode="json", exclude_defaults=True)
            if fit.pieces:
                trace = path.with_name(f"{path.stem}-{fit.config.name}.csv")
                write_trace(trace, _repeated(fit.pieces, self.horizon_s))
                plain["trace"] = trace.name
                files.append(trace)
            entries.append({key: value if key == "node_config" else _rounded(value) for key, value in plain.items()})
        write_result(path, yaml.safe_dump({"silos": entries}, sort_keys=False).encode())
        return files


class _Kept:
    """Listener that keeps the ledger of a run, and the number of samples at its last commit."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.samples = 0
        self._rounds = 0

    def follow(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if len(ledger.rounds) > self._rounds:
            self._rounds = len(ledger.rounds)
            self.samples = sum(silo.samples for silo in ledger.silos.values())


def write_trace(path: Path, pieces: Iterable[Piece]) -> None:
    lines = ["seconds,factor", *(f"{at_s:.6f},{factor:.6g}" for at_s, factor in pieces)]
    write_result(path, ("\n".join(lines) + "\n").encode())


def _drawn(fit: SiloFit, twin: Twin, draw: int) -> tuple[SiloConfig, tuple[Piece, ...]]:
    random, of_all = generator(draw, Stream.TWIN, fit.config.name), generator(draw, Stream.TWIN)
    config = fit.config
    # One trace offset for all silos, because a shared machine may slow them; one overhead factor, for the shared
    # server.
    by_s = float(of_all.uniform(0.0, twin.horizon_s))
    busy = math.exp(of_all.normal(0.0, twin.spread))
    changes: dict[str, Any] = {
        "speed": min(config.speed * math.exp(random.normal(0.0, fit.speed_error)), 1e9),
        "overhead_s": max(config.overhead_s + random.normal(0.0, fit.overhead_error), 0.0) * busy,
    }

    def mean_s(found_s: float, times: int) -> float:
        """Draw the mean of exponential times, of which ``times`` were observed."""
        return found_s * (times + 1) / float(random.gamma(times + 1))

    if isinstance(config.contention, MarkovConfig) and fit.states is not None:
        changes["contention"] = config.contention.model_copy(
            update={"on_s": mean_s(fit.states.on_s, fit.states.on), "off_s": mean_s(fit.states.off_s, fit.states.off)}
        )
    if config.crashes is not None:
        mtbf_s = mean_s(config.crashes.mtbf_s, fit.crashes)
        changes["crashes"] = CrashesConfig(mtbf_s=mtbf_s, repair_s=mean_s(config.crashes.repair_s, fit.crashes))
    pieces = _turned(fit.pieces, twin.horizon_s, by_s) if fit.pieces else ()
    return config.model_copy(update=changes), pieces


def _turned(pieces: tuple[Piece, ...], length_s: float, by_s: float) -> tuple[Piece, ...]:
    holds = [factor for at_s, factor in pieces if at_s <= by_s][-1]
    later = [(at_s - by_s, factor) for at_s, factor in pieces if by_s < at_s < length_s]
    earlier = [(at_s + length_s - by_s, factor) for at_s, factor in pieces if at_s < by_s]
    return ((0.0, holds), *later, *earlier)


def _repeated(pieces: tuple[Piece, ...], length_s: float) -> Iterator[Piece]:
    length_s = max(length_s, pieces[-1][0] + 1e-3)
    times = max(min(_TRACE_LENGTHS, _TRACE_ROWS // len(pieces)), 1)
    last_s = -1.0
    for number in range(times):
        for at_s, factor in pieces:
            now_s = round(number * length_s + at_s, 6)
            if now_s > last_s:
                yield now_s, factor
                last_s = now_s


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) and np.isfinite(value) else value
