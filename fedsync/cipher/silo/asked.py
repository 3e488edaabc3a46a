"""Which models a silo has evaluated for the server: none twice on the same samples, and each split in its time.

The same evaluation in two sums, one with other silos than the other, would be the difference of those silos. And the
test split is for what came of the run: a server that could ask as it likes would have it decide what the run does.

| on the | a silo evaluates | unless |
|---|---|---|
| validation split | the newest model, when an order brings it | it did so before |
| test split | each subject once, in an order that changes nothing | it evaluated the same model there before |

What was evaluated is on disk before an update with it leaves, so a trainer that is restarted knows it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.core.orders import Split, Subject, WorkOrder

FILE = "asked.json"
"""Beside the silo's state."""

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
        """What the file has; nothing if there is none. One that cannot be read counts as if all had been tested."""
        asked = cls(file)
        if file is not None and file.exists():
            try:
                about = json.loads(file.read_bytes())
                asked.rounds = [(str(model), str(update)) for model, update in about["rounds"]]
                asked.tests = {str(name): (str(one[0]), str(one[1])) for name, one in about["tests"].items()}
            except (OSError, ValueError, KeyError, TypeError, AttributeError, IndexError):
                asked.tests = {subject.value: ("", "") for subject in Subject}
        return asked

    def admits(self, order: WorkOrder, model: str) -> bool:
        """Whether what the order found may go out; it is written down then.

        Args:
            order: what was asked; the same order, repeated, finds the same.
            model: digest of what was evaluated.

        Raises:
            ConfigError: the disk does not take it.
        """
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
