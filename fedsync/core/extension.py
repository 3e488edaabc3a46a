"""Hooks of the coordinator: the base class of every optional feature that follows a run and has a say in it.

A feature that a plain run does not use is an `Extension`. The coordinator holds the extensions of its run by name and
calls them at the places below, in the order in which they were added. It names none of them on the road of an order.
Extensions are as pure as the coordinator: what they decide follows from events and times, so a run replays.

| when | hook | what the extension can do |
|---|---|---|
| a silo wants to join | `admits` | keep the silo out |
| a silo has joined, or is gone | `on_join`, `on_loss` | take note of it |
| an order has failed | `excuses` | say that it is no failure |
| an update is sound | `takes` | keep the update out of the model |
| an order is about to be given for the model | `on_order` | change its settings |
| updates were committed | `on_commit` | take note of it |
| any event was absorbed | `on_event` | take note of it |
| before stop rules and barrier are asked | `pauses` | have nothing decided, and say why |
| stop rules are asked | `stops` | end the run, and say why |
| the barrier is asked | `shows`, `wake_s` | show the barrier fewer silos, and say why; have it asked again |
| a checkpoint is written or read | `state`, `restore` | keep what it knows under its own name |

Not to be confused with a listener (`fedsync.observe.recorder.Listener`), which acts on what was decided: it sends a
message or draws a bar, and has no say.
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
"""Name -> module of `fedsync.core` and class, of the extensions that a run may come to need in its course."""


class Extension:
    """An optional feature of a run. Every hook does nothing here; a feature overrides those that it needs."""

    __slots__ = ()
    name: ClassVar[str]
    """Under which a checkpoint keeps its state; one of a kind in a run."""

    @property
    def expects(self) -> bool:
        """Whether the run has something to wait for although no silo can work."""
        return False

    def admits(self, name: str, facts: SiloFacts, at_s: float) -> bool:
        """Whether a silo may join."""
        return True

    def on_join(self, name: str, facts: SiloFacts, at_s: float) -> None:
        """A silo has joined."""

    def on_loss(self, name: str, at_s: float) -> None:
        """A silo is gone."""

    def excuses(self, event: WorkFailed) -> bool:
        """Whether an order that ended without an update counts as no failure of the silo."""
        return False

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        """Whether a sound update is kept out of the model of ``version``.

        Returns:
            None if it is not; else the reason to discard it. "" is for an order that was not given for the model.
        """
        return None

    def on_order(self, order: WorkOrder) -> WorkOrder:
        """The order as it goes to its silo; learning rate and ``config`` alone may differ."""
        return order

    def on_commit(self, version: int, updates: Sequence[UpdateMeta]) -> None:
        """The model has become ``version`` by these updates."""

    def on_event(self, event: Event) -> None:
        """An event was absorbed."""

    def pauses(self) -> str:
        """Why nothing is to be decided now; "" if nothing stands in the way."""
        return ""

    def stops(self, now_s: float) -> str | None:
        """Why the run should end now; None if it should go on."""
        return None

    def shows(self, view: ClusterView) -> tuple[ClusterView, str]:
        """The view for the barrier, and the journal's words on the difference."""
        return view, ""

    def wake_s(self, now_s: float) -> float | None:
        """When the barrier is to be asked again at the latest; None if it need not be."""
        return None

    def state(self) -> dict[str, Any]:
        """State for a checkpoint: by default the fields of a dataclass, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    def restore(self, state: dict[str, Any]) -> None:
        """Go on from the `state` of another run's extension."""
        for name, value in state.items():
            setattr(self, name, value)


class Extensions(dict[str, Extension]):
    """The extensions of a run by name; asks all of them, in the order in which they were added."""

    def add(self, extension: Extension) -> None:
        """One more extension.

        Raises:
            ConfigError: another one has its name.
        """
        name = extension.name
        if name in self or name in _OWN:
            remedy = "List each kind once, and give each class a name of its own"
            raise ConfigError("extensions", f"two extensions have the name {name!r} in checkpoints", remedy)
        self[name] = extension

    def own(self, name: str) -> Extension:
        """The extension of this name; one of FedSync's own is made if it is missing."""
        if name not in self:
            module, _, kind = _OWN[name].rpartition(".")
            self[name] = getattr(import_module(f"fedsync.{module}"), kind)()
        return self[name]

    def admit(self, name: str, facts: SiloFacts, at_s: float) -> bool:
        """Whether a silo may join, as far as all of them are concerned."""
        return all([each.admits(name, facts, at_s) for each in self.values()])  # noqa: C419  # all take note of it

    def taken(self, event: UpdateArrived, order: WorkOrder, version: int) -> str | None:
        """As `Extension.takes`, of the first one that keeps the update; all take note of it."""
        found = [each.takes(event, order, version) for each in self.values()]
        return next((why for why in found if why is not None), None)

    def ordered(self, order: WorkOrder) -> WorkOrder:
        """As `Extension.on_order`, of all of them."""
        for each in self.values():
            order = each.on_order(order)
        return order

    def paused(self) -> str:
        """As `Extension.pauses`."""
        return next((why for each in self.values() if (why := each.pauses())), "")

    def stops(self, now_s: float) -> str | None:
        """As `Extension.stops`."""
        return next((why for each in self.values() if (why := each.stops(now_s))), None)

    def shown(self, view: ClusterView) -> tuple[ClusterView, list[str]]:
        """The view for the barrier, and the journal's words on the difference."""
        told = []
        for each in self.values():
            view, said = each.shows(view)
            told += [said] if said else []
        return view, told

    def states(self) -> dict[str, dict[str, Any]]:
        """The state of each, for a checkpoint."""
        return {name: each.state() for name, each in self.items()}

    def restore(self, states: Mapping[str, dict[str, Any]]) -> None:
        """Go on from the `states` of another run's; what the caller does not ask for any longer is not missed."""
        for name, state in states.items():
            if name in self or name in _OWN:
                self.own(name).restore(state)
