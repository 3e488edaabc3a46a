"""One run in virtual time until its objective falls to a target: shared by benches of the papers' workloads.

The objective is the mean loss on the silos' test samples. It suits k-means, mixtures and
networks alike, and does not jump as accuracy does.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.ledger import Ledger
from fedsync.observe.replay import read_ledger
from fedsync.observe.rounds import Round

DROP = 0.95
"""Share of a reference's whole decrease that makes the target."""
_NEWEST = 64


@dataclass(frozen=True)
class Job:
    """One run, at most ``seconds`` of virtual time.

    Args:
        key: what the run is, for whoever looks for it among others.
        strategy: file to start from.
        sets: changes to it.
        silos: entries of the silo file.
        seconds: virtual.
        target: objective that ends the run, or None.
        rounds: at most, or None.
    """

    key: tuple[str, ...]
    strategy: str
    sets: tuple[str, ...]
    silos: tuple[dict[str, Any], ...]
    seconds: float
    target: float | None = None
    rounds: int | None = None


class _ReachedError(Exception):
    """The run has done what it was for."""


class _Until:
    """Ends a run at the target, and keeps its books."""

    def __init__(self, target: float | None) -> None:
        self.target = target
        self.ledger = Ledger()

    def follow(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if self.target is not None and reached_s(curve(ledger, _NEWEST), self.target) is not None:
            raise _ReachedError


def curve(ledger: Ledger, newest: int = 0) -> list[tuple[float, float]]:
    """(virtual seconds, objective) of the versions evaluated; of the ``newest`` commits only, unless that is 0."""
    return [(row.at_s, row.test_loss) for row in ledger.rounds[-newest:] if row.test_loss is not None]


def reached_s(points: list[tuple[float, float]], target: float) -> float | None:
    """When the first version that is at the target or below was committed."""
    return next((at_s for at_s, loss in points if loss <= target), None)


def target_of(points: list[tuple[float, float]]) -> float:
    """What is left of the reference's decrease, from its first version to its last, is 1 - `DROP`."""
    first, last = points[0][1], points[-1][1]
    return last + (1 - DROP) * (first - last)


def retimed(row: dict[str, Any], job: Job) -> dict[str, Any]:
    """What `run` would have made of a row's rounds on the silos of ``job``.

    Where every order is of a fixed number of steps and all are waited for, the machines' speeds do not change what is
    learnt, only when: nothing needs to be trained again.
    """
    from fedsync.simulation.timing_only import run_timing

    config = StrategyConfig.load(job.strategy, [*job.sets, f"stop={{rounds: {len(row['curve'])}}}"])
    cluster = ClusterConfig.model_validate({"silos": list(job.silos)})
    with tempfile.TemporaryDirectory() as folder:
        summary = run_timing(config, cluster, Path(folder))
        rounds = read_ledger(Path(folder) / "journal.jsonl").rounds
    points = [(one.at_s, loss) for one, (_, loss) in zip(rounds, row["curve"], strict=True)]
    return row | _figures(points, rounds, summary, job) | {"key": list(job.key), "limit_s": job.seconds}


def run(job: Job) -> dict[str, Any]:
    """Its curve, and what it took to the target; ``seconds_to`` is None where it was not reached."""
    from fedsync.simulation.run import run_virtual

    stop = f"stop={{seconds: {job.seconds}}}" if job.rounds is None else f"stop={{rounds: {job.rounds}}}"
    until = _Until(job.target)
    row: dict[str, Any] = {"key": list(job.key), "limit_s": job.seconds}
    try:
        config = StrategyConfig.load(job.strategy, [*job.sets, stop])
        with tempfile.TemporaryDirectory() as folder:
            run_virtual(
                config, ClusterConfig.model_validate({"silos": list(job.silos)}), Path(folder), listeners=[until]
            )
    except _ReachedError:
        pass
    except FedSyncError as error:
        row |= {"failed": f"{type(error).__name__}: {error}"}
    return row | _figures(curve(until.ledger), until.ledger.rounds, until.ledger.summary(), job)


def _figures(
    points: list[tuple[float, float]], rounds: list[Round], summary: dict[str, Any], job: Job
) -> dict[str, Any]:
    """What both kinds of runs tell; not every version is evaluated, so points are fewer than rounds."""
    at_s = None if job.target is None else reached_s(points, job.target)
    counted = [one for one in rounds if at_s is None or one.at_s <= at_s]
    seconds = summary["seconds"] or 1.0
    return {
        "target": job.target,
        "seconds_to": at_s,
        "commits": len(counted),
        "updates": sum(len(one.silos) for one in counted),
        "wait_fraction": max(summary["wait_fraction"], 0.0),
        "waits": {silo["name"]: max(silo["wait_s"], 0.0) / seconds for silo in summary["silos"]},
        "curve": points,
    }
