"""Replay protection of a silo: logs of each run's newest versions and of the models already evaluated.

A silo follows one chain of versions in a run. Its state is in the trainer's folder, which may be cleared, and a server
could then start a second chain. To prevent this, the log, beside the keys, holds the digests D (`history`). A version's
digest is on disk before its model is used.

A run gets another name when its server lost a checkpoint. It may then continue from an older version than the silos'
newest. A lying server can claim such a loss, too. Its gain is bounded by these rules:

| name of a run | the silo follows the run |
|---|---|
| the name that was logged last | if it continues the logged chain |
| a new name | if its chain contains the oldest logged version (of `KEPT_VERSIONS`); at most `MOST_NAMES` names |
| a name that a newer name has replaced | never |

Runs of an earlier key epoch are forgotten: messages of that epoch cannot be replayed. Of the current epoch, the
`KEPT_RUNS` newest runs stay; older runs are only marked as over.

A silo evaluates each model for the server at most once on the same samples. If one evaluation entered two sums of
different silos, the sums' difference would disclose something. And the test split is only for the result of a run.

| split | a silo evaluates | unless |
|---|---|---|
| validation | the newest model, when an order brings it | it evaluated the model before |
| test | each subject once, in an order that changes nothing | it evaluated the same model on the test split before |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import inf
from pathlib import Path

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.suites.suite import DIGEST_BYTES
from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, private_folder, read_private, write_atomically, write_private, writing
from fedsync.common.locks import taken
from fedsync.core.orders import Split, Subject, WorkOrder

logger = foreign.logger(__name__)

KEPT_VERSIONS = 8  # an honest server keeps three checkpoints, and goes back less far

MOST_NAMES = 4

KEPT_RUNS = 64

CHAINS = "chains"  # folder beside the silo's keys, with a file for each run in which the silo reached a version

_LOCK, _OVER = "chains.lock", "over"
_ASKED, _ASKED_LOCK, _ASKED_FILE, _KEPT_ASKED = "asked", "asked.lock", "asked.json", 64
_MAX_BYTES = 2**11
_MAX_OVER_BYTES = 2**20
_NAME_DIGITS = 16
_ROTATE = "Have the administrator rotate the keys: `fedsync keys rotate`. Until then this silo takes no part in it"


@dataclass(frozen=True, slots=True)
class _Entries:
    """Log entries of a run: hashed names, the newest last, and D by version."""

    names: tuple[str, ...]
    chains: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        lines = [" ".join(self.names), *(f"{version} {chain.hex()}" for version, chain in self.chains.items())]
        return "\n".join(lines).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Entries:
        names, *lines = data.decode("ascii").split("\n")
        pairs = [line.split(" ") for line in lines]
        chains = {int(version): bytes.fromhex(chain) for version, chain in pairs}
        if not (names and chains) or any(len(chain) != DIGEST_BYTES for chain in chains.values()):
            raise ValueError("not a log of chains")
        return cls(tuple(names.split(" ")), chains)


class ChainLog:
    """Chain log of one run R (`fedsync.cipher.silo.history`) with its present ``name``: a file beside the silo's keys;
    in memory where the keys have no folder. `ConfigError` if the file is damaged or cannot be written, or the run is no
    longer followed.
    """

    def __init__(self, ring: Ring, run: bytes, name: str) -> None:
        self._name = hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]
        self._folder = None if ring.folder is None else private_folder(ring.folder / CHAINS)
        self._lock = None if ring.folder is None else ring.folder / _LOCK
        self._epoch, self._run = ring.group.epoch, run
        self._memory: _Entries | None = None
        with _locked(self._lock):
            self._tidy()

    @property
    def followed(self) -> dict[int, bytes]:
        """D by version, of the versions that the run must lead to; empty before the first version."""
        entries = self._read()
        if entries is None:
            return {}
        if entries.names[-1] == self._name:
            return dict(entries.chains)
        self._check_new(entries)
        oldest = min(entries.chains)
        return {oldest: entries.chains[oldest]}

    def enter(self, known: Mapping[int, bytes]) -> None:
        """Log the newest of the ``known`` D by version; the log is on disk when this returns."""
        with _locked(self._lock):
            entries = self._read() or _Entries((self._name,), {})
            if entries.names[-1] != self._name:
                self._check_new(entries)
                entries = replace(entries, names=(*entries.names, self._name))
            # A new name may go back a few versions, but the following name must not go back further.
            oldest = min(entries.chains, default=0)
            newest = sorted(version for version in known if version >= oldest)[-KEPT_VERSIONS:]
            self._memory = replace(entries, chains={version: known[version] for version in newest})
            if self._folder is not None:
                write_private(self._folder / self._file, self._memory.to_bytes())

    def _check_new(self, entries: _Entries) -> None:
        if self._name in entries.names:
            problem = "the run continues under another name, and this silo with it"
            raise ConfigError("run", problem, "No action is needed: this is a message from before the new name")
        if len(entries.names) >= MOST_NAMES:
            problem = f"the server lost its newest checkpoint {MOST_NAMES} times in this run"
            raise ConfigError("run", problem, f"Begin another run. {_ROTATE}")

    @property
    def _file(self) -> str:
        return f"{self._epoch}-{self._run.hex()}"

    def _read(self) -> _Entries | None:
        if self._folder is None:
            return self._memory
        path = self._folder / self._file
        if not path.exists():
            if self._run in self._over():
                problem = f"{KEPT_RUNS} runs have begun since this silo last saw this run: it is over"
                raise ConfigError("run", problem, f"Begin another run. {_ROTATE}")
            return None
        try:
            return _Entries.from_bytes(read_private(path, _MAX_BYTES))
        except ValueError:
            problem = "damaged: this silo's newest version is unknown"
            raise ConfigError(str(path), problem, _ROTATE) from None

    def _tidy(self) -> None:
        if self._folder is None:
            return
        found: list[tuple[float, str]] = []
        for path in self._folder.iterdir():
            epoch, _, run = path.name.partition("-")
            if epoch.isdecimal() and int(epoch) < self._epoch:
                path.unlink(missing_ok=True)
            elif epoch == str(self._epoch) and len(run) == 2 * DIGEST_BYTES and path.name != self._file:
                found.append((path.stat().st_mtime, run))
        surplus = [run for _, run in sorted(found)[: max(0, len(found) - (KEPT_RUNS - 1))]]
        over = self._over() | {bytes.fromhex(run) for run in surplus}
        if not surplus or len(over) * DIGEST_BYTES > _MAX_OVER_BYTES:
            return  # at the limit files stay: without a mark, the messages of a removed run could be replayed
        write_private(self._folder / f"{self._epoch}-{_OVER}", b"".join(sorted(over)))
        for run in surplus:
            (self._folder / f"{self._epoch}-{run}").unlink(missing_ok=True)

    def _over(self) -> set[bytes]:
        path = None if self._folder is None else self._folder / f"{self._epoch}-{_OVER}"
        if path is None or not path.exists():
            return set()
        data = read_private(path, _MAX_OVER_BYTES)
        if len(data) % DIGEST_BYTES:
            raise ConfigError(str(path), "damaged: the runs that are over are unknown", _ROTATE)
        return {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}


@contextmanager
def _locked(lock: Path | None) -> Iterator[None]:
    if lock is None:
        yield
        return
    with writing(lock, "Give the silo write access to its key folder, which encrypted runs need"), taken(lock, inf):
        yield


@dataclass(slots=True)
class Asked:
    """Record of evaluated models: each model's digest, and the update that carried its result; the newest of ``rounds``
    last, ``tests`` by subject. It is in memory if ``file`` is None.
    """

    file: Path | None
    rounds: list[tuple[str, str]] = field(default_factory=list)
    tests: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def of_run(cls, ring: Ring, run: bytes, state: Path | None) -> Asked:
        if ring.folder is None:
            return cls(None if state is None else state.parent / _ASKED_FILE)
        folder, name = private_folder(ring.folder / _ASKED), f"{ring.group.epoch}-{run.hex()}"
        for old in folder.iterdir():
            # A run without a chain log is over, or has reached no version: it has asked for no evaluation.
            if old.name not in (name, _ASKED_LOCK) and not (ring.folder / CHAINS / old.name).exists():
                old.unlink(missing_ok=True)
        return cls(folder / name)

    def _read(self) -> None:
        """Read the file. An unreadable file counts as if every subject had been tested."""
        if self.file is None or not self.file.exists():
            return
        try:
            about = json.loads(self.file.read_bytes())
            self.rounds = [(str(model), str(update)) for model, update in about["rounds"]]
            self.tests = {str(name): (str(one[0]), str(one[1])) for name, one in about["tests"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            self.tests = {subject.value: ("", "") for subject in Subject}

    def admits(self, order: WorkOrder, model: str) -> bool:
        """Whether the result of an order may leave; if so, it is recorded on disk (`ConfigError` if that fails).
        ``model`` is the digest of the evaluated model. A repeated order is admitted again, because its result is the
        same.
        """
        with _locked(None if self.file is None else self.file.parent / _ASKED_LOCK):
            self._read()
            found = model, order.update_id
            if order.split is Split.VALIDATION:
                if order.subject is not Subject.LAST:
                    return False
                if found in self.rounds:
                    return True
                if model in dict(self.rounds):
                    return False
                self.rounds = [*self.rounds, found][-_KEPT_ASKED:]
            else:
                if self.tests.get(order.subject.value) == found:
                    return True
                if not order.scores_only or order.subject.value in self.tests or model in dict(self.tests.values()):
                    return False
                self.tests[order.subject.value] = found
            if self.file is not None:
                text = json.dumps({"rounds": self.rounds, "tests": self.tests})
                write_atomically(self.file, text.encode(), OWNER_FILE)
            return True
