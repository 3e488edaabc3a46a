"""Timing of the server's main loop: timeouts, retries, and the training of speed predictors in idle time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isinf

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import RunError
from fedsync.config.sections.strategy_sections import WaitingConfig
from fedsync.core.events import Event, Spare

logger = foreign.logger(__name__)

_JOIN_S, _WARN_S = 180.0, 60.0
_MOST_PATIENCE = 64
"""Maximum time until a retry, in multiples of ``ask_s``."""

_LATE, _OLD = 2.0, 1 / 16
"""Factor on the usual response time until a retry, and weight of the newest response time in the usual time."""

_LONGEST = 8
"""Maximum response time that counts, in multiples of ``ask_s``."""

_SLOWEST_GROWTH, _FASTEST_GROWTH, _MOST_EPOCHS = 0.1, 2.0, 10_000


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Timeouts and intervals of the driver, all in seconds.

    Args:
        poll_s: initial pause between two polls, which grows to ``longest_poll_s`` while nothing happens.
        look_s: interval of checks for new and lost nodes.
        ask_s: time after which an unanswered message is sent again, since it may be lost; doubled each time.
        report_s: interval of progress reports on an order, if the barrier does not need a shorter interval.
        order_timeout_s: time without progress after which an order has failed.
        order_limit_s: time after which an order has failed, even if it makes progress.
        join_timeout_s: longest time without any work, at the start or when all silos are gone.
        return_timeout_s: time for which a resumed run waits for its former silos, so that they begin together.
        spare_s: training time of predictors between two polls while silos are at work; 0 for none.
        rest_s: time after which an order that a full disk prevented counts as failed; its silo's next orders would fail
            within the same second, and the silo would be out of the run.
        hold_s: time for which a relay holds a request without an answer; as long as the hub holds a silo's request.
    """

    poll_s: float = 0.02
    longest_poll_s: float = 0.15
    look_s: float = 1.0
    ask_s: float = 30.0
    report_s: float = 10.0
    order_timeout_s: float = 3600.0
    order_limit_s: float = inf
    join_timeout_s: float = _JOIN_S
    return_timeout_s: float = 60.0
    spare_s: float = 0.05
    rest_s: float = 5.0
    hold_s: float = 25.0

    @classmethod
    def of(cls, waiting: WaitingConfig, *, supervised: bool, idle_s: float = _JOIN_S) -> Timeouts:
        """Return a strategy's timeouts; by default an idle run lasts ``idle_s``, or without limit if ``supervised``."""
        limit_s = waiting.idle_s or (inf if supervised else idle_s)
        return cls(order_timeout_s=waiting.silence_s, order_limit_s=waiting.order_s or inf, join_timeout_s=limit_s)

    def patience_s(self, asked: int) -> float:
        return Backoff(self.ask_s, _MOST_PATIENCE * self.ask_s).pause_s(asked)

    def order_until(self, now_s: float) -> tuple[float, float]:
        end_s = now_s + self.order_limit_s
        return min(now_s + self.order_timeout_s, end_s), end_s

    def why_late(self, at_limit: bool) -> str:
        if at_limit:
            return f"no update in {self.order_limit_s:g} s, which waiting.order_s allows"
        return f"no answer in {self.order_timeout_s:g} s; raise waiting.silence_s if a step takes so long"


class AnswerTimes:
    """Moving average of response times, which sets the minimum wait before a retry.

    If a server or its silos are overloaded, all responses are slow, and retries would make them slower. The average
    begins at 0, and rises only after several slow responses: a single silo that delays a response for an hour does not
    delay the retries of lost messages of other silos.
    """

    def __init__(self, ask_s: float) -> None:
        self._usual_s, self._longest_s = 0.0, _LONGEST * ask_s

    @property
    def patience_s(self) -> float:
        return _LATE * self._usual_s

    def answered(self, seconds: float) -> None:
        self._usual_s += _OLD * (min(seconds, self._longest_s) - self._usual_s)


class IdleTimeout:
    """Timeout of a run without any work; if ``limit_s`` is infinite, such a run only causes warnings."""

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self.wake(now_s)

    def wake(self, now_s: float) -> None:
        self._since_s, self._warn_s = now_s, now_s + _WARN_S

    def check(self, now_s: float, here: Iterable[str]) -> None:
        """Record that there is no work; ``here`` names the connected silos. `RunError` after too long."""
        silos = ", ".join(sorted(here)) or "none"
        if now_s - self._since_s > self._limit_s:
            remedy = "Start the missing silos, lower min_silos, or raise waiting.idle_s"
            raise RunError(f"nothing to do for {self._limit_s:g} s; silos here: {silos}. {remedy}")
        if now_s >= self._warn_s:
            self._warn_s = now_s + _WARN_S
            then = "" if isinf(self._limit_s) else f"; after {self._limit_s:g} s the run fails"
            logger.warning("nothing to do for %.0f s; silos here: %s%s", now_s - self._since_s, silos, then)


class IdleTraining:
    """Number of predictor epochs that fit between two polls of the main loop, adapted to measured times.

    After each pause the number is scaled by limit / measured time, with a factor between a tenth and two, and a minimum
    of one epoch. So training that never fits (an ARIMA fit, the first import of PyTorch) delays one poll by its own
    length. ``cap_s`` is the longest training in a pause; 0 for none.
    """

    def __init__(self, cap_s: float) -> None:
        self._cap_s, self._epochs = cap_s, 1

    def events(self, now_s: float) -> list[Event]:
        """Return the event that lets a predictor train while silos are at work; empty if the limit is 0."""
        return [Spare(now_s, self._epochs)] if self._cap_s > 0 else []

    def measure(self, events: Sequence[Event], seconds: float) -> None:
        """Record the coordinator's time for a batch of events; only a batch of one `Spare` event counts."""
        if len(events) == 1 and isinstance(events[0], Spare):
            growth = min(max(self._cap_s / max(seconds, 1e-9), _SLOWEST_GROWTH), _FASTEST_GROWTH)
            self._epochs = min(max(int(events[0].epochs * growth), 1), _MOST_EPOCHS)
