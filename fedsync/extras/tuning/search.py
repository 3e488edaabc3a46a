"""Search for a good strategy on a federation's twin (fitted simulation), by time to a target or by throughput.

With training, the search is successive halving: all candidates get a short time, the best third gets three times as
much, and so on, until few are left. The finalists are simulated to the target several times, each on another random
draw. A candidate is better if it reaches the target earlier or, without reaching the target, a better accuracy.

Source: successive halving, Jamieson and Talwalkar 2016.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import yaml
from pydantic import ValidationError

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.locate import shipped_folder
from fedsync.config.sections.evaluation import StopConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.tuning.twin import MOST_ROUNDS, Interval, Predicted, Twin

KEEP = 3
"""Reduction factor: one of ``KEEP`` candidates continues, with ``KEEP`` times the time."""

FINALISTS, FINAL_DRAWS = 3, 3

FIRST_PART = 0.25
"""Share of the run's time that each candidate gets in the first rung."""

_OF_THE_RUN = (
    *("seed", "stop", "task", "model", "evaluation", "train_config", "evaluate_config", "on_round", "initial_model"),
    *("fraction_evaluate", "min_silos", "most_examples", "silos", "waiting", "cipher", "wire"),
    *("privacy", "on_lost_silo", "export", "extensions"),
)

_PLAYED = {"privacy": None, "on_lost_silo": "warn", "export": None, "extensions": None}
"""Changes of a candidate while it is played: fitted machines have no budgets, and a user's extensions may notify."""

Trains = Callable[[StrategyConfig, ClusterConfig, Path], dict[str, Any]]
"""Plays a strategy with training and returns the summary."""

