"""The calm after whatever happened: everybody does as it is asked, so everybody has to be served, and the run ends."""

import math
from collections import Counter

from fedsync.core.events import Evaluated, TimerFired, UpdateArrived
from fedsync.core.orders import Evaluation, UpdateMeta, WorkOrder, WorkReport
from tests.laws.watch import Watch, law

SPEED = 100.0
"""Of every silo in the calm [samples/s]."""

SERVED = "in the calm all are served, and what was pending is committed or discarded"

ORDERS, PATIENCE = 3, 200
"""Orders that every silo finishes in the calm, before so many events have passed."""


def calm(watch: Watch) -> None:
    """Let all silos of a run that is in whatever state work on.

    Raises:
        Exception: somebody is not served, an update is forgotten, or the run does not end.
    """
    watch.calm = True
    with watch.told(), law(SERVED):
        _serve(watch)
    with watch.told(), law("every run ends, and every update has been named"):
        _end(watch)


def _serve(watch: Watch) -> None:
    books = watch.books
    served: Counter[str] = Counter()
    # One that failed too often is at rest, for longer than any of this takes.
    waiting = [name for name, silo in books.silos.items() if silo.failures < 3]
    old = set(books.pending)
    for _ in range(PATIENCE):
        if books.closing or not books.silos:
            return
        if all(served[name] >= ORDERS for name in waiting) and not old & books.pending.keys():
            return
        end_s, name = min((_end_s(watch, name), name) for name in books.silos)
        alarm_s = min(watch.alarms, default=math.inf)
        now_s = max(watch.now_s, min(end_s, alarm_s))
        if end_s > alarm_s:
            watch.step(now_s, [TimerFired(now_s)])
            continue
        order = books.silos[name].order
        assert order is not None, "nobody works, and nobody is woken"
        served[name] += 1
        watch.step(now_s, [_arrival(name, order, steps_in_time(watch, order), now_s)])
    raise AssertionError(f"{PATIENCE} events: {waiting} did {dict(served)}, {old & books.pending.keys()} still wait")


def _arrival(name: str, order: WorkOrder, steps: int, now_s: float) -> UpdateArrived:
    samples = steps * order.batch_size
    report = WorkReport(
        order.base_version, steps, samples, samples / SPEED, 1.0 / order.round, evaluation=Evaluation(100.0, 25.0, 50)
    )
    return UpdateArrived(now_s, UpdateMeta.of(name, order, report, 5000, 40), report)


def steps_in_time(watch: Watch, order: WorkOrder) -> int:
    """Steps that the order leaves time for, one at least; one if it was halted."""
    fitting = order.max_steps if order.budget_s is None else int(order.budget_s * SPEED / order.batch_size)
    return 1 if order.update_id in watch.books.halted else max(1, min(fitting, order.max_steps))


def _end_s(watch: Watch, name: str) -> float:
    """When the silo's order will be done; never, if it has none."""
    silo = watch.books.silos[name]
    if silo.order is None:
        return math.inf
    compute_s = steps_in_time(watch, silo.order) * silo.order.batch_size / SPEED
    return max(silo.since_s + compute_s + 0.125, watch.now_s)


def _end(watch: Watch) -> None:
    books = watch.books
    now_s = watch.now_s if books.stop.seconds is None else max(watch.now_s, books.end_s)
    watch.step(now_s, [TimerFired(now_s)])
    for name in list(books.silos):
        if name in books.awaiting:
            watch.step(now_s, [Evaluated(now_s, name, books.version, Evaluation(1.0, 1.0, 1))])
    assert books.stopped
    assert books.fate.keys() == books.orders.keys()
