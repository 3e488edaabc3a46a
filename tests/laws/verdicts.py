"""What a barrier was shown and what it answered, and whether the coordinator did as it said."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import pytest

from fedsync.core.actions import Action, Commit, Discard, Dispatch, HaltEarly, Probe, Rollback, Savepoint, WakeAt
from fedsync.core.orders import LocalWork, UpdateMeta
from fedsync.core.protocols import AnyBarrier
from fedsync.core.views import ClusterView, SiloView, Verdict
from fedsync.policies.predict.predictor_base import Ema

if TYPE_CHECKING:
    from tests.laws.watch import Books


@dataclass(frozen=True, slots=True)
class Asked:
    """One question to a barrier, as it was then."""

    now_s: float
    version: int
    seed: int
    silos: Mapping[str, SiloView]
    pending: Mapping[str, UpdateMeta]
    work: Mapping[str, LocalWork]
    verdict: Verdict


@dataclass(slots=True)
class Spy:
    """A barrier that writes down what it is asked, and asks twice: a decision changes nothing but its own state."""

    inner: AnyBarrier
    asked: list[Asked] = field(default_factory=list)
    times: int = 0

    def init(self) -> Any:
        return self.inner.init()

    def decide(self, state: Any, view: ClusterView) -> tuple[Any, Verdict]:
        after, verdict = self.inner.decide(state, view)
        if self.inner.decide(state, view) != (after, verdict):
            error = AssertionError(f"asked twice, the barrier says {verdict} and then something else")
            error.add_note("broken: a decision is a function")
            raise error
        work = {name: view.work[name] for name in verdict.release if name in view.silos}
        silos, pending = dict(view.silos), dict(view.pending)
        self.asked.append(Asked(view.now_s, view.version, view.seed, silos, pending, work, verdict))
        return after, verdict


def carried_out(
    books: Books, asked: Asked, actions: list[Action], over: Callable[[], bool], law: Callable[..., Any]
) -> list[Action]:
    """Compare one verdict with the next of the actions, and take both into the books; returns the other actions."""
    with law("a barrier sees what happened"):
        _sees(books, asked)
    rest = list(actions)
    verdict = asked.verdict
    with law("a model is committed or taken back as the barrier says"):
        _model(books, verdict, rest)
    if verdict.commit and over():
        return rest
    with law("who is released gets work, and was idle", len(verdict.release)):
        _release(books, asked, rest)
    with law("who is to stop or to tell is asked, once an order", len(verdict.stop_now) + len(verdict.probe)):
        for name in verdict.stop_now:
            update_id = books.in_work(name)
            assert update_id is not None
            if update_id not in books.halted:
                books.halted.add(update_id)
                assert rest.pop(0) == HaltEarly(name, update_id)
        for name in verdict.probe:
            assert rest.pop(0) == Probe(name, books.in_work(name) or "nobody")
    if not verdict.commit and rest and isinstance(rest[0], WakeAt):
        with law("an alarm is set for when the barrier says"):
            assert verdict.wake_at_s is not None
            assert rest.pop(0) == WakeAt(verdict.wake_at_s)
    return rest


def _sees(books: Books, asked: Asked) -> None:
    assert (asked.version, asked.seed) == (books.version, books.policies.seed)
    assert list(asked.pending.items()) == list(books.pending.items())
    assert list(asked.silos) == list(books.silos)
    for name, silo in asked.silos.items():
        assert replace(silo, forecast=None) == books.silos[name]
        if books.policies.declared_speeds:
            assert silo.forecast is not None
            assert silo.forecast.speed == silo.facts.declared_speed
        elif (
            books.policies.predicts
            and isinstance(books.policies.predictor, Ema)
            and books.policies.sizing.fitter is None
        ):
            _foresees(books, name, silo)


def _foresees(books: Books, name: str, silo: SiloView) -> None:
    """An average of the silo's own speeds; what an order costs besides is the median of its last three."""
    if name not in books.speeds:
        assert silo.forecast is None
        return
    assert silo.forecast is not None
    assert silo.forecast.speed == pytest.approx(books.speeds[name], rel=1e-9)
    overheads = books.overheads[name]
    usual = sorted(overheads)[1] if len(overheads) == 3 else overheads[-1]
    assert silo.forecast.overhead_s == pytest.approx(usual, rel=1e-9, abs=1e-12)


def _model(books: Books, verdict: Verdict, rest: list[Action]) -> None:
    if verdict.rollback:
        books.version += 1
        assert rest.pop(0) == Rollback(books.version)
    if verdict.commit:
        names = sorted(verdict.commit)
        assert len(set(names)) == len(names)
        metas = [books.pending.pop(name) for name in names]
        assert not [name for name in names if name in books.fate], "what was committed or discarded is gone"
        books.fate.update(dict.fromkeys(names, "committed"))
        books.version += 1
        books.commits += 1
        commit = rest.pop(0)
        assert isinstance(commit, Commit)
        weights = books.policies.weigher.coefficients(metas, books.version)
        assert list(commit.weights.items()) == list(zip(names, weights, strict=True))
        assert (commit.version, commit.toward) == (books.version, books.policies.weigher.toward)
    for name in verdict.discard:
        del books.pending[name]
        books.fate[name] = "discarded"
        action = rest.pop(0)
        assert isinstance(action, Discard)
        assert action.update_id == name
        assert action.reason, "who reads the journal is not told why"
    if verdict.savepoint:
        assert rest.pop(0) == Savepoint(books.version)


def _release(books: Books, asked: Asked, rest: list[Action]) -> None:
    verdict, sizing = asked.verdict, books.policies.sizing
    fresh = sizing.plan(asked.silos, books.found_caps) if verdict.release and sizing.adaptive is None else {}
    for name in verdict.release:
        silo = books.silos[name]
        assert silo.order is None, f"{name} has {silo.order}"
        action = rest.pop(0)
        assert isinstance(action, Dispatch)
        assert action.silo == name
        order = action.order
        books.issued[name] += 1
        assert order.update_id == f"{name}/{books.issued[name]}"
        assert order.update_id not in books.orders
        assert order.seed not in {other.seed for _, other in books.orders.values()}
        assert (order.base_version, order.round) == (books.version, books.issued[name])
        work = asked.work[name] if sizing.adaptive is None else None
        if work is not None:
            assert work == fresh[name], "the plan is not that of these forecasts and limits"
            assert (order.batch_size, order.learning_rate) == (work.batch_size, work.learning_rate)
            assert order.max_steps == verdict.steps.get(name, work.steps)
        caps = (silo.facts.examples, silo.facts.memory_samples, books.found_caps.get(name), sizing.cap)
        assert 1 <= order.batch_size <= min(cap for cap in caps if cap is not None)
        assert order.max_steps >= 1
        assert (order.budget_s, order.overrun) == (verdict.budget_s.get(name), verdict.overrun)
        books.orders[order.update_id] = name, order
        books.silos[name] = replace(silo, order=order, since_s=asked.now_s, progress_steps=0)
