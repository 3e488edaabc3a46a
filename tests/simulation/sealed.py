"""Helpers of tests of sealed runs: five silos with digits, and readers of their journals."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fedsync.config.cluster import ClusterConfig
from fedsync.core.actions import Action
from fedsync.observe.replay import replay
from fedsync.tasks.digits import DigitsTask
from fedsync.tasks.task_protocol import SiloData, SiloSlot

NAMES = "abcde"
SILOS = ClusterConfig.model_validate({"silos": [{"name": name, "speed": 40 + 10 * ord(name)} for name in NAMES]})
SUITES = [pytest.param("{kind: pad}", marks=pytest.mark.full), "{kind: bfv}", "{kind: masked}"]


def actions(folder: Path, *kinds: type[Action]) -> list[Any]:
    """Actions of these kinds in the journal of a run, which replays."""
    return [
        action for entry in replay(folder / "journal.jsonl") for action in entry.actions if isinstance(action, kinds)
    ]


def change_data(monkeypatch: pytest.MonkeyPatch, change: Callable[[SiloData, SiloSlot], SiloData]) -> None:
    """Silos have other data than the task says."""
    honest = DigitsTask.data
    monkeypatch.setattr(DigitsTask, "data", lambda self, slot: change(honest(self, slot), slot))
