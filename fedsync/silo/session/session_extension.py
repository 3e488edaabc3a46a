"""Extension hooks of a silo's session (its part in a run): the base class of optional features at a silo.

A session holds its run's extensions in a list and calls their hooks in the order of the list:

| when | hook | the extension can |
|---|---|---|
| the session begins | `known` | change the facts that others learn |
| an update is estimated, for the range of encrypted values | `estimated` | refuse or record it; return its weight |
| an order arrived | `allow` | change it, or refuse it by an error |
| the order's model is here | `begins` | record that training begins, or refuse the order by an error |
| the trainer is about to run | `as_trained`, `correction` | change order and gradients |
| the order was trained | `released` | change the outgoing result, or record it |
| the server asks for an evaluation | `judged` | evaluate in its place |

See `fedsync.core.extension` for features that take part in the decisions of the server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from fedsync.core.orders import Evaluation, WorkOrder
from fedsync.model.layout import Vector

if TYPE_CHECKING:
    from fedsync.train.silo_trainer import Outcome, TrainerFacts

Judge = Callable[[bool], Evaluation]
"""Evaluation of the model in question; the argument asks for gains over the silo's own model."""


class SessionExtension:
    """Base class of optional features of a silo's session. Hooks do nothing by default."""

    def known(self, facts: TrainerFacts) -> TrainerFacts:
        return facts

    def estimated(self, order: WorkOrder) -> int | None: ...

    def allow(self, order: WorkOrder) -> WorkOrder:
        return order

    def begins(self, order: WorkOrder) -> None: ...

    def as_trained(self, order: WorkOrder) -> WorkOrder:
        return order

    def correction(self, order: WorkOrder) -> Vector | None:
        """Return a term for the gradients of an order, float32 [values]; the first that is not None counts."""
        return None

    def released(self, order: WorkOrder, outcome: Outcome) -> Outcome:
        return outcome

    def judged(self, judge: Judge, what: str) -> Evaluation | None:
        """Return the answer to a request for an evaluation of ``what``; None leaves it to the session."""
        return None
