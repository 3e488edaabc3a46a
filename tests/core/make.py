"""Short ways to write events and policies down. Everything can be replaced by keyword."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from fedsync.core.actions import Action, Dispatch, KeepBest
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import Event, SiloJoined, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, LocalWork, SiloFacts, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.speed.sizing import Sizing
from fedsync.core.state import Policies
from fedsync.core.stopping import StopRules
from fedsync.core.views import ClusterView, Verdict
from fedsync.policies.aggregate.weighers import WeightedMean
from fedsync.policies.barrier.kinds.bulk import Bsp
from fedsync.policies.predict.predictor_base import Ema

WORK = LocalWork(steps=4, batch_size=8, learning_rate=0.1)


def policies(**changes: Any) -> Policies:
    """BSP over equal work, three rounds."""
    plain = Policies(
        seed=7,
        predictor=Ema(alpha=1.0),
        sizing=Sizing(WORK),
        barrier=Bsp(),
        weigher=WeightedMean(),
        stop=StopRules(rounds=3),
    )
    return replace(plain, **changes)


def joined(*names: str, at_s: float = 0.0, **facts: Any) -> list[Event]:
    """Silos with 1000 examples each."""
    return [SiloJoined(at_s, name, SiloFacts(**{"examples": 1000, **facts})) for name in names]


def orders(entry: JournalEntry) -> dict[str, WorkOrder]:
    """What the entry dispatches, by silo."""
    return {action.silo: action.order for action in entry.actions if isinstance(action, Dispatch)}


def of_type(entry: JournalEntry, kind: type[Action]) -> list[Any]:
    return [action for action in entry.actions if isinstance(action, kind)]


def but_best(entry: JournalEntry) -> tuple[Action, ...]:
    """What is done beside keeping the best version."""
    return tuple(action for action in entry.actions if not isinstance(action, KeepBest))


def report(order: WorkOrder, **changes: Any) -> WorkReport:
    """The whole order done, at 100 samples a second."""
    done = WorkReport(
        base_version=order.base_version,
        steps=order.max_steps,
        samples=order.planned_samples,
        compute_s=order.planned_samples / 100,
        loss=1.0,
    )
    return replace(done, **changes)


def answer(silo: str, order: WorkOrder, at_s: float = 1.0, **changes: Any) -> UpdateArrived:
    """An update for ``order``; the meta agrees with the report."""
    said = report(order, **changes)
    meta = UpdateMeta(
        order.update_id, silo, said.base_version, said.steps, said.samples, examples=1000, nbytes=40, loss=said.loss
    )
    return UpdateArrived(at_s, meta, said)


def scored(accuracy: float, samples: int = 100) -> Evaluation:
    """An evaluation with this accuracy and a mean loss of 2."""
    return Evaluation(loss=2.0 * samples, correct=accuracy * samples, samples=samples)


def begin(*names: str, **changes: Any) -> tuple[Coordinator, dict[str, WorkOrder]]:
    """A coordinator that has just dispatched the first orders to ``names``."""
    coordinator = Coordinator(policies(**changes))
    return coordinator, orders(coordinator.handle(joined(*names), 0.0))


@dataclass(slots=True)
class Scripted:
    """A barrier that answers as told and remembers what it saw. Not a model of any real one.

    ``answers`` are taken one after the other; after the last it says nothing more.
    """

    answers: list[Callable[[ClusterView], Verdict]] = field(default_factory=list)
    seen: list[ClusterView] = field(default_factory=list)

    def init(self) -> None:
        return None

    def decide(self, state: None, view: ClusterView) -> tuple[None, Verdict]:
        self.seen.append(ClusterView(view.now_s, view.version, dict(view.silos), dict(view.pending)))
        return None, self.answers.pop(0)(view) if self.answers else Verdict()
