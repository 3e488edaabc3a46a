"""Extensions: optional features that a plain run neither has nor imports, and that keep their state in checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from typing import ClassVar

import pytest

from fedsync.common.errors import ConfigError
from fedsync.core.actions import Discard
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, UpdateArrived
from fedsync.core.extension import Extension
from fedsync.core.operator.operator_commands import PauseRun
from fedsync.core.orders import Presence, SiloFacts, WorkOrder
from fedsync.evaluation.local_baselines import Apart
from fedsync.policies.extensions.feature_base import FeaturePolicy, OwnExtension, OwnListener
from tests.core.test_operator_commands import answer, ask, begin, joined, orders


@dataclass(slots=True)
class Counting(Extension):
    """Counts what it is told, ends the run after two updates and keeps one silo out of it and another's updates."""

    name: ClassVar[str] = "counting"
    updates: int = 0
    lost: tuple[str, ...] = ()

    def admits(self, name: str, facts: SiloFacts, at_s: float) -> bool:
        return name != "stranger"

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        return "not this one" if event.meta.silo == "b" else None

    def on_event(self, event: Event) -> None:
        self.updates += isinstance(event, UpdateArrived)

    def stops(self, now_s: float) -> str | None:
        return f"{self.updates} updates are enough" if self.updates >= 2 else None


def counting(*silos: str) -> tuple[Coordinator, dict[str, WorkOrder]]:
    coordinator, _ = begin("x")
    coordinator = Coordinator(replace(coordinator._policies, extensions=(Counting,)))
    return coordinator, orders(coordinator.handle(joined(*silos), 0.0))


def test_an_extension_keeps_a_silo_out_and_an_update_and_ends_the_run() -> None:
    coordinator, first = counting("a", "b", "stranger")
    assert set(first) == {"a", "b"}
    entry = coordinator.handle([answer("b", first["b"], 1.0)], 1.0)
    assert [action.reason for action in entry.actions if hasattr(action, "reason")] == ["not this one"]
    entry = coordinator.handle([answer("a", first["a"], 2.0)], 2.0)
    assert entry.reason.endswith("2 updates are enough")


def test_what_an_extension_knows_is_in_the_checkpoint_under_its_name() -> None:
    coordinator, first = counting("a", "b")
    coordinator.handle([answer("a", first["a"], 1.0)], 1.0)
    saved = coordinator.state()
    assert saved["extensions"] == {"counting": {"updates": 1, "lost": ()}}
    other, _ = counting()
    other.restore(saved)
    assert other.handle([answer("b", first["b"], 2.0)], 2.0).reason.endswith("2 updates are enough")


@dataclass(slots=True)
class Keeping(Extension):
    """Keeps every update without a reason."""

    name: ClassVar[str] = "keeping"

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        return ""


def test_an_update_that_an_extension_keeps_is_discarded_by_name_and_all_extensions_hear_of_it() -> None:
    coordinator, _ = begin("x")
    coordinator = Coordinator(replace(coordinator._policies, extensions=(Keeping, Counting)))
    [joining] = joined("a", at_s=0.0)
    facts = replace(joining.facts, presence=Presence(10.0, 20.0))
    first = orders(coordinator.handle([replace(joining, facts=facts), *joined("b")], 0.0))
    arrived = answer("a", first["a"], 1.0)
    entry = coordinator.handle([replace(arrived, report=replace(arrived.report, presence=Presence(5.0, 9.0)))], 1.0)
    assert Discard(first["a"].update_id, "an extension keeps it out of the model") in entry.actions
    assert coordinator.state()["extensions"]["attendance"]["windows"] == {"a": (6.0, 10.0)}


def test_a_sealed_run_ends_by_an_extension_only_between_versions() -> None:
    """Silos evaluate a version once, so the last one must not have been evaluated for an update in work."""
    coordinator, _ = begin("x")
    coordinator = Coordinator(replace(coordinator._policies, tally=2, extensions=(Counting,)))
    first = orders(coordinator.handle(joined("a", "c", "d"), 0.0))
    coordinator.handle([answer("a", first["a"], 1.0)], 1.0)
    entry = coordinator.handle([answer("c", first["c"], 2.0)], 2.0)
    assert not coordinator.stopped and "are enough" not in entry.reason
    entry = coordinator.handle([answer("d", first["d"], 3.0)], 3.0)
    assert "3 updates are enough" in entry.reason


