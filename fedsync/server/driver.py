"""Flower driver: the main loop that connects the coordinator with silos behind a transport.

The same loop serves Flower's simulation engine and real silos. Each iteration passes all occurrences to the coordinator
as one batch of events, and carries out the coordinator's actions:

| occurrence | event |
|---|---|
| a node is new | none: the driver asks for its identity; the `Hello` in reply becomes `SiloJoined` |
| a node is gone | `SiloLost`; its pending messages are forgotten |
| an order is in progress | `Progressed`; the driver asks for the order again |
| a valid update arrived | `UpdateArrived` |
| an order failed, was refused, is overdue, or got an invalid reply | `WorkFailed` |
| an evaluation arrived or failed | `Evaluated` |
| nothing happened, and a predictor wants to train | `Spare` |
| the operator sends a request | `OperatorAsked`; answered when a checkpoint contains the result |

A commit of encrypted updates may be *blocked* until silos have answered the aggregator's questions. Orders and
evaluations are held meanwhile. A checkpoint is on disk before any message from which silos learn of a commit.
"""

from __future__ import annotations

import heapq
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import ProtocolError, RunError
from fedsync.core import actions
from fedsync.core.coordinator import Coordinator
from fedsync.core.events import (
    SERVER_RESTARTED,
    Event,
    Progressed,
    SiloJoined,
    SiloLost,
    TimerFired,
    UpdateArrived,
    WorkFailed,
)
from fedsync.core.journal import JournalEntry
from fedsync.core.orders import Evaluation, UpdateMeta, WorkOrder, WorkReport
from fedsync.core.report_checks import check_sealed
from fedsync.model.layout import Layout
from fedsync.model.tensor_parts import CommonForm
from fedsync.model.transfer import DurableAggregator, Payload, VersionMismatch, store
from fedsync.observe.recorder import Recorder
from fedsync.observe.steered import drops_in
from fedsync.server.checkpoints import Checkpoints, Moment
from fedsync.server.driver_extension import DriverExtension
from fedsync.server.nodes import Admission, Nodes, make_regions
from fedsync.server.outbox import Outbox, PendingMessage
from fedsync.server.timeouts import IdleTimeout, IdleTraining, Timeouts
from fedsync.silo import protocol
from fedsync.silo.owner.refusals import explained
from fedsync.transport.port import SiloAnswer, Transport, needed

logger = foreign.logger(__name__)


