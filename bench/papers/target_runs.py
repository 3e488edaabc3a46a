"""Runs to a target, each at most once: what is done lies in a file, by a digest of the whole configuration and code.

The course of FedAvg in rounds does not depend on its machines, for all silos do the same work and all are waited for:
only its seconds do. So it trains once for all clusters, and a run without training tells the seconds of its rounds.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import fedsync
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import FedSyncError
from fedsync.observe.ledger import Ledger

WALL_S = 1800.0
"""Real seconds after which a run counts as hanging."""

_SAY_S = 30.0

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        kind: ``train``, or ``clock``, which trains nothing and tells when each round ends.
        strategy: file.
        sets: changes to it, stop rules among them.
        silos: the silo file's entries, as JSON.
    """

    kind: str
    strategy: str
    sets: tuple[str, ...]
    silos: str

    def config(self) -> StrategyConfig:
        return StrategyConfig.load(self.strategy, self.sets)

    def cluster(self) -> ClusterConfig:
        return ClusterConfig.model_validate({"silos": json.loads(self.silos)})

    def digest(self) -> str:
        """The same for the same run of the same code, whatever the file and the changes were."""
        plain = [self.kind, self.config().model_dump(mode="json"), self.cluster().entries(), code()]
        return hashlib.sha256(json.dumps(plain, sort_keys=True, default=repr).encode()).hexdigest()


@lru_cache
def code() -> str:
    """Digest of all that decides what comes out of a run."""
    package = Path(fedsync.__file__).parent
    found = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), Path(__file__)]:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


class _Follower:
    """Keeps the books of a run, and ends one that takes too long in real time."""

    def __init__(self) -> None:
        self.until, self.ledger = time.monotonic() + WALL_S, Ledger()

    def follow(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if time.monotonic() > self.until:
            raise TimeoutError(f"no end in {WALL_S:g} s of real time, at {ledger.seconds:.1f} virtual s")


def carry_out(job: Job) -> Result:
    """``round`` and ``seconds`` of the first version at the target, None without, or ``at_s`` of every round."""
    # Imported where used: torch takes seconds, and the process that hands out the runs does not need it.
    follower, began = _Follower(), time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            if job.kind == "clock":
                from fedsync.sim.timing_only import run_timing

                run_timing(job.config(), job.cluster(), Path(folder), listeners=[follower], journal=False)
                return {"at_s": [row.at_s for row in follower.ledger.rounds], "wall_s": time.perf_counter() - began}
            from fedsync.sim.run import run_virtual

            summary = run_virtual(job.config(), job.cluster(), Path(folder), listeners=[follower])
    except (FedSyncError, TimeoutError) as error:
        return {"failed": f"{type(error).__name__}: {error}", "round": None, "seconds": None}
    seconds = summary["seconds_to_target"]
    # The rounds that end later than the one that reached the target belong to orders that were at work meanwhile.
    number = None if seconds is None else 1 + sum(row.at_s < seconds for row in follower.ledger.rounds)
    kept = {key: summary[key] for key in ("utilisation", "wait_fraction", "rounds")}
    return {"round": number, "seconds": seconds, **kept, "wall_s": time.perf_counter() - began}


class Cache:
    """Results by digest, a line of JSON each, so that a run that was cut off goes on.

    Args:
        path: of the file.
        resume: keep what is in it; a last line that was cut off is not read.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self._path, self._known = path, dict[str, Result]()
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = path.read_text(encoding="utf-8").split("\n")[:-1] if resume and path.exists() else []
        for text in whole:
            entry = json.loads(text)
            self._known[entry["digest"]] = entry["result"]
        path.write_text("".join(text + "\n" for text in whole), encoding="utf-8")

    def get(self, digest: str) -> Result | None:
        return self._known.get(digest)

    def put(self, digest: str, result: Result) -> None:
        self._known[digest] = result
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"digest": digest, "result": result}) + "\n")


class Runner:
    """Carries jobs out, says how far it is, and never does one twice.

    Args:
        cache: of results; one that failed is not kept.
        processes: each with one thread; 1 runs all here.
    """

    def __init__(self, cache: Cache, processes: int, do: Callable[[Job], Result] = carry_out) -> None:
        self.cache, self.done, self.wall_s = cache, 0, 0.0
        self._do, self._processes = do, processes
        self._results: dict[Job, Result] = {}
        self._pool: ProcessPoolExecutor | None = None

    def run(self, what: str, jobs: Sequence[Job]) -> dict[Job, Result]:
        """Results of all jobs.

        Args:
            what: of this batch, for people.
            jobs: the same one may be there several times.
        """
        digests = {job: job.digest() for job in dict.fromkeys(jobs) if job not in self._results}
        missing = []
        for job, digest in digests.items():
            known = self.cache.get(digest)
            if known is None:
                missing.append(job)
            else:
                self._results[job] = known
        self._say(f"{what}: {len(missing)} runs, {len(set(jobs)) - len(missing)} done before")
        began = said = time.monotonic()
        for count, (job, result) in enumerate(self._results_of(missing), 1):
            self._results[job] = result
            if "failed" not in result:
                self.cache.put(digests[job], result)
            self.done, now = self.done + 1, time.monotonic()
            if now - said > _SAY_S:
                said, left_s = now, (now - began) / count * (len(missing) - count)
                self._say(f"  {count} of {len(missing)}, about {left_s / 60:.0f} min to go here")
        self.wall_s += time.monotonic() - began
        return {job: self._results[job] for job in jobs}

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _results_of(self, jobs: Sequence[Job]) -> Any:
        if self._processes == 1 or len(jobs) < 2:
            return ((job, self._do(job)) for job in jobs)
        if self._pool is None:
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ[name] = "1"
            self._pool = ProcessPoolExecutor(self._processes, mp_context=multiprocessing.get_context("spawn"))
        futures = {self._pool.submit(self._do, job): job for job in jobs}
        return ((futures[future], future.result()) for future in as_completed(futures))

    @staticmethod
    def _say(text: str) -> None:
        print(text, file=sys.stderr, flush=True)
