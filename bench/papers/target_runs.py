"""Runs to a target, each at most once: results lie in a file, by a digest of the whole configuration.

A run ends at the bound up to which its outcome matters, and its result says that it takes longer. Such a run is the
beginning of the whole run: the listener that ends it changes no decision.

A result has a trace: for each round, a digest of the work of all silos in all rounds so far. Two runs of one training
configuration with equal traces train alike on any machines, see `map_replay.py`.
"""

from __future__ import annotations

import hashlib
import json
import math
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import fedsync
from fedsync.common.errors import FedSyncError
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.ledger import Ledger
from fedsync.observe.rounds import Round

WALL_S = 1800.0
"""Real seconds after which a run counts as hanging."""

_SAY_S = 30.0
_ROOT = Path(__file__).parents[2]

BEYOND = "beyond"
"""In the result of a run that was given up: so many seconds did not do."""

DECIDING = ("target_evaluations", "text_task")
"""Modules beside this one that decide what comes out of a run."""

Result = dict[str, Any]


@dataclass(frozen=True)
class Job:
    """One run.

    Args:
        kind: ``seconds``, to the target on these machines; ``clock``, which trains nothing and tells when each round
            ends; ``pooled``, which tells the loss at its end.
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
        """The same for the same run, whatever the file and the changes were."""
        plain = [self.kind, self.config().model_dump(mode="json"), self.cluster().entries()]
        text = json.dumps(plain, sort_keys=True, default=repr)
        return hashlib.sha256(text.replace(str(_ROOT), "").encode()).hexdigest()  # of any checkout


@lru_cache
def code() -> str:
    """Digest of all that decides what comes out of a run."""
    package, here = Path(fedsync.__file__).parent, Path(__file__)
    found = hashlib.sha256()
    for path in [*sorted(package.rglob("*.py")), here, *(here.with_name(f"{name}.py") for name in DECIDING)]:
        found.update(path.name.encode() + path.read_bytes())
    return found.hexdigest()


class _GivenUp(Exception):
    """The target was not reached within what matters."""


class _Follower:
    """Keeps the books of a run, and ends one that takes too long, in virtual or in real time.

    Args:
        within: seconds up to which it matters when the target is reached.
        config: of the run, which knows the target.
    """

    def __init__(self, within: float, config: StrategyConfig) -> None:
        self._within, self._stop = within, config.stop
        self._until, self._settled = time.monotonic() + WALL_S, 0
        self.ledger = Ledger()

    def follow(self, ledger: Ledger) -> None:
        self.ledger = ledger
        if time.monotonic() > self._until:
            raise TimeoutError(f"no end in {WALL_S:g} s of real time, at {ledger.seconds:.1f} virtual s")
        if math.isfinite(self._within):
            self._settled = ledger.closed(self._settled)
            passed = self._settled and self.ledger.rounds[self._settled - 1].at_s > self._within
            if passed and self.reached() is None:
                raise _GivenUp

    def reached(self) -> int | None:
        """Number of the first version at the target, counted from 1."""
        return next((at for at, row in enumerate(self.ledger.rounds, 1) if self._arrived(row)), None)

    def trace(self, silos: int, rounds: int | None = None) -> list[str]:
        """Digests of the work in all rounds up to each; cut off before a round without an update of every silo.

        With an update of each silo in each round, every order begins with the newest version.
        """
        found, so_far = [], hashlib.sha256()
        for row in list(self.ledger.rounds)[:rounds]:
            if len(row.silos) != silos:
                break
            work = [(name, each.batch_size, each.steps, each.samples) for name, each in sorted(row.silos.items())]
            so_far.update(json.dumps(work).encode())
            found.append(so_far.hexdigest()[:12])
        return found

    def _arrived(self, row: Round) -> bool:
        target = self._stop.target
        if target is None:
            aim = self._stop.target_accuracy
            return aim is not None and row.accuracy is not None and row.accuracy >= aim
        assert target.metric == "loss" and target.at_most is not None
        return row.test_loss is not None and row.test_loss <= target.at_most


def carry_out(job: Job, within: float = math.inf) -> Result:
    """What a job is for.

    ``round`` and ``seconds`` of the first version at the target, None without, or `BEYOND`; ``at_s`` of every round of
    a clock; the ``loss`` of pooled training. ``trace`` has the rounds up to the target, or all that were closed.
    """
    began = time.perf_counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            return _carry_out(job, within, Path(folder)) | {"wall_s": time.perf_counter() - began}
    except (FedSyncError, TimeoutError) as error:
        return {"failed": f"{type(error).__name__}: {error}", "round": None, "seconds": None}


def _carry_out(job: Job, within: float, folder: Path) -> Result:
    # Imported where used: torch takes seconds, and the process that hands out the runs does not need it.
    config, cluster = job.config(), job.cluster()
    follower, silos = _Follower(within, config), len(cluster.silos)
    if job.kind == "clock":
        from fedsync.simulation.timing_only import run_timing

        run_timing(config, cluster, folder, listeners=[follower])
        return {"at_s": [row.at_s for row in follower.ledger.rounds], "trace": follower.trace(silos)}
    from bench.papers.target_evaluations import shared
    from fedsync.simulation.run import run_virtual

    try:
        with shared():
            summary = run_virtual(config, cluster, folder, listeners=[follower])
    except _GivenUp:
        return {BEYOND: within, "trace": follower.trace(silos, follower.ledger.closed(0))}
    if job.kind == "pooled":
        return {"loss": follower.ledger.rounds[-1].test_loss}
    number = follower.reached()
    seconds = None if number is None else follower.ledger.rounds[number - 1].at_s
    failures = sum(silo["failures"] for silo in summary["silos"])
    found = {"round": number, "seconds": seconds, "failures": failures, "trace": follower.trace(silos, number)}
    return found | {key: summary[key] for key in ("utilisation", "wait_fraction", "rounds")}


def _settles(result: Result, within: float) -> bool:
    return BEYOND not in result or result[BEYOND] >= within


class Cache:
    """Results by digest, a line of JSON each, so that a run that was cut off goes on.

    Args:
        path: of the file.
        resume: keep what is in it; a last line that was cut off is not read.
        any_code: also use results of other versions of the code, which stay in the file in any case.
    """

    def __init__(self, path: Path, *, resume: bool, any_code: bool = False) -> None:
        self._path, self._known = path, dict[str, Result]()
        self.codes: dict[str, int] = {}
        """Results by the version of the code that made them, of those that count."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = []
        for text in path.read_text(encoding="utf-8").splitlines() if resume and path.exists() else ():
            try:
                line = json.loads(text)
            except ValueError:
                continue
            whole.append(text)
            if any_code or line["code"] == code():
                self.codes[line["code"]] = self.codes.get(line["code"], 0) + 1
                self._keep(line["digest"], line["result"])
        path.write_text("".join(text + "\n" for text in whole), encoding="utf-8")

    def get(self, digest: str, within: float = math.inf) -> Result | None:
        """A result that says all that matters to who would wait so long, if there is one."""
        found = self._known.get(digest)
        return found if found is not None and _settles(found, within) else None

    def put(self, digest: str, result: Result) -> None:
        self._keep(digest, result)
        self.codes[code()] = self.codes.get(code(), 0) + 1
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"digest": digest, "code": code(), "result": result}) + "\n")

    def _keep(self, digest: str, result: Result) -> None:
        before = self._known.get(digest)
        if before is None or not _settles(before, result.get(BEYOND, math.inf)):
            self._known[digest] = result