Watch = Callable[[str], None]
"""Receives progress messages."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """Candidate configuration of a run; ``interval_s`` is the duration of its rounds, if these are fixed."""

    strategy: str
    steps: int
    interval_s: float | None
    optimizer: str
    config: StrategyConfig

    def __str__(self) -> str:
        interval = "" if self.interval_s is None else f", rounds of {self.interval_s:.3g} s"
        return f"{self.strategy}, {self.steps} steps{interval}{self.optimizer and ', ' + self.optimizer}"


@dataclass(frozen=True, slots=True)
class Ranked:
    """Result of a candidate.

    Args:
        predicted: prediction without training, if made.
        seconds: time to the target [s]; None if a draw missed the target, or the candidate is no finalist.
        accuracy: last accuracy; None without training.
        once_s: time to the target in the last simulation, if reached [s].
    """

    candidate: Candidate
    predicted: Predicted | None = None
    seconds: Interval | None = None
    accuracy: float | None = None
    once_s: float | None = None
    problem: str = ""


def shipped() -> list[str]:
    names = sorted(path.stem for path in shipped_folder().glob("*.yaml"))
    return [name for name in names if StrategyConfig.load(name).cipher.kind == "plain"]


def candidates(
    twin: Twin, base: StrategyConfig, names: Iterable[str], steps: Sequence[int], optimizers: Sequence[str]
) -> tuple[list[Candidate], list[str]]:
    """Return all valid combinations of strategy, steps and server optimizer, and the reasons against the others.

    Task, data, cipher, privacy, seed and stop rules come from ``base``. A fixed round interval becomes the median
    silo's time for the steps, and a barrier's bounds of steps change in proportion to the steps.
    """
    found, left = list[Candidate](), list[str]()
    for name in names:
        own = StrategyConfig.load(name)
        for tau in steps:
            for optimizer in optimizers:
                try:
                    found.append(_candidate(twin, base, own.model_dump(mode="json"), name, tau, optimizer))
                except ValidationError as error:
                    left.append(f"{name}: {error.errors()[0]['msg'].removeprefix('Value error, ')}")
    return found, list(dict.fromkeys(left))


def _candidate(
    twin: Twin, base: StrategyConfig, own: dict[str, Any], name: str, steps: int, optimizer: str
) -> Candidate:
    of_run = base.model_dump(mode="json")
    proximal = 0.0 if base.task.own_loop else own["local"]["proximal"]
    data = {
        **own,
        **{key: of_run[key] for key in _OF_THE_RUN if key in of_run},
        "local": {**of_run["local"], "steps": steps, "proximal": proximal},
        "name": f"{Path(name).stem}-tuned",
        "plugin": own["plugin"] or of_run["plugin"],
    }
    if optimizer:
        data["server_optimizer"] = {"kind": optimizer}
    barrier, interval_s = own["barrier"], None
    while "inner" in barrier:
        barrier = barrier["inner"]
    for key in {"lookahead", "floor", "min_steps", "max_steps"} & barrier.keys():
        barrier[key] = barrier[key] and max(round(barrier[key] * steps / own["local"]["steps"]), 1)
    if isinstance(barrier.get("interval"), dict) and barrier["interval"].get("kind") == "fixed":
        times = (
            fit.config.build_curve().step_s(base.local.batch_size) * steps + fit.config.overhead_s for fit in twin.fits
        )
        interval_s = float(f"{median(times):.3g}")
        barrier["interval"] = {"kind": "fixed", "interval_s": interval_s}
    return Candidate(name, steps, interval_s, optimizer, StrategyConfig.model_validate(data))


def by_throughput(twin: Twin, field: Sequence[Candidate], watch: Watch) -> list[Ranked]:
    """Rank without training: more samples a second are better. The value of a sample is not compared."""
    done = []
    for candidate in field:
        watch(str(candidate))
        try:
            done.append(Ranked(candidate, _predicted(twin, candidate)))
        except FedSyncError as error:
            done.append(Ranked(candidate, problem=str(error)))
    return sorted(done, key=lambda each: 0.0 if each.predicted is None else -each.predicted.samples_a_second)


def by_time_to(target: float, twin: Twin, field: Sequence[Candidate], train: Trains, watch: Watch) -> list[Ranked]:
    """Rank with training, by successive halving; the best first, and the candidates that failed last.

    Raises `FedSyncError` with the first reason if no candidate could be played, for example without data.
    """
    rung, budget_s, left, out = 0, FIRST_PART * twin.horizon_s, list(field), list[Ranked]()
    while True:
        played = []
        for number, candidate in enumerate(left, start=1):
            watch(f"{number} of {len(left)}, {budget_s:.0f} s each: {candidate}")
            played.append(_played(twin, candidate, target, budget_s, rung, train))
        played.sort(key=_order)
        if rung == 0 and all(one.problem for one in played):
            raise FedSyncError(played[0].problem)
        kept = max(len(left) // KEEP, FINALISTS)
        rung, budget_s = rung + 1, budget_s * KEEP
        left = [one.candidate for one in played[:kept] if not one.problem]
        out = [*played[len(left) :], *out]
        if len(played) <= FINALISTS or kept == FINALISTS:
            break
    finals = [_final(twin, candidate, target, max(budget_s, twin.horizon_s), train, watch) for candidate in left]
    finals.sort(key=lambda one: (one.seconds is None, one.seconds.mean if one.seconds else -(one.accuracy or 0.0)))
    return sorted(finals + out, key=lambda one: bool(one.problem))


def _order(one: Ranked) -> tuple[bool, bool, float]:
    return bool(one.problem), one.once_s is None, -(one.accuracy or 0.0) if one.once_s is None else one.once_s


def _played(twin: Twin, candidate: Candidate, target: float, budget_s: float, draw: int, train: Trains) -> Ranked:
    stop = StopConfig(seconds=budget_s, rounds=twin.rounds * MOST_ROUNDS, target_accuracy=target)
    config = candidate.config.model_copy(update={**_PLAYED, "stop": stop, "seed": candidate.config.seed + draw})
    with TemporaryDirectory(prefix="fedsync-twin-") as folder:
        try:
            summary = train(config, twin.cluster(Path(folder), draw), Path(folder))
        except FedSyncError as error:
            return Ranked(candidate, problem=str(error))
    return Ranked(candidate, accuracy=summary["accuracy"], once_s=summary["seconds_to_target"])


def _final(twin: Twin, candidate: Candidate, target: float, budget_s: float, train: Trains, watch: Watch) -> Ranked:
    times, last = [], Ranked(candidate)
    for draw in range(FINAL_DRAWS):
        watch(f"to the target, {draw + 1} of {FINAL_DRAWS}: {candidate}")
        last = _played(twin, candidate, target, budget_s, 100 + draw, train)
        if last.once_s is None:
            return last
        times.append(max(last.once_s, 1e-9))
    return replace(last, predicted=_predicted(twin, candidate), seconds=twin.interval(times))


def _predicted(twin: Twin, candidate: Candidate) -> Predicted:
    return twin.predict(candidate.config.model_copy(update=_PLAYED))


def strategy_file(best: Ranked, why: str) -> str:
    """Return the winner as a complete strategy file with a comment; raises `ConfigError` if it could not be played."""
    if best.problem:
        raise ConfigError("--apply", f"no candidate could be played: {best.problem}", "Name others by --strategies")
    config = best.candidate.config.model_dump(mode="json")
    comment = "".join(f"# {line}\n" for line in f"{best.candidate}\n{why}".splitlines())
    return comment + yaml.safe_dump(config, sort_keys=False)