class FlowerDriver:
    """Main loop that runs a coordinator to its end.

    Args:
        report_s: interval of progress reports on orders, and the longest time until a halt reaches a silo [s]; None
            uses the interval of ``timing``.
        resumed: state of the restored coordinator and aggregator, if another process began the run.
        adds: whether a relay may add up the updates of its silos before a commit.
    """

    def __init__(
        self,
        transport: Transport,
        coordinator: Coordinator,
        aggregator: DurableAggregator,
        layout: Layout,
        form: CommonForm,
        spec: str,
        recorder: Recorder,
        timing: Timeouts,
        report_s: float | None = None,
        admission: Admission | None = None,
        checkpoints: Checkpoints | None = None,
        resumed: Moment | None = None,
        extensions: Sequence[DriverExtension] = (),
        adds: bool = False,
    ) -> None:
        self._coordinator, self._aggregator = coordinator, aggregator
        self._form, self._recorder = form, recorder
        self._timing, self._extensions = timing, extensions
        self._nodes = Nodes(
            transport, admission, timing.look_s, partial(make_regions, layout, adds=adds, hold_s=timing.hold_s)
        )
        self.refusals = self._nodes.refusals
        self._checkpoints, self._resumed = checkpoints, resumed
        report_s = timing.report_s if report_s is None else report_s
        self._outbox = Outbox(transport, self._nodes, spec, timing, report_s, aggregator, layout.nbytes)
        self._held: list[actions.Action] = []
        self._unsaved = False
        self._resting = deque[tuple[float, PendingMessage, str]]()
        self._timers = list(resumed.timers) if resumed is not None else []
        self._start_s = time.monotonic() - (0.0 if resumed is None else resumed.elapsed_s)
        self._spare = IdleTraining(timing.spare_s)
        self._vigil = IdleTimeout(timing.join_timeout_s, self._now_s())

    def run(self) -> None:
        """Run until the coordinator stops; `RunError` if no silo had work for too long, or the run ended in failure."""
        looks, idle = Backoff(self._timing.poll_s, self._timing.longest_poll_s, factor=1.5), 0
        events = self._come_back(self._resumed) if self._resumed is not None else []
        if self._resumed is None:
            self._save()
        while True:
            events = [*events, *self._replies(), *self._membership(), *self._overdue(), *self._flush()]
            if not events:
                self._check_alive()
                for each in self._extensions:
                    each.on_idle()
                if self._coordinator.unlearned and any(sent.order is not None for sent in self._outbox.waiting):
                    events = self._spare.events(self._now_s())
            if not events:
                self._outbox.wait(looks.pause_s(idle))
                idle += 1
                continue
            idle = 0
            now_s = self._now_s()
            while events:
                began_s = time.monotonic()
                entry = self._coordinator.handle(events, now_s)
                self._spare.measure(events, time.monotonic() - began_s)
                self._recorder.record(entry)
                for dropped in drops_in(entry) if entry.steered else ():
                    self._aggregator.leave(dropped.silo)
                    self._carry_out_held()  # without a checkpoint: the aggregator lacks the entry's commit until below
                for action in entry.actions:
                    self._carry_out(action)
                if self._coordinator.able:
                    self._vigil.wake(now_s)
                self._save(entry)
                # A send that fails at once causes a further event.
                events = self._flush()
                for each in self._extensions:
                    each.on_saved(entry)
                for action in entry.actions:
                    if isinstance(action, actions.Stop):
                        if action.failed:
                            raise RunError(action.reason)
                        return

    def _now_s(self) -> float:
        return time.monotonic() - self._start_s

    def _come_back(self, moment: Moment) -> list[Event]:
        """Wait for the silos of the previous process, which count as lost and joined again; if the run was about to
        end, only silos that stay away count as lost.
        """
        silos = moment.silos if moment.evaluating is None else ()
        events: list[Event] = [SiloLost(self._now_s(), name, SERVER_RESTARTED) for name in silos]
        former, end_s = set(moment.silos), self._now_s() + self._timing.return_timeout_s
        missing = former
        while missing and self._now_s() < end_s:
            events += [*self._replies(), *self._membership(), *self._flush()]
            missing = former - self._nodes.by_name.keys()  # a silo that came may be gone again
            time.sleep(self._timing.poll_s)
        for name in missing:
            self._aggregator.leave(name)
        if moment.evaluating is None:
            return events
        for name in sorted(former - missing):
            self._outbox.evaluate(name, protocol.EvaluateModel.of(moment.evaluating), self._now_s())
        return [SiloLost(self._now_s(), name, SERVER_RESTARTED) for name in sorted(missing)]

    def _save(self, entry: JournalEntry | None = None) -> None:
        if self._checkpoints is None or not self._checkpoints.due(entry):
            return
        coordinator, aggregator, position = self._coordinator, self._aggregator.state(), self._recorder.position()
        self._checkpoints.save(coordinator, aggregator, self._now_s(), position, tuple(self._timers))

    def _check_alive(self) -> None:
        working = any(
            isinstance(sent.request, protocol.Train | protocol.EvaluateModel) for sent in self._outbox.waiting
        )
        if self._coordinator.paused or (self._coordinator.able and (self._timers or working)):
            self._vigil.wake(self._now_s())
        else:
            self._vigil.check(self._now_s(), self._nodes.by_name)

    # Events.

    def _replies(self) -> list[Event]:
        events = [self._event(sent, answer) for sent, answer in self._outbox.replies(self._now_s())]
        return [event for event in events if event is not None]

    def _event(self, sent: PendingMessage, answer: SiloAnswer) -> Event | None:
        now_s, name = self._now_s(), self._nodes.sender(sent.node)
        try:
            reply, payload = self._outbox.read(sent, answer)
            match sent.request, reply:
                case protocol.Describe(), protocol.Hello():
                    return self._hello(sent.node, reply, payload, now_s)
                case protocol.Train(order), protocol.InProgress():
                    return self._go_on(sent, order, reply, now_s)
                case protocol.Train(order), WorkReport():
                    update = None if answer.summed else needed(payload, name)
                    return self._update(name, order, reply, update, now_s)
                case protocol.EvaluateModel(version) as asked, protocol.Attestation(pooled):
                    self._aggregator.holds(name, version)
                    return asked.answered(now_s, name, None, pooled)
                case protocol.EvaluateModel() as asked, Evaluation() if not self._aggregator.seals_figures:
                    if not asked.subject.own:
                        self._aggregator.holds(name, asked.version)
                    return asked.answered(now_s, name, reply)
                case ((protocol.Train() | protocol.EvaluateModel()), VersionMismatch(holds, announcement)):
                    if announcement:
                        self._aggregator.announce(name, announcement)
                    self._send_again(sent, name, holds)
                case protocol.Question(), protocol.Answer():
                    self._aggregator.answer(name, needed(payload, name))
                    self._go_on_if_open()
                case protocol.AskSnapshot(), protocol.Snapshot(version):
                    self._aggregator.put_snapshot(name, version, needed(payload, name))
                case protocol.Train(), protocol.Refused(code=protocol.Refusal.BUDGET):
                    return self._lost(name, explained(name, reply), now_s)
                case protocol.Train(), protocol.Refused(code=protocol.Refusal.DISK):
                    self._resting.append((now_s + self._timing.rest_s, sent, explained(name, reply)))
                case asked, protocol.Refused():
                    if isinstance(asked, protocol.Describe):
                        self._nodes.refuses(sent.node, reply)
                    return self._failed(sent, explained(name, reply), reply.back_s)
                case asked, _:
                    answered = f"{type(asked).__name__} is answered with {type(reply).__name__}"
                    raise ProtocolError(name, "message", answered)
        except ProtocolError as error:
            return self._failed(sent, error)
        return None

    def _failed(self, sent: PendingMessage, why: str | ProtocolError, back_s: float | None = None) -> Event | None:
        """Return the event, if any, for a message without a usable answer; ``back_s`` as in `WorkFailed`."""
        now_s, name, reason = self._now_s(), self._nodes.sender(sent.node), str(why)
        (logger.debug if isinstance(sent.request, protocol.Train | protocol.Describe) else logger.warning)("%s", reason)
        match sent.request:
            case protocol.Train(order):
                return WorkFailed(now_s, name, order.update_id, reason, back_s)
            case protocol.EvaluateModel() as asked:
                return asked.answered(now_s, name, None)
            case protocol.Question():
                self._aggregator.give_up(name)
                self._go_on_if_open()
            case protocol.Describe():
                # The silo is still unidentified: ask again at a later look at the nodes.
                self._nodes.ask_again(sent.node, why)
        return None

    def _send_again(self, sent: PendingMessage, name: str, holds: int) -> None:
        """Send again what the silo needs, because it holds another version than the server assumed."""
        self._aggregator.holds(name, holds)
        if sent.again or self._aggregator.blocked:
            raise ProtocolError(name, "version", f"it holds {holds}, and what continues that did not fit, or must wait")
        if sent.order is not None and not sent.order.apart and sent.order.base_version != self._coordinator.version:
            raise ProtocolError(name, "order", "it is lost, and the model has moved on since")
        if sent.order is not None and sent.order.budget_s is not None and sent.collecting:
            raise ProtocolError(name, "order", "it is lost, and its time with it")
        self._outbox.repeat(sent, name, self._now_s())

    def _update(self, name: str, order: WorkOrder, report: WorkReport, update: Payload | None, now_s: float) -> Event:
        """Store an update; None means that it is in the sum of its region."""
        if self._aggregator.seals_figures:
            check_sealed(name, report)
        nbytes = self._aggregator.upload_bytes if update is None else update.nbytes
        store(self._aggregator, name, order, update)
        self._aggregator.holds(name, order.base_version)
        meta = UpdateMeta.of(name, order, report, self._nodes.examples[name], nbytes)
        return UpdateArrived(now_s, meta, report)

    def _go_on(
        self, sent: PendingMessage, order: WorkOrder, progress: protocol.InProgress, now_s: float
    ) -> Event | None:
        if progress.steps > sent.steps:
            due_s = min(now_s + self._timing.order_timeout_s, sent.end_s)
            sent = replace(sent, due_s=due_s, steps=progress.steps)
        sent = replace(sent, asked=0)
        if sent.due_s <= now_s:
            return self._failed(sent, self._timing.why_late(sent.end_s <= now_s))
        self._outbox.collect(sent, order, now_s)
        return Progressed(now_s, self._nodes.sender(sent.node), order.update_id, progress.steps, progress.samples)

    def _hello(self, node: int, hello: protocol.Hello, greeting: Payload | None, now_s: float) -> Event:
        name = self._nodes.check(node, hello, self._form)
        if self._checkpoints is not None:
            self._checkpoints.agree(self._form.frozen)
        self._aggregator.greet(name, hello.holds, greeting)
        self._nodes.enrol(node, name, hello.facts.examples)
        return SiloJoined(now_s, name, hello.facts)

    def _membership(self, *, at_once: bool = False) -> list[Event]:
        now_s = self._now_s()
        gone, fresh = self._nodes.look(at_once=at_once)
        events: list[Event] = []
        for node in gone:
            self._outbox.forget(node)
            name = self._nodes.forget(node)
            if name is not None:
                events.append(self._lost(name, "its node is gone", now_s))
        for node in fresh:
            self._outbox.ask(node, protocol.Describe(), now_s)
        return events

    def _lost(self, name: str, why: str, now_s: float) -> SiloLost:
        self._held = [one for one in self._held if not (isinstance(one, actions.Dispatch) and one.silo == name)]
        self._aggregator.leave(name)
        self._go_on_if_open()
        return SiloLost(now_s, name, why)

    def _overdue(self) -> list[Event]:
        now_s = self._now_s()
        events = [event for each in self._extensions for event in each.events(now_s)]
        while self._timers and self._timers[0] <= now_s:
            events.append(TimerFired(heapq.heappop(self._timers)))
        late = [(sent, self._timing.why_late(sent.end_s <= now_s)) for sent in self._outbox.overdue(now_s)]
        while self._resting and self._resting[0][0] <= now_s:
            late.append(self._resting.popleft()[1:])
        events += [event for sent, why in late if (event := self._failed(sent, why)) is not None]
        for sent in self._outbox.unanswered(now_s):
            name = self._nodes.sender(sent.node)
            logger.warning("%s has not answered a message; asking for the answer again", name)
            self._outbox.ask_again(sent, now_s)
        return events

    # Actions.

    def _carry_out(self, action: actions.Action) -> None:
        if self._aggregator.blocked and isinstance(action, actions.Dispatch | actions.Evaluate):
            self._held.append(action)
            return
        match action:
            case actions.Dispatch(silo, order):
                if not order.apart:
                    self._aggregator.begin(order.update_id)
                self._outbox.train(silo, order, self._now_s())
            case actions.Commit(version, _):
                self._aggregator.commit(action)
                for each in self._extensions:
                    each.on_version(version)
                self._outbox.snapshot(self._now_s())
                self._outbox.questions(self._now_s())
                self._unsaved = self._aggregator.blocked
            case actions.HaltEarly(_, update_id):
                if not self._outbox.halt(update_id) and self._aggregator.blocked:
                    # Its order is held and goes out first.
                    self._held.append(action)
            case actions.Savepoint():
                self._aggregator.savepoint()
            case actions.Rollback(version):
                self._aggregator.rollback()
                for each in self._extensions:
                    each.on_version(version)
            case actions.Discard(update_id, _):
                self._aggregator.discard(update_id)
            case actions.KeepBest(score):
                self._aggregator.keep_best(score.version)
                for each in self._extensions:
                    each.on_best(action)
            case actions.Evaluate(_, silos):
                for silo in (one for one in silos if one in self._nodes.by_name):  # others were lost while it was held
                    self._outbox.evaluate(silo, protocol.EvaluateModel.of(action), self._now_s())
            case actions.WakeAt(at_s):
                heapq.heappush(self._timers, at_s)

    def _go_on_if_open(self) -> None:
        self._carry_out_held()
        if self._unsaved and not self._aggregator.blocked:
            self._unsaved = False
            self._save()

    def _carry_out_held(self) -> None:
        self._outbox.questions(self._now_s())
        if not self._aggregator.blocked:
            held, self._held = self._held, []
            for action in held:
                self._carry_out(action)

    def _flush(self) -> list[Event]:
        lost = [self._failed(sent, "its node is not known any more") for sent in self._outbox.flush()]
        events = [event for event in lost if event is not None]
        # A silo whose node is gone must get no further order: it would fail each within milliseconds.
        return [*events, *self._membership(at_once=True)] if events else []
