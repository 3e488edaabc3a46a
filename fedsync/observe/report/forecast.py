"""Speed forecasts of a run's predictor, recomputed from the run's journal."""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from fedsync.common.errors import FedSyncError, ProtocolError
from fedsync.config.cluster import silos_at_start
from fedsync.config.strategy import StrategyConfig
from fedsync.core.actions import Dispatch
from fedsync.core.events import Event, SiloJoined, SiloLost, UpdateArrived
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import WorkOrder
from fedsync.core.report_checks import check_facts, sound
from fedsync.core.speed.curve import Curve
from fedsync.core.speed.forecasts import Forecasts


class Predictions:
    """Forecasts of a new predictor (without observations) that observes the reports in the journal's order."""

    def __init__(self, forecasts: Forecasts) -> None:
        self._forecasts = forecasts
        self._curves: dict[str, Curve | None] = {}
        self._orders: dict[str, tuple[WorkOrder, float]] = {}
        self.speeds: dict[str, float] = {}

    @classmethod
    def of(cls, header: dict[str, Any]) -> Predictions | str:
        """Return predictions for the journal with this header, or the reason that none are possible."""
        try:
            config = StrategyConfig.model_validate(header["config"])
            silos = header["silos"]
            at_start = None if silos is None else silos_at_start(silos, virtual=header["runtime"] == "virtual")
            policies = config.policies(at_start)
        except (KeyError, ValidationError, FedSyncError):
            return "The configuration in the journal cannot be read, so no forecast can be recomputed."
        if policies.predictor.learns:
            return (
                f"The predictor ({config.predictor.kind}) trains while a run goes on. Its forecasts are not in the "
                "journal, and the report does not train it again."
            )
        return cls(Forecasts(policies.predictor, policies.declared_speeds, policies.sizing.fitter))

    def add(self, entry: JournalEntry) -> None:
        """Add one entry; ``speeds`` gets a forecast [samples/s] for every order to a silo with a known curve."""
        for event in entry.events:
            self._absorb(event)
        for action in entry.actions:
            if isinstance(action, Dispatch):
                order, curve = action.order, self._curves.get(action.silo)
                self._orders[action.silo] = (order, entry.at_s)
                if curve is not None:
                    self.speeds[order.update_id] = order.batch_size / curve.step_s(order.batch_size)

    def _absorb(self, event: Event) -> None:
        match event:
            case SiloJoined(_, name, facts):
                self._orders.pop(name, None)
                try:
                    check_facts(name, facts)
                except ProtocolError:
                    return
                self._curves[name] = self._forecasts.first(name, facts)
            case SiloLost(_, name, _):
                self._orders.pop(name, None)
            case UpdateArrived(at_s, meta, report):
                order, since_s = self._orders.get(meta.silo, (None, 0.0))
                if order is None or order.update_id != meta.update_id:
                    return
                del self._orders[meta.silo]
                if not sound(order, meta, report):
                    return
                self._curves[meta.silo] = self._forecasts.observe(meta.silo, report, at_s - since_s)
