"""What a fitted federation would do: strategies replayed on it in virtual time, several times, with an interval.

What was fitted is not known exactly. So each draw has other parameters, within their errors, other load, jitter and
crashes, and traces that begin elsewhere. What an order costs besides training is known of the strategy that ran alone:
real silos share a server, and another strategy has more or fewer of them come at the same moment.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean, stdev
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import yaml

from fedsync.common.files import write_result
from fedsync.common.rng import Stream, generator
from fedsync.config.cipher import PlainConfig
from fedsync.config.cluster import ClusterConfig, CrashesConfig, MarkovConfig, SiloConfig
from fedsync.config.sections.evaluation import EvaluationConfig
from fedsync.config.sections.stop import StopConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.ledger import Ledger
from fedsync.simulation.load import Piece
from fedsync.simulation.timing_only import run_timing
from fedsync.simulation.twin.fit import SiloFit, fit_silos
from fedsync.simulation.twin.records import RunRecord, seconds_a_round

DRAWS = 10
"""Times that a strategy is replayed."""

STUDENT = {3: 2.920, 10: 1.833}
"""95 % quantile of Student's t by number of values: both ends together leave out a tenth."""

LEAST_HALF, LEAST_HALF_REAL = 0.01, 0.03
"""Of an interval, as a share: what is written is rounded, and no machine is known better; real ones less well."""

OVERHEAD_SPREAD = 0.67
"""Standard deviation of a real federation's overhead from strategy to strategy, as a logarithm: nine in ten have from a
third to three times as much. Chosen on runs of `bench/papers/foretold.py`: five silos there, at once or by turns."""

MOST_ROUNDS = 40
"""For each round of the run that was fitted, before a replay ends."""

_TRACE_ROWS, _TRACE_LENGTHS = 5000, 20


@dataclass(frozen=True, slots=True)
class Interval:
    """A positive number with a 90 % interval for one more draw."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: list[float], wider: float = 0.0, least: float = LEAST_HALF) -> Interval:
        """Student's, of the logarithms.

        Args:
            values: positive, as many as `STUDENT` has.
            wider: added to the half width, as a logarithm.
            least: half width that it has at least, without that.
        """
        logs, count = [math.log(value) for value in values], len(values)
        half = max(STUDENT[count] * stdev(logs) * math.sqrt(1 + 1 / count), least) + wider
        centre = fmean(logs)
        return cls(fmean(values), math.exp(centre - half), math.exp(centre + half))

    def misses(self, value: float) -> float:
        """How far a value lies outside, as a logarithm; 0 inside."""
        return max(math.log(self.low / value), math.log(value / self.high), 0.0)

    def __str__(self) -> str:
        return f"{self.mean:.3g} ({self.low:.3g} to {self.high:.3g})"


@dataclass(frozen=True, slots=True)
class Predicted:
    """What a strategy would do on the twin.

    Args:
        round_s: seconds from one commit to the next.
        samples_a_second: that all silos process together.
    """

    round_s: Interval
    samples_a_second: float


@dataclass(frozen=True, slots=True)
class Twin:
    """A fitted federation.

    Args:
        fits: of all silos.
        config: of the strategy that ran.
        model_bytes: size of the model.
        actual_s: seconds a round of the run.
        horizon_s: how long it ran.
        rounds: how many it had.
        spread: see `OVERHEAD_SPREAD`; 0 where nobody shares anything.
        wider: what intervals are wider by: by how much the run itself lay outside its own.
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
        """The twin of the federation of a run.

        Raises:
            FedSyncError: what a silo reports fits no machine.
        """
        rounds = record.rounds
        actual_s, horizon_s = seconds_a_round(rounds), rounds[-1].at_s
        spread = 0.0 if record.runtime == "virtual" else OVERHEAD_SPREAD
        return cls(fit_silos(record), record.config, record.model_bytes, actual_s, horizon_s, len(rounds), spread)

    def checked(self) -> tuple[Twin, Predicted]:
        """The run's own strategy replayed, and the twin whose intervals know how far off that is.

        Raises:
            RunError: it makes no progress on the twin.
        """
        replayed = replace(self, spread=0.0).predict(self.config)
        missed = 0.0 if self.actual_s is None else replayed.round_s.misses(self.actual_s)
        return replace(self, wider=missed), replayed

    def predict(self, config: StrategyConfig) -> Predicted:
        """Replay a strategy without training, for as long as the run took.

        Raises:
            RunError: it makes no progress on the twin.
            ConfigError: strategy and silos do not fit together.
        """
        stop = StopConfig(seconds=self.horizon_s, rounds=self.rounds * MOST_ROUNDS)
        quiet = {"cipher": PlainConfig(kind="plain"), "stop": stop, "evaluation": EvaluationConfig(), "export": None}
        seconds, samples = [], []
        for draw in range(DRAWS):
            with TemporaryDirectory(prefix="fedsync-twin-") as folder:
                timed = config.model_copy(update={**quiet, "seed": config.seed + 1 + draw})
                kept = _Kept()
                cluster = self.cluster(Path(folder), draw)
                summary = run_timing(
                    timed, cluster, Path(folder), listeners=[kept], model_bytes=self.model_bytes, journal=False
                )
            rounds = kept.ledger.rounds
            mean_s = seconds_a_round(rounds) or (rounds[0].at_s if rounds else summary["seconds"])
            seconds.append(max(mean_s, 1e-9))
            samples.append(kept.samples / max(rounds[-1].at_s if rounds else summary["seconds"], 1e-9))
        return Predicted(self.interval(seconds), fmean(samples))

    def interval(self, seconds: list[float]) -> Interval:
        """Of what was found in some draws."""
        return Interval.of(seconds, self.wider, LEAST_HALF_REAL if self.spread else LEAST_HALF)

    def cluster(self, folder: Path, draw: int | None = None) -> ClusterConfig:
        """The machines, their traces in files of a folder.

        Args:
            folder: for traces.
            draw: number of a draw within the errors of the fit; None has the machines as fitted.
        """
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
        """Write the silo file, and its traces beside it; returns all files."""
        files, entries = [path], []
        for fit in self.fits:
            plain = fit.config.model_dump(mode="json", exclude_defaults=True)
            if fit.pieces:
                trace = path.with_name(f"{path.stem}-{fit.config.name}.csv")
                write_trace(trace, _repeated(fit.pieces, self.horizon_s))
                plain["trace"] = trace.name
                files.append(trace)
            entries.append({key: _rounded(value) for key, value in plain.items()})
        write_result(path, yaml.safe_dump({"silos": entries}, sort_keys=False).encode())
        return files


