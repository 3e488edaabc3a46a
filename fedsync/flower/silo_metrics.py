"""Aggregation of silos' metrics by the user's own functions, as in Flower's strategies."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import Result

from fedsync.common.errors import ConfigError
from fedsync.core.events import Evaluated, Event, UpdateArrived
from fedsync.core.extension import Extension
from fedsync.core.orders import Evaluation, Split, Subject, UpdateMeta, WorkOrder
from fedsync.core.report_checks import usable
from fedsync.core.state import Policies

MetricsAggrFn = Callable[[list[RecordDict], str], MetricRecord]
"""Function that combines the silos' records into one, like ``train_metrics_aggr_fn`` of Flower's strategies."""

EXAMPLES = "num-examples"
"""Entry of each record with its number of samples, as in Flower's strategies."""

_MOST_OPEN = 8
"""Number of newest versions whose evaluations are still collected."""

_MOST_WAITING = 4096
"""Maximum number of updates that wait for their commit; some are never committed."""

Figures = dict[str, Any]


class SiloMetrics(Extension):
    """Extension that collects the silos' metrics and calls the user's functions.

    The training function is called at each commit. Silos evaluate a version as they receive it, so the evaluation
    function is called again when more evaluations of a version are in at a commit. The last result counts.
    """

    name: ClassVar[str] = "silo_metrics"

    def __init__(self, train: MetricsAggrFn | None, evaluate: MetricsAggrFn | None) -> None:
        self._train, self._evaluate = train, evaluate
        self._waiting: dict[str, Figures] = {}
        self._open: dict[int, dict[str, Figures]] = {}
        self._new: set[int] = set()
        self._trained: dict[int, Figures] = {}
        self._evaluated: dict[int, Figures] = {}

    def joined(self, policies: Policies, *, sealed: bool) -> Policies:
        """Return policies with this extension, if the user gave a function; `ConfigError` if silos seal its metrics."""
        if self._train is None and self._evaluate is None:
            return policies
        if sealed:
            remedy = "Leave it out, or write cipher.metrics: plain, if the silos' owners allow it"
            raise ConfigError("metrics_aggr_fn", "silos of this run seal the metrics that it would see", remedy)
        return replace(policies, extensions=(*policies.extensions, lambda: self))

    def takes(self, event: UpdateArrived, order: WorkOrder, version: int) -> None:
        meta, report = event.meta, event.report
        loss = {} if report.loss is None else {"train_loss": report.loss}
        self._waiting[meta.update_id] = {**report.metrics, **loss, EXAMPLES: meta.examples}
        if len(self._waiting) > _MOST_WAITING:
            del self._waiting[next(iter(self._waiting))]
        self._note(meta.base_version, meta.silo, report.evaluation)

    def on_event(self, event: Event) -> None:
        match event:
            case Evaluated(silo=silo, version=version, split=Split.VALIDATION, subject=Subject.LAST) if not event.owner:
                self._note(version, silo, event.evaluation)

    def _note(self, version: int, silo: str, told: Evaluation | None) -> None:
        found = usable(silo, told)
        if found is None or not found.samples:
            return
        sums = {"loss": found.loss, "accuracy": found.correct}
        means = {name: total / found.samples for name, total in sums.items() if total is not None}
        others = {name: mean for name, (mean, _) in found.metrics.items()}
        self._open.setdefault(version, {})[silo] = {**others, **means, EXAMPLES: found.samples}
        self._new.add(version)

    def on_commit(self, version: int, updates: Sequence[UpdateMeta]) -> None:
        found = [self._waiting.pop(meta.update_id) for meta in updates if meta.update_id in self._waiting]
        if self._train is not None and found:
            self._trained[version] = _made(self._train, found, "train_metrics_aggr_fn")
        self._look()
        for old in sorted(self._open)[:-_MOST_OPEN]:
            del self._open[old]

    def _look(self) -> None:
        for version in sorted(self._new & self._open.keys()):
            if self._evaluate is not None:
                records = [self._open[version][silo] for silo in sorted(self._open[version])]
                self._evaluated[version] = _made(self._evaluate, records, "evaluate_metrics_aggr_fn")
        self._new.clear()

    def fill(self, result: Result) -> None:
        """Add the functions' results to Flower's result; they override FedSync's own metrics of the same round."""
        self._look()
        for made, told in (
            (self._trained, result.train_metrics_clientapp),
            (self._evaluated, result.evaluate_metrics_clientapp),
        ):
            for version, figures in made.items():
                told[version] = MetricRecord({**told.get(version, {}), **figures})

    def state(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("_waiting", "_open", "_new", "_trained", "_evaluated")}


def _made(function: MetricsAggrFn, figures: Sequence[Mapping[str, Any]], place: str) -> Figures:
    made = function([RecordDict({"metrics": MetricRecord(dict(each))}) for each in figures], EXAMPLES)
    if not isinstance(made, MetricRecord):
        raise ConfigError(place, f"it returned {type(made).__name__}", "Return a MetricRecord")
    return dict(made)
