"""Extension hooks of the coordinator, for optional features that change its decisions.

A feature that a plain run does not use is an `Extension`. The coordinator calls the hooks of its extensions in the
order in which they were added. As for the coordinator, decisions depend only on events and times, so a run can be
replayed. A listener (`fedsync.observe.recorder.Listener`) reacts to decisions, but cannot influence them.

| when | hook | the extension can |
|---|---|---|
| a silo wants to join | `admits` | refuse the silo |
| a silo has joined, or is gone | `on_join`, `on_loss` | record it |
| an order has failed | `excuses` | not count it as a failure |
| a sound update arrived | `takes` | keep the update out of the model |
| an order is about to be given for the model | `on_order` | change its learning rate and ``config`` |
| updates were committed | `on_commit` | record it |
| any event was absorbed | `on_event` | record it |
| before stop rules and barrier are asked | `pauses` | suspend all decisions, with a reason |
| stop rules are asked | `stops` | end the run, with a reason |
| the barrier is asked | `shows`, `wake_s` | hide silos from the barrier, with a reason; request another call |
| a checkpoint is written or read | `state`, `restore` | store its state under its own name |
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar

from fedsync.common.errors import ConfigError

if TYPE_CHECKING:
    from fedsync.core.events import Event, UpdateArrived, WorkFailed
    from fedsync.core.orders import SiloFacts, UpdateMeta, WorkOrder
    from fedsync.core.views import ClusterView

_OWN = {
    "attendance": "core.availability.Attendance",
    "steering": "core.operator.operator_execution.Steering",
    "apart": "evaluation.local_baselines.Apart",
}
"""Extensions that a run may need later: name -> module and class."""


class Extension:
    """Base class of optional features of a run. Hooks do nothing by default; a feature overrides some of them."""

    name: ClassVar[str]
    """Key of its state in checkpoints; unique in a run."""

    @property
    def expects(self) -> bool:
        """Whether the run should wait although no silo can work."""
        return False

    def admits(self, name: str, facts: SiloFacts, at_s: float) -> bool:
        return True

    def on_join(self, name: str, facts: SiloFacts, at_s: float) -> None: ...

    def on_loss(self, name: str, at_s: float) -> None: ...

    def excuses(self, event: WorkFailed) -> bool:
        return False

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        """Return why a sound update stays out of the model; None to use it, "" if the order was for another model."""
        return None

    def on_order(self, order: WorkOrder) -> WorkOrder:
        return order

    def on_commit(self, version: int, updates: Sequence[UpdateMeta]) -> None: ...

    def on_event(self, event: Event) -> None: ...

    def pauses(self) -> str:
        return ""

    def stops(self, now_s: float) -> str | None:
        return None

    def shows(self, view: ClusterView) -> tuple[ClusterView, str]:
        return view, ""

    def wake_s(self, now_s: float) -> float | None:
        return None

    def state(self) -> dict[str, Any]:
        """Return the state for a checkpoint: by default the fields of a dataclass, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def restore(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            setattr(self, name, value)


class Extensions(dict[str, Extension]):
    """Extensions of a run by name."""

    def add(self, extension: Extension) -> None:
        name = extension.name
        if name in self or name in _OWN:
            remedy = "List each kind once, and give each class a name of its own"
            raise ConfigError("extensions", f"two extensions have the name {name!r} in checkpoints", remedy)
        self[name] = extension

    def own(self, name: str) -> Extension:
        if name not in self:
            module, _, kind = _OWN[name].rpartition(".")
            self[name] = getattr(import_module(f"fedsync.{module}"), kind)()
        return self[name]

    def admit(self, name: str, facts: SiloFacts, at_s: float) -> bool:
        return all([each.admits(name, facts, at_s) for each in self.values()])  # noqa: C419  # all are called

    def taken(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        found = [each.takes(event, order, version) for each in self.values()]
        return next((why for why in found if why is not None), None)

    def ordered(self, order: WorkOrder) -> WorkOrder:
        for each in self.values():
            order = each.on_order(order)
        return order

    def paused(self) -> str:
        return next((why for each in self.values() if (why := each.pauses())), "")

    def stops(self, now_s: float) -> str | None:
        return next((why for each in self.values() if (why := each.stops(now_s))), None)

    def shown(self, view: ClusterView) -> tuple[ClusterView, list[str]]:
        told = []
        for each in self.values():
            view, said = each.shows(view)
            told += [said] if said else []
        return view, told

    def states(self) -> dict[str, dict[str, Any]]:
        return {name: each.state() for name, each in self.items()}

    def restore(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Restore the `states` of another run; states of extensions that this run lacks are ignored."""
        for name, state in states.items():
            if name in self or name in _OWN:
                self.own(name).restore(state)
