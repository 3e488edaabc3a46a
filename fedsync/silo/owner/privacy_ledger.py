"""Ledger of a data set's privacy budget: every differentially private release, over all runs; append-only, on disk.

An order is on disk (``fdatasync``) with all of its steps before it reads data. A later entry gives back the steps that
the order left out. If a process is killed in between, all steps stay spent, and the repeated order is entered again. So
an order may count twice, but is never missing.

Entries form a chain of digests, as in the audit log. Each entry also goes to the audit log, with its number and digest.
A ledger that is older than the audit log, as after the restoration of a backup, is therefore noticed and closed. The
audit log's own signed heads show whether the audit log is complete.

| key | content |
|---|---|
| ``n``, ``at``, ``before``, ``digest`` | as in `fedsync.silo.owner.audit_chain` |
| ``kind`` | ``spent``, or ``returned`` for releases that an order left out |
| ``unit`` | what the budget protects (`fedsync.config.sections.privacy.BudgetConfig`); older entries have no unit |
| ``run``, ``of`` | the run, and the order or evaluation |
| ``rate``, ``noise``, ``times`` | rate and noise of a release (`fedsync.privacy.release`), number of such releases |
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from math import inf
from pathlib import Path
from typing import Any, Literal

from fedsync.common.errors import BudgetSpent, ConfigError
from fedsync.common.files import OWNER_FILE, private_folder, write_atomically
from fedsync.common.locks import taken
from fedsync.config.run_spec import RunSpec
from fedsync.config.sections.privacy import BudgetConfig, PrivacyConfig
from fedsync.privacy.accounting import AccountantKind, epsilon, fits, shown
from fedsync.privacy.release import Release
from fedsync.silo.owner.audit_chain import FIRST, MOST_LINE, AuditBroken, append_line, log_files, sealed_line
from fedsync.silo.protocol import STATE

LEDGERS = "privacy"  # folder of the ledgers in the state folder

SPENT = "privacy"  # kind of the audit log's lines about ledger entries


@dataclass
class PrivacyLedger:
    """Ledger of the data set ``name``; in memory if ``file`` is None, as for an emulated silo. ``audit`` is the folder
    of the audit log, if there is one; ``tell`` records an entry there.
    """

    name: str
    budget: BudgetConfig
    file: Path | None = None
    audit: Path | None = None
    tell: Callable[[str, Mapping[str, str | int]], None] = lambda kind, fields: None
    spent: Counter[Release] = field(default_factory=Counter)
    by_run: dict[str, Counter[Release]] = field(default_factory=dict)
    _n: int = 0
    _digest: str = FIRST
    _digests: list[str] = field(default_factory=list)
    _size: int = 0

    def load(self) -> PrivacyLedger:
        """Read the ledger, make no folder; `ConfigError` if damaged, older than the audit log, or of another unit."""
        with self._alone() if self.file is not None and self.file.parent.exists() else nullcontext():
            self._read()
            n, digest = (0, FIRST) if self.file is None or self.audit is None else last_entry(self.audit, self.name)
            if n > self._n or (n and digest != self._digests[n - 1]):
                problem = f"entry {n}, which the audit log names, is missing: this is an older ledger"
                raise ConfigError(str(self.file), problem, "Restore the newest ledger, so that nothing is spent twice")
        return self

    def include(self, other: PrivacyLedger) -> None:
        """Count the releases of another ledger of the same data, whose budget no longer exists."""
        self.spent.update(other.spent)
        for run, releases in other.by_run.items():
            self.by_run.setdefault(run, Counter()).update(releases)

    def epsilon(self, run: str | None = None) -> float:
        releases = self.spent if run is None else self.by_run.get(run, Counter())
        return epsilon(releases, self.budget.delta, self.budget.accountant)

    def allows(self, releases: Mapping[Release, int]) -> bool:
        return fits(self.spent + Counter(releases), self.budget.epsilon, self.budget.delta, self.budget.accountant)

    def check(self, releases: Mapping[Release, int]) -> None:
        with self._alone():
            self._read()
            self._check(releases)

    def enter(self, run: str, of: str, releases: Mapping[Release, int]) -> None:
        """Enter releases durably, before they leave. Nothing is entered if they exceed the budget (`BudgetSpent`), the
        disk refuses, or names are too long (`ConfigError`).
        """
        with self._alone():
            self._read()
            self._check(releases)
            self._write_all("spent", run, of, releases)

    def give_back(self, run: str, of: str, releases: Mapping[Release, int]) -> None:
        """Subtract releases of an order that was entered and did not make them; `ConfigError` as for `enter`."""
        with self._alone():
            self._read()
            self._write_all("returned", run, of, releases)

    def _check(self, releases: Mapping[Release, int]) -> None:
        if not self.allows(releases):
            problem = (
                f"the order would exceed the privacy budget of {self.name!r}: epsilon {self.budget.epsilon:g} at delta "
                f"{self.budget.delta:g}, of which {shown(self.epsilon())} is spent"
            )
            raise BudgetSpent("privacy", problem, "Ask for less, or have the owner raise privacy.epsilon in silo.yaml")

    def _alone(self) -> AbstractContextManager[object]:
        if self.file is None:
            return nullcontext()
        private_folder(self.file.parent)
        return taken(self.file.with_suffix(".lock"), inf)

    def _read(self) -> None:
        """Read the entries of other processes; cut off an incomplete line, whose result never left."""
        if self.file is None or not self.file.exists():
            if self._n and self.file is not None:
                raise ConfigError(str(self.file), "the ledger is missing", "Restore it")
            return
        with self.file.open("r+b") as file:
            size = file.seek(0, os.SEEK_END)
            if size < self._size:
                raise ConfigError(str(self.file), "it has become shorter", "Restore the newest ledger")
            file.seek(self._size)
            while raw := file.readline(MOST_LINE):
                if len(raw) == MOST_LINE:
                    raise ConfigError(str(self.file), f"entry {self._n + 1} is too long", "Restore the newest ledger")
                if not raw.endswith(b"\n"):
                    file.truncate(self._size)
                    break
                self._take(self._parsed(raw))
                self._size += len(raw)

    def _parsed(self, raw: bytes) -> dict[str, Any]:
        try:
            line: dict[str, Any] = json.loads(raw)
            digest = line.pop("digest")
            valid = sealed_line(line) == (raw, digest) and (line["n"], line["before"]) == (self._n + 1, self._digest)
            valid = valid and type(line["times"]) is int and line["times"] >= 0
            valid = valid and all(math.isfinite(line[key]) for key in ("rate", "noise"))
            release = Release(line["rate"], line["noise"])
            spent = self.by_run.get(line["run"], Counter())[release]
            if valid and (line["kind"] == "spent" or (line["kind"] == "returned" and line["times"] <= spent)):
                return {**line, "digest": digest}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            pass
        raise ConfigError(str(self.file), f"its entry {self._n + 1} was changed", "Restore the newest ledger")

    def _take(self, line: Mapping[str, Any]) -> None:
        if line.get("unit", self.budget.unit) != self.budget.unit:
            problem = f"it counts for each {line['unit']}, and the budget is for each {self.budget.unit}"
            remedy = f"Write unit: {line['unit']}, or give the data another name, which begins a new budget"
            raise ConfigError(str(self.file), problem, remedy)
        self._n, self._digest = line["n"], line["digest"]
        self._digests.append(self._digest)
        release, times = Release(line["rate"], line["noise"]), line["times"]
        for counted in (self.spent, self.by_run.setdefault(line["run"], Counter())):
            counted[release] += times if line["kind"] == "spent" else -times

    def _write_all(self, kind: str, run: str, of: str, releases: Mapping[Release, int]) -> None:
        for release, times in releases.items():
            named = {"kind": kind, "unit": self.budget.unit, "run": run, "of": of}
            self._write({**named, "rate": release.rate, "noise": release.noise, "times": times})

    def _write(self, fields: Mapping[str, str | float]) -> None:
        at = datetime.now(UTC).isoformat(timespec="milliseconds")
        said: dict[str, Any] = {**fields, "n": self._n + 1, "at": at, "before": self._digest}
        line, digest = sealed_line(said)
        if len(line) >= MOST_LINE:
            problem = f"the names of run and order make an entry of {len(line)} bytes, at most {MOST_LINE - 1}"
            raise ConfigError("privacy", problem, "Give them shorter names")
        if self.file is not None:
            try:
                append_line(self.file, line, self._size)
            except OSError as error:
                problem = f"the privacy ledger cannot be written: {error.strerror or error}"
                raise ConfigError(str(self.file), problem, "Free disk space") from error
            self.tell(SPENT, {"of": self.name, "entry": self._n + 1, "entry_digest": digest, "run": str(fields["run"])})
        self._size += len(line)
        self._take({**said, "digest": digest})


def ledger_file(folder: str, name: str) -> Path:
    return Path(folder) / f"{name}.jsonl"


def last_entry(audit: Path, name: str) -> tuple[int, str]:
    """Return number and digest of a ledger's last entry that the audit log knows; 0 where it knows none."""
    for _, path in reversed(log_files(audit)):
        for raw in reversed(path.read_bytes().splitlines(keepends=True)):
            # The next writer of the log cuts an incomplete last line off.
            if b'"kind":"privacy"' not in raw or not raw.endswith(b"\n"):
                continue
            try:
                line = json.loads(raw)
                if line["kind"] == SPENT and line["of"] == name:
                    return int(line["entry"]), str(line["entry_digest"])
            except (ValueError, KeyError, TypeError) as error:
                raise AuditBroken(f"{path.name} has a line that is none") from error
    return 0, FIRST


