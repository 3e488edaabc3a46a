"""What happens to a run, as values: who takes part, how fast each is, when it comes and goes, which orders it fails.

A scenario says everything that happens. What is left to chance, how much longer an order takes than the last, comes
from a stream of (seed, silo's stream, purpose, number): it depends on no other silo and on no name. So silos can be
renamed or put into another order, and what one of them does changes nobody else's luck.
"""

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from random import Random

from fedsync.core.orders import MAX_AWAY_S, Presence

NONE: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Silo:
    """One silo of a scenario, and all that happens to it. Its orders are counted from 1, by the cluster.

    Args:
        name: of the silo.
        stream: number of its luck.
        examples: training samples that it holds.
        speed: samples per second, in the mean.
        overhead_s: what an order costs besides training, in the mean; between nothing and twice that.
        jitter: share by which an order is faster or slower, at most. With 0 nothing is left to chance.
        here: when it joins, is lost, joins again, is lost again...
        restarts: when it joins anew without having been missed, if it is here.
        failing: its orders that fail.
        lying: its orders whose reports cannot be true.
        echoes: its orders after which old news comes: the same answer twice, a failure that is history, an alarm.
        memory: largest batch that fits; it finds out and says so. None for any.
        leaves_at_the_end: it is lost instead of evaluating the last version.
        launch_s: what a step costs besides its samples.
        windows: it says when it will be lost and join again.
    """

    name: str
    stream: int
    examples: int = 5000
    speed: float = 100.0
    overhead_s: float = 0.1
    jitter: float = 0.1
    here: tuple[float, ...] = (0.0,)
    restarts: tuple[float, ...] = ()
    failing: Container[int] = NONE
    lying: Container[int] = NONE
    echoes: Container[int] = NONE
    memory: int | None = None
    leaves_at_the_end: bool = False
    launch_s: float = 0.0
    windows: bool = False

    def told(self, now_s: float) -> Presence | None:
        """What it says of when it is there, if it does: until it is lost, as ``here`` has it, and joins again."""
        lost = [number for number in range(1, len(self.here), 2) if self.here[number] > now_s]
        if not (self.windows and lost):
            return None
        back_s = self.here[lost[0] + 1] if lost[0] + 1 < len(self.here) else self.here[lost[0]] + MAX_AWAY_S / 2
        return Presence(self.here[lost[0]] - now_s, back_s - now_s)


@dataclass(frozen=True, slots=True)
class Scenario:
    """What happens to a run.

    Args:
        name: which corner it is.
        seed: of everything that is left to chance.
        silos: in the order in which those that do something at the same instant do it.
        poll_s: events are seen at multiples of this only; 0 sees each at its instant.
        told: shares of an order at which a silo tells how far it is, unasked.
        delay_s: how long an answer to a question takes.
        best_version: accuracy rises by 1 % a version up to this one, and stays there.
        sealed: the server learns of losses and scores only what silos find together.
        spare: the driver has time for predictors to train.
    """

    name: str
    seed: int
    silos: tuple[Silo, ...]
    poll_s: float = 0.0
    told: tuple[float, ...] = (0.5,)
    delay_s: float = 0.01
    best_version: int = 0
    sealed: bool = False
    spare: bool = False

    def luck(self, silo: Silo, purpose: str, number: int = 0) -> Random:
        """A stream of its own for each use."""
        return Random(f"{self.seed}/{silo.stream}/{purpose}/{number}")

    def silo(self, name: str) -> Silo:
        return next(silo for silo in self.silos if silo.name == name)

    def later(self, seconds: float) -> "Scenario":
        """The same, so many seconds later."""
        return self._with_times(lambda at_s: at_s + seconds)

    def slower(self, factor: float) -> "Scenario":
        """The same with all seconds times ``factor``: exact in floating point for powers of two."""
        silos = [
            replace(silo, speed=silo.speed / factor, overhead_s=silo.overhead_s * factor)
            for silo in self._with_times(lambda at_s: at_s * factor).silos
        ]
        return replace(self, silos=tuple(silos), poll_s=self.poll_s * factor, delay_s=self.delay_s * factor)

    def renamed(self, names: dict[str, str]) -> "Scenario":
        """The same under other names."""
        return replace(self, silos=tuple(replace(silo, name=names[silo.name]) for silo in self.silos))

    def _with_times(self, change: Callable[[float], float]) -> "Scenario":
        silos = [
            replace(silo, here=tuple(map(change, silo.here)), restarts=tuple(map(change, silo.restarts)))
            for silo in self.silos
        ]
        return replace(self, silos=tuple(silos))

    @property
    def quiet(self) -> bool:
        """Whether nothing bad happens: all are here from the beginning to the end and do what they are told."""
        return all(
            silo.here == self.silos[0].here
            and len(silo.here) == 1
            and not silo.restarts
            and not silo.memory
            and silo.failing is NONE
            and silo.lying is NONE
            and silo.echoes is NONE
            for silo in self.silos
        )

    def accuracy(self, version: int) -> float:
        """Share of right answers of a version; test samples are 100 a silo."""
        return 0.5 + 0.01 * min(version, self.best_version)
