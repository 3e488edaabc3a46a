"""Which models a silo has evaluated for the server: none twice on the same samples, and each split in its time.

The same evaluation in two sums, one with other silos than the other, would be the difference of those silos. And the
test split is for what came of the run: a server that could ask as it likes would have it decide what the run does.

| on the | a silo evaluates | unless |
|---|---|---|
| validation split | the newest model, when an order brings it | it did so before |
| test split | each subject once, in an order that changes nothing | it evaluated the same model there before |

What was evaluated is on disk before an update with it leaves, so a trainer that is restarted knows it. The record is
beside the silo's keys, one for each run R (`fedsync.cipher.silo.history`). So a trainer of the same run in another
folder knows it, too, and the record stays when the folder of a trainer is removed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

from fedsync.cipher.keys.keyring import Ring
from fedsync.cipher.silo.chain_log import CHAINS
from fedsync.common.errors import ConfigError
from fedsync.common.files import OWNER_FILE, private_folder, write_atomically
from fedsync.common.locks import taken
from fedsync.core.orders import Split, Subject, WorkOrder

FILE = "asked.json"
"""Beside the silo's state, where its keys are in no folder."""

_FOLDER, _LOCK = "asked", "asked.lock"

_KEPT = 64
"""Evaluations of rounds that are remembered."""


@dataclass(slots=True)
class Asked:
    """What was evaluated.

    Args:
        file: where it is written down; None keeps it in memory.
        rounds: digest of each model, and the update that took along what was found; the newest last.
        tests: the same by subject.
    """

    file: Path | None
    rounds: list[tuple[str, str]] = field(default_factory=list)
    tests: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path | None) -> Asked:
        """The record in a file, which is empty if there is none."""
        asked = cls(file)
        asked._read()
        return asked

    @classmethod
    def of_run(cls, ring: Ring, run: bytes, state: Path | None) -> Asked:
        """The record of a run.

        Args:
            ring: the silo's keys.
            run: R.
            state: the silo's state, beside which the record is where the keys are in no folder; None for memory.
        """
        if ring.folder is None:
            return cls.load(None if state is None else state.parent / FILE)
        folder, name = private_folder(ring.folder / _FOLDER), f"{ring.group.epoch}-{run.hex()}"
        for old in folder.iterdir():
            # A run without a log of its chain is over, or has not come to a version: it has asked nothing.
            if old.name not in (name, _LOCK) and not (ring.folder / CHAINS / old.name).exists():
                old.unlink(missing_ok=True)
        return cls.load(folder / name)

    def _read(self) -> None:
        """The content of the file. A file that cannot be read counts as if all had been tested."""
        if self.file is None or not self.file.exists():
            return
        try:
            about = json.loads(self.file.read_bytes())
            self.rounds = [(str(model), str(update)) for model, update in about["rounds"]]
            self.tests = {str(name): (str(one[0]), str(one[1])) for name, one in about["tests"].items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
            self.tests = {subject.value: ("", "") for subject in Subject}

    @contextmanager
    def _held(self) -> Iterator[None]:
        """The record as it is on disk, which no other trainer changes meanwhile."""
        if self.file is None:
            yield
            return
        try:
            with taken(self.file.parent / _LOCK, inf):
                self._read()
                yield
        except OSError as error:
            remedy = "Encrypted runs need a folder of keys that this silo can write to"
            raise ConfigError(str(self.file), f"cannot be written: {error.strerror}", remedy) from error

    def admits(self, order: WorkOrder, model: str) -> bool:
        """Whether what the order found may go out; it is written down then.

        Args:
            order: what was asked; the same order, repeated, finds the same.
            model: digest of what was evaluated.

        Raises:
            ConfigError: the disk does not take it.
        """
        with self._held():
            return self._admits(order, model)

    def _admits(self, order: WorkOrder, model: str) -> bool:
        found = model, order.update_id
        if order.split is Split.VALIDATION:
            if order.subject is not Subject.LAST:
                return False
            if found in self.rounds:
                return True
            if model in dict(self.rounds):
                return False
            self.rounds = [*self.rounds, found][-_KEPT:]
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