_FILE = "spent-{}.json"


@dataclass
class PrivacyTally:
    """Releases of one silo in one run; ``budget`` is the epsilon of the silo's budget, if it has one.

    A real silo's ledger stays with its owner. In a simulation all silos belong to the user, so the run's result has the
    budget that each silo has spent. ``file`` is a copy for the process that runs the simulation, if it is another
    process.
    """

    silo: str
    delta: float
    budget: float | None = None
    accountant: AccountantKind = "pld"
    file: Path | None = None
    releases: Counter[Release] = field(default_factory=Counter)

    def count(self, releases: Mapping[Release, int], sign: Literal[1, -1] = 1) -> None:
        self.releases.update({release: sign * times for release, times in releases.items()})
        if self.file is not None:
            counted = [[release.rate, release.noise, times] for release, times in self.releases.items()]
            text = json.dumps([self.silo, self.delta, self.budget, self.accountant, counted])
            write_atomically(self.file, text.encode(), OWNER_FILE)

    def told(self) -> dict[str, float | None]:
        return {
            "epsilon": epsilon(self.releases, self.delta, self.accountant),
            "delta": self.delta,
            "budget": self.budget,
        }


def tally_of(spec: RunSpec, config: PrivacyConfig, index: int) -> PrivacyTally:
    if not spec.emulate:
        return PrivacyTally("", config.delta)
    machine, root = spec.emulate[index], os.environ.get(STATE)
    file = None if root is None else Path(root) / _FILE.format(index)
    if file is not None and file.exists():  # of a trainer before this one
        return _read(file)
    own = machine.privacy
    if own is None:
        accountant: AccountantKind = "rdp" if config.kind == "silo-noise" else "pld"
        return PrivacyTally(machine.name, config.delta, None, accountant, file)
    return PrivacyTally(machine.name, own.delta, own.epsilon, own.accountant, file)


def spent_by(tallies: Iterable[PrivacyTally | None]) -> dict[str, Any]:
    found = {each.silo: each.told() for each in tallies if each is not None}
    return {"privacy": found} if found else {}


def kept_tallies(state: Path) -> list[PrivacyTally]:
    return sorted(map(_read, state.glob(_FILE.format("*"))), key=lambda each: each.silo)


def _read(file: Path) -> PrivacyTally:
    try:
        silo, delta, budget, accountant, counted = json.loads(file.read_bytes())
        releases = Counter({Release(rate, noise): times for rate, noise, times in counted})
    except (ValueError, TypeError):
        raise ConfigError(str(file), "damaged: what the silo has spent is unknown", "Begin another run") from None
    return PrivacyTally(silo, delta, budget, accountant, file, releases)
