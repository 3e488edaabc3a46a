"""The newest versions of each run that a silo came to, and their D, beside the silo's keys.

A silo follows one chain of a run. What it remembers of the chain is in the trainer's folder, which may be cleared away,
and of which a server can ask for several. So that nobody leads it along a second chain in another folder, or after that
one is gone, the newest D are kept here, too. They are entered before the model of their version is on disk or used.

A run has another name once its server lost a checkpoint, and may then go on from before what silos had heard. A server
that lies can say so, too. What it gains is bounded:

| a run under | is followed |
|---|---|
| the name that was entered last | as far as it leads on from there |
| a new name | if it leads through the oldest version of the `KEPT_VERSIONS` newest; at most `MOST_NAMES` in all |
| a name that another has followed | no more |

Runs of an earlier key epoch are forgotten: nothing that was sealed then can be sent again. Of this epoch the
`KEPT_RUNS` newest stay. Of the others stays that there were such, and that they are over.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.suites.suite import DIGEST_BYTES
from fedsync.common import foreign
from fedsync.common.errors import ConfigError
from fedsync.common.files import private_folder, read_private, write_private
from fedsync.common.locks import taken

logger = foreign.logger(__name__)

KEPT_VERSIONS = 8
"""Newest versions that are entered: a server keeps three checkpoints, so an honest one goes back less far."""

MOST_NAMES = 4
"""Names that a run may have had."""

KEPT_RUNS = 64
"""Runs of one key epoch that are remembered."""

CHAINS = "chains"
"""Folder beside the silo's keys, with a file for each run that a silo has come to a version of."""

_LOCK, _OVER = "chains.lock", "over"
_MAX_BYTES = 2**11
_MAX_OVER_BYTES = 2**20
_NAME_DIGITS = 16
_ROTATE = "Have the administrator rotate the keys: `fedsync keys rotate`. Until then this silo takes no part in it"


@dataclass(frozen=True, slots=True)
class _Entries:
    """What is known of a run.

    Args:
        names: that it had, hashed, the newest last.
        chains: D of the newest versions.
    """

    names: tuple[str, ...]
    chains: Mapping[int, bytes]

    def to_bytes(self) -> bytes:
        lines = [" ".join(self.names), *(f"{version} {chain.hex()}" for version, chain in self.chains.items())]
        return "\n".join(lines).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> _Entries:
        """The inverse of `to_bytes`; raises `ValueError` if it is none."""
        names, *lines = data.decode("ascii").split("\n")
        pairs = [line.split(" ") for line in lines]
        chains = {int(version): bytes.fromhex(chain) for version, chain in pairs}
        if not (names and chains) or any(len(chain) != DIGEST_BYTES for chain in chains.values()):
            raise ValueError("not a log of chains")
        return cls(tuple(names.split(" ")), chains)


class ChainLog:
    """Of one run.

    Args:
        ring: the silo's keys; the log is a file in their folder, or in memory where they are in none.
        run: R, see `fedsync.cipher.silo.history`.
        name: that it has now.
    """

    def __init__(self, ring: Ring, run: bytes, name: str) -> None:
        self._name = hashlib.sha256(name.encode()).hexdigest()[:_NAME_DIGITS]
        self._folder = None if ring.folder is None else private_folder(ring.folder / CHAINS)
        self._epoch, self._run = ring.group.epoch, run
        self._memory: _Entries | None = None
        with self._held():
            self._tidy()

    @property
    def followed(self) -> dict[int, bytes]:
        """D by version, of those that the run has to lead to; empty before there is one.

        Raises:
            ConfigError: the file is damaged, or the run is one that is followed no more.
        """
        entries = self._read()
        if entries is None:
            return {}
        if entries.names[-1] == self._name:
            return dict(entries.chains)
        self._check_new(entries)
        oldest = min(entries.chains)
        return {oldest: entries.chains[oldest]}

    def check(self) -> None:
        """See that the run is followed under this name; raises as `followed`."""
        _ = self.followed

    def enter(self, known: Mapping[int, bytes]) -> None:
        """Put down what the silo comes to; on disk when this returns.

        Args:
            known: D by version; the newest are entered.

        Raises:
            ConfigError: the disk does not take it, or the run went on under another name meanwhile.
        """
        with self._held():
            entries = self._read() or _Entries((self._name,), {})
            if entries.names[-1] != self._name:
                self._check_new(entries)
                entries = replace(entries, names=(*entries.names, self._name))
            # Another name leads back a few versions, and the next one does not lead back further.
            oldest = min(entries.chains, default=0)
            newest = sorted(version for version in known if version >= oldest)[-KEPT_VERSIONS:]
            self._memory = replace(entries, chains={version: known[version] for version in newest})
            if self._folder is not None:
                write_private(self._folder / self._file, self._memory.to_bytes())

    def _check_new(self, entries: _Entries) -> None:
        if self._name in entries.names:
            problem = "the run goes on under another name, and this silo has followed it"
            raise ConfigError("run", problem, "Nothing is to be done: this is what is left of the time before")
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
                problem = f"{KEPT_RUNS} runs have begun since this one was heard of: it is over"
                raise ConfigError("run", problem, f"Begin another run. {_ROTATE}")
            return None
        try:
            return _Entries.from_bytes(read_private(path, _MAX_BYTES))
        except ValueError:
            problem = "damaged: it is not known which model this silo came to"
            raise ConfigError(str(path), problem, _ROTATE) from None

    def _tidy(self) -> None:
        """Forget runs of earlier epochs, and of this one all but the newest, which are over then."""
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
            return  # none, or so many that the files stay: a run that is forgotten could be played again
        write_private(self._folder / f"{self._epoch}-{_OVER}", b"".join(sorted(over)))
        for run in surplus:
            (self._folder / f"{self._epoch}-{run}").unlink(missing_ok=True)

    def _over(self) -> set[bytes]:
        """R of the runs that are over, and of which nothing else is known."""
        path = None if self._folder is None else self._folder / f"{self._epoch}-{_OVER}"
        if path is None or not path.exists():
            return set()
        data = read_private(path, _MAX_OVER_BYTES)
        if len(data) % DIGEST_BYTES:
            raise ConfigError(str(path), "damaged: it is not known which runs are over", _ROTATE)
        return {data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES)}

    @contextmanager
    def _held(self) -> Iterator[None]:
        """No other process changes the log meanwhile."""
        if self._folder is None:
            yield
            return
        try:
            with taken(self._folder.parent / _LOCK, inf):
                yield
        except OSError as error:
            remedy = "Encrypted runs need a folder of keys that this silo can write to"
            raise ConfigError(str(self._folder), f"cannot be written: {error.strerror}", remedy) from error
