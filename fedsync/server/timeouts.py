"""How long the Flower driver waits for what."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import inf, isinf

from fedsync.common import foreign
from fedsync.common.backoff import Backoff
from fedsync.common.errors import RunError
from fedsync.config.sections.waiting import WaitingConfig
from fedsync.core.events import Event, Spare

logger = foreign.logger(__name__)

_JOIN_S, _WARN_S = 180.0, 60.0
_MOST_PATIENCE = 64
"""How often ``ask_s`` an answer is waited for, at most, before it is asked for again."""

_LATE, _OLD = 2.0, 1 / 16
"""By how much an answer is later than usual that is missed, and what part of the usual the newest one is."""

_LONGEST = 8
"""How often ``ask_s`` an answer took, at most, as far as that counts."""

_SLOWEST_GROWTH, _FASTEST_GROWTH, _MOST_EPOCHS = 0.1, 2.0, 10_000


@dataclass(frozen=True, slots=True)
class Timeouts:
    """How long the driver waits for what, all in seconds.

    Args:
        poll_s: pause between two looks at an empty grid, at first.
        longest_poll_s: to which the pause grows while nothing happens.
        look_s: between two looks at which nodes are there.
        ask_s: after which a message that has no answer is asked for again, since it may be lost; twice as long each
            time.
        report_s: after which a silo says how far an order is that is still in work, where the barrier does not want to
            know sooner.
        order_timeout_s: an order of which nothing new was heard for this time has failed.
        order_limit_s: an order has failed after this time, however far it is.
        join_timeout_s: longest time without any work, at the start or when all silos are gone.
        return_timeout_s: for which a resumed run waits for the silos that it had, so that they begin together.
        spare_s: that predictors may train between two looks while silos are at work; 0 for never.
        hold_s: for which a relay keeps a request that it has nothing to say to; as long as the hub holds a silo's.
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
    hold_s: float = 25.0

    @classmethod
    def of(cls, waiting: WaitingConfig, *, supervised: bool) -> Timeouts:
        """As a strategy has it.

        Args:
            waiting: of the strategy.
            supervised: somebody watches over server and silos, who need not all be there at once.
        """
        idle_s = waiting.idle_s or (inf if supervised else _JOIN_S)
        return cls(order_timeout_s=waiting.silence_s, order_limit_s=waiting.order_s or inf, join_timeout_s=idle_s)

    def patience_s(self, asked: int) -> float:
        """For which an answer is waited for that was asked for so often already, before it is asked for again."""
        return Backoff(self.ask_s, _MOST_PATIENCE * self.ask_s).pause_s(asked)

    def order_until(self, now_s: float) -> tuple[float, float]:
        """When an order that goes out has failed: if nothing is heard of it, and at the latest."""
        end_s = now_s + self.order_limit_s
        return min(now_s + self.order_timeout_s, end_s), end_s

    def why_late(self, at_limit: bool) -> str:
        """What is said of an order that has failed because its time is over; ``at_limit`` if that is the limit."""
        if at_limit:
            return f"no update in {self.order_limit_s:g} s, which waiting.order_s allows"
        return f"no answer in {self.order_timeout_s:g} s; raise waiting.silence_s if a step takes so long"


class AnswerTimes:
    """How long answers take lately; who waits for one is patient for twice as long at least.

    Where a server or its silos have too much to do, all answers take long. Each that were asked for again would be more
    to do, and so for ever. It begins with nothing, and some answers have to be slow before it says so: a silo that
    holds one back for an hour has nobody else wait longer for what was lost.

    Args:
        ask_s: after which an answer is missed at the soonest.
    """

    def __init__(self, ask_s: float) -> None:
        self._usual_s, self._longest_s = 0.0, _LONGEST * ask_s

    @property
    def patience_s(self) -> float:
        """Before this no answer is missed [s]."""
        return _LATE * self._usual_s

    def answered(self, seconds: float) -> None:
        """An answer took so long."""
        self._usual_s += _OLD * (min(seconds, self._longest_s) - self._usual_s)


class IdleTimeout:
    """Notices that there has been nothing to do for too long.

    Args:
        limit_s: how long that is [s]; without end a warning is all that comes of it.
        now_s: when it begins, by the clock that it is told.
    """

    def __init__(self, limit_s: float, now_s: float) -> None:
        self._limit_s = limit_s
        self._since_s = now_s
        self._warn_s = now_s + _WARN_S

    def wake(self, now_s: float) -> None:
        """There is something to do."""
        self._since_s, self._warn_s = now_s, now_s + _WARN_S

    def check(self, now_s: float, here: Iterable[str]) -> None:
        """There is nothing to do, with these silos.

        Raises:
            RunError: for too long.
        """
        silos = ", ".join(sorted(here)) or "none"
        if now_s - self._since_s > self._limit_s:
            raise RunError(
                f"nothing to do for {self._limit_s:g} s; silos here: {silos}. "
                "Start the missing silos, lower min_silos, or raise waiting.idle_s"
            )
        if now_s >= self._warn_s:
            self._warn_s = now_s + _WARN_S
            then = "" if isinf(self._limit_s) else f"; after {self._limit_s:g} s the run fails"
            logger.warning("nothing to do for %.0f s; silos here: %s%s", now_s - self._since_s, silos, then)


class IdleTraining:
    """How many epochs of predictors fit between two looks at the grid, found out by doing.

    It begins with one epoch. After each pause the number follows what it took: at most twice as many, at least a
    tenth, and one in any case. So what never fits (the fit of an ARIMA model, the first import of PyTorch) delays one
    look at the grid by its own length.

    Args:
        cap_s: longest training in a pause [s]; 0 for none.
    """

    def __init__(self, cap_s: float) -> None:
        self._cap_s = cap_s
        self._epochs = 1

    def events(self, now_s: float) -> list[Event]:
        """What to tell the coordinator when a predictor wants to train and silos are at work."""
        return [Spare(now_s, self._epochs)] if self._cap_s > 0 else []

    def measure(self, events: Sequence[Event], seconds: float) -> None:
        """The coordinator took so long for a batch; counts if the batch was a pause's."""
        if len(events) == 1 and isinstance(events[0], Spare):
            growth = min(max(self._cap_s / max(seconds, 1e-9), _SLOWEST_GROWTH), _FASTEST_GROWTH)
            self._epochs = min(max(int(events[0].epochs * growth), 1), _MOST_EPOCHS)