class _Kept:
    """Keeps the books of a run, and how many samples there were by its last commit."""

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
    """A CSV file as silo files name it."""
    lines = ["seconds,factor", *(f"{at_s:.6f},{factor:.6g}" for at_s, factor in pieces)]
    write_result(path, ("\n".join(lines) + "\n").encode())


def _drawn(fit: SiloFit, twin: Twin, draw: int) -> tuple[SiloConfig, tuple[Piece, ...]]:
    random, of_all = generator(draw, Stream.TWIN, fit.config.name), generator(draw, Stream.TWIN)
    config = fit.config
    # By the same time for all silos, as what slows them may be one machine; and one server is busy for all.
    by_s = float(of_all.uniform(0.0, twin.horizon_s))
    busy = math.exp(of_all.normal(0.0, twin.spread))
    changes: dict[str, Any] = {
        "speed": min(config.speed * math.exp(random.normal(0.0, fit.speed_error)), 1e9),
        "overhead_s": max(config.overhead_s + random.normal(0.0, fit.overhead_error), 0.0) * busy,
    }

    def mean_s(found_s: float, times: int) -> float:
        """Of exponential times, of which so many were seen."""
        return found_s * (times + 1) / float(random.gamma(times + 1))

    if isinstance(config.contention, MarkovConfig) and fit.states is not None:
        changes["contention"] = config.contention.model_copy(
            update={
                "on_s": mean_s(fit.states.on_s, fit.states.on),
                "off_s": mean_s(fit.states.off_s, fit.states.off),
            }
        )
    if config.crashes is not None:
        mtbf_s = mean_s(config.crashes.mtbf_s, fit.crashes)
        changes["crashes"] = CrashesConfig(mtbf_s=mtbf_s, repair_s=mean_s(config.crashes.repair_s, fit.crashes))
    pieces = _turned(fit.pieces, twin.horizon_s, by_s) if fit.pieces else ()
    return config.model_copy(update=changes), pieces


def _turned(pieces: tuple[Piece, ...], length_s: float, by_s: float) -> tuple[Piece, ...]:
    """The same load, begun elsewhere: what came before comes after."""
    holds = [factor for at_s, factor in pieces if at_s <= by_s][-1]
    later = [(at_s - by_s, factor) for at_s, factor in pieces if by_s < at_s < length_s]
    earlier = [(at_s + length_s - by_s, factor) for at_s, factor in pieces if at_s < by_s]
    return ((0.0, holds), *later, *earlier)


def _repeated(pieces: tuple[Piece, ...], length_s: float) -> Iterator[Piece]:
    """Again and again, as nobody knows what comes later."""
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
    """To four digits: more were not measured."""
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.4g}") if isinstance(value, float) and np.isfinite(value) else value