class Runner:
    """Carries jobs out, says how far it is, and never does one twice.

    Args:
        cache: of results; one that failed is not kept.
        processes: each with one thread; 1 runs all here.
        do: carries one out, up to what matters.
        until: `time.monotonic` after which no run begins; results of those that are missing then are left out.
    """

    def __init__(
        self,
        cache: Cache,
        processes: int,
        do: Callable[[Job, float], Result] = carry_out,
        until: float = math.inf,
    ) -> None:
        self.cache, self.done, self.wall_s = cache, 0, 0.0
        self.planned = 0
        """Runs that all stages may take."""
        self._do, self._processes, self._until = do, processes, until
        self._results: dict[Job, Result] = {}
        self._digests: dict[Job, str] = {}
        self._pool: ProcessPoolExecutor | None = None
        self._began = self._said = time.monotonic()
        self._behind = self._stage = self._before = 0

    def begin(self, runs: int) -> None:
        """A stage begins, of so many of the runs that are planned; the one before is done."""
        self._behind, self._stage, self._before = self._behind + self._stage, runs, self.done

    def known(self, job: Job, within: float) -> Result | None:
        """A result of the file that says all that matters; see `Cache.get`."""
        if job not in self._digests:
            self._digests[job] = job.digest()
        return self.cache.get(self._digests[job], within)

    def run(self, what: str, jobs: Mapping[Job, float]) -> dict[Job, Result]:
        """Results of all jobs; without those for which there was no time.

        Args:
            what: of this batch, for people.
            jobs: and up to which seconds each one matters.
        """
        missing: dict[Job, float] = {}
        for job, within in jobs.items():
            if job not in self._digests:
                self._digests[job] = job.digest()
            if job in self._results and _settles(self._results[job], within):
                continue
            if (known := self.cache.get(self._digests[job], within)) is None:
                missing[job] = within
            else:
                self._results[job] = known
        began = time.monotonic()
        for job, result in self._results_of(missing):
            self._results[job] = result
            if "failed" not in result:
                self.cache.put(self._digests[job], result)
            self.done += 1
            self._tell(what)
        self.wall_s += time.monotonic() - began
        return {
            job: self._results[job]
            for job, within in jobs.items()
            if job in self._results and _settles(self._results[job], within)
        }

    def close(self) -> None:
        """End the processes."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    @property
    def in_time(self) -> bool:
        return time.monotonic() < self._until

    def _results_of(self, jobs: Mapping[Job, float]) -> Iterator[tuple[Job, Result]]:
        """Of all jobs, or of those that began in time."""
        if self._processes == 1 or len(jobs) < 2:
            yield from ((job, self._do(job, within)) for job, within in jobs.items() if self.in_time)
            return
        if self._pool is None:
            for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
                os.environ[name] = "1"
            self._pool = ProcessPoolExecutor(self._processes, mp_context=multiprocessing.get_context("spawn"))
        left, going = iter(jobs.items()), dict[Future[Result], Job]()
        while True:
            while len(going) < self._processes and self.in_time and (following := next(left, None)) is not None:
                going[self._pool.submit(self._do, *following)] = following[0]
            if not going:
                return
            for future in wait(going, return_when=FIRST_COMPLETED).done:
                yield going.pop(future), future.result()

    def _tell(self, what: str) -> None:
        """Say now and then what is at work, and how long all may take at the pace so far."""
        now = time.monotonic()
        if now - self._said < _SAY_S:
            return
        self._said = now
        left = self.planned - self._behind - min(self.done - self._before, self._stage)
        left_s = left * (now - self._began) / self.done
        clock = time.strftime("%H:%M:%S")
        text = f"{clock} {what}: {self.done} runs in {(now - self._began) / 60:.0f} min"
        print(f"{text}, at most {left_s / 60:.0f} min to go", file=sys.stderr, flush=True)
