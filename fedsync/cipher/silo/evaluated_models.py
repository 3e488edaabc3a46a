"""Record of the models that a silo has evaluated for the server: each at most once on the same samples.

Two sums with the same evaluation, but with different other silos, would disclose the difference of those silos. And the
test split is only for the result of a run. A server with free access to it would let the test split decide what the run
does.

| split | a silo evaluates | unless |
|---|---|---|
| validation | the newest model, when an order brings it | it evaluated the model before |
| test | each subject once, in an order that changes nothing | it evaluated the same model there before |

Evaluations are recorded on disk before an update with their result leaves, so a restarted trainer knows them. The
record is beside the silo's keys, one for each run R (`fedsync.cipher.silo.history`). So a trainer of the same run in
another folder knows it, too. The record also survives the removal of a trainer's folder.
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
"""File beside the silo's state, for silos whose keys are in no folder."""

_FOLDER, _LOCK = "asked", "asked.lock"

_KEPT = 64


@dataclass(slots=True)
class Asked:
    """Record of evaluations.

    Args:
        file: file of the record; None keeps it in memory.
        rounds: digest of each model, and the update that carried its result; the newest last.
        tests: the same by subject.
    """

    file: Path | None
    rounds: list[tuple[str, str]] = field(default_factory=list)
    tests: dict[str, tuple[str, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, file: Path | None) -> Asked:
        asked = cls(file)
        asked._read()
        return asked

    @classmethod
    def of_run(cls, ring: Ring, run: bytes, state: Path | None) -> Asked:
        """Load the record of a run.

        Args:
            run: R.
            state: file of the silo's state. The record is beside it if the keys are in no folder; None: in memory.
        """
        if ring.folder is None:
            return cls.load(None if state is None else state.parent / FILE)
        folder, name = private_folder(ring.folder / _FOLDER), f"{ring.group.epoch}-{run.hex()}"
        for old in folder.iterdir():
            # A run without a chain log is over, or has reached no version: it has asked for no evaluation.
            if old.name not in (name, _LOCK) and not (ring.folder / CHAINS / old.name).exists():
                old.unlink(missing_ok=True)
        return cls.load(folder / name)

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

    @contextmanager
    def _held(self) -> Iterator[None]:
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
        """Whether the result of an order may leave; if so, it is recorded on disk (`ConfigError` if that fails).

        A repeated order is admitted again, because it finds the same. ``model`` is the digest of the evaluated model.
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