@pytest.mark.parametrize("taken", ["counting", "attendance"])
def test_two_extensions_of_one_name_are_refused(taken: str) -> None:
    coordinator, _ = begin("x")
    kinds = (Counting, type("Other", (Counting,), {"name": taken, "__slots__": ()}))
    with pytest.raises(ConfigError, match=f"two extensions have the name '{taken}'"):
        Coordinator(replace(coordinator._policies, extensions=kinds))


def test_features_of_our_own_are_there_from_the_moment_at_which_they_are_needed() -> None:
    coordinator, _ = begin("a", "b")
    assert coordinator.state()["extensions"] == {}
    ask(coordinator, PauseRun(), 1.0)
    [part_time] = joined("c", at_s=2.0)
    facts = replace(part_time.facts, presence=Presence(10.0, 20.0))
    coordinator.handle([replace(part_time, facts=facts)], 2.0)
    assert coordinator.state()["extensions"]["attendance"]["windows"] == {"c": (12.0, 22.0)}
    other, _ = begin("x")
    other.restore(coordinator.state())
    assert other.paused and other.state()["extensions"] == coordinator.state()["extensions"]


@pytest.mark.slow
def test_a_plain_run_imports_no_feature_that_it_does_not_use() -> None:
    code = (
        "import sys, tempfile; from pathlib import Path; from fedsync.cli import Runtime, runner\n"
        "from fedsync.config.cluster import ClusterConfig; from fedsync.config.strategy import StrategyConfig\n"
        "config = StrategyConfig.load('bsp', ['task={kind: digits}', 'stop.rounds=2', 'local.steps=2'])\n"
        "cluster = ClusterConfig.model_validate({'silos': [{'name': n, 'speed': 400.0} for n in 'abc']})\n"
        "runner(Runtime.VIRTUAL)(config, cluster, Path(tempfile.mkdtemp()) / 'out')\n"
        "print(*sorted(name for name in sys.modules if name.startswith('fedsync.')))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    imported = run.stdout.split()
    assert "fedsync.core.coordinator" in imported and "fedsync.core.operator.operator_execution" not in imported


def test_samples_of_an_order_that_only_scores_are_no_training() -> None:
    """Alone a silo trains as many samples as it processed in the run, and scoring is none of that."""
    _, first = begin("a")
    apart, arrived = Apart(), answer("a", first["a"], 1.0)
    assert apart.takes(arrived, first["a"], 0) is None and apart.processed == {"a": arrived.report.samples}
    scoring = replace(first["a"], learning_rate=0.0)
    assert scoring.scores_only and apart.takes(arrived, scoring, 0) is None
    assert apart.processed == {"a": arrived.report.samples}


class Failing(Extension):
    name = "failing"

    def on_event(self, event: object) -> None:
        raise ValueError("boom")

    def stops(self, now_s: float) -> str | None:
        return 3  # type: ignore[return-value]

    def on_order(self, order: WorkOrder) -> WorkOrder:
        return None  # type: ignore[return-value]

    def follow(self, ledger: object) -> None:
        raise json.loads("{")


def test_errors_of_a_user_s_code_name_hook_and_line() -> None:
    own = OwnExtension(Failing(), "energy")
    line = Failing.on_event.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError, match=rf"kind 'energy': its on_event failed: ValueError: boom.*{line}"):
        own.on_event(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"its stops returns 3, which is int\. Return str or None"):
        own.stops(0.0)
    with pytest.raises(ConfigError, match=r"its on_order returns None, which is NoneType\. Return WorkOrder"):
        own.on_order(object())  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"its state failed: TypeError: .*Correct state of Failing$"):
        own.state()  # no line of the user's
    with pytest.raises(ConfigError, match=r"its follow failed: JSONDecodeError: .*test_extension\.py, line"):
        OwnListener(Failing(), "energy").follow(object())
    assert (own.name, own.pauses(), own.admits("a", None, 0.0)) == ("failing", "", True)  # type: ignore[arg-type]


def test_an_extension_whose_state_no_checkpoint_can_store_is_refused_where_it_is_built() -> None:
    class Plain(FeaturePolicy):
        def build(self) -> Extension:
            return Failing()

    with pytest.raises(ConfigError, match=r"Failing is no dataclass, .*Write @dataclass above the class"):
        Plain().followed()


def test_every_hook_of_a_user_s_code_is_watched() -> None:
    hooks = {name for name in vars(Extension) if not name.startswith("_")} - {"name"}
    assert hooks <= vars(OwnExtension).keys()
