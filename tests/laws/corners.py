"""The corners that every policy is driven into. They are listed, not drawn: each case meets each of them.

An order of 4 steps x 10 samples takes a silo of 100 samples/s 0.4 s. Every run lasts for several orders of its slowest
silo at least, so that laws have something to look at.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from fedsync.core.state import Policies
from tests.laws.scenario import Scenario, Silo


@dataclass(frozen=True, slots=True)
class Corner:
    """A scenario, and what ends its run.

    Args:
        scenario: what happens.
        stop: section of a strategy file.
        min_silos: for the run to begin.
    """

    scenario: Scenario
    stop: Mapping[str, Any]
    min_silos: int = 1


def corners(seed: int) -> dict[str, Corner]:
    """All of them by name, with everything that is left to chance from ``seed``."""
    return {corner.scenario.name: corner for corner in (make(seed) for make in _CORNERS)}


def _silos(seed: int, speeds: Sequence[float], examples: Sequence[int], **more: Any) -> tuple[Silo, ...]:
    """In an order of the seed's, so that nobody is always the first."""
    silos = [
        Silo(f"silo-{stream}", stream, examples=held, speed=float(speed), **more)
        for stream, (speed, held) in enumerate(zip(speeds, examples, strict=True))
    ]
    return tuple(Random(seed).sample(silos, len(silos)))


def _but(silos: tuple[Silo, ...], *changes: Mapping[str, Any]) -> tuple[Silo, ...]:
    """The first silos changed."""
    changed = [replace(silo, **change) for silo, change in zip(silos, changes, strict=False)]
    return (*changed, *silos[len(changed) :])


def quiet(seed: int) -> Corner:
    """Nothing happens; one is eight times as fast as another, and holds 30 samples to its million."""
    silos = _silos(seed, [20, 40, 80, 120, 160], [30, 700, 5000, 10**5, 10**6])
    return Corner(Scenario("quiet", seed, silos), {"seconds": 24.0})


def alone(seed: int) -> Corner:
    return Corner(Scenario("alone", seed, _silos(seed, [100], [5000])), {"rounds": 12})


def unequal(seed: int) -> Corner:
    """One is a thousand times as fast as another; one holds one sample, one a million."""
    silos = _silos(seed, [1, 30, 1000], [10**6, 1, 5000], overhead_s=0.01)
    return Corner(Scenario("unequal", seed, silos, told=()), {"seconds": 85.0})


def long(seed: int) -> Corner:
    """Two silos, for hundreds of rounds."""
    silos = _silos(seed, [80, 120], [5000, 800])
    return Corner(Scenario("long", seed, silos, told=()), {"rounds": 520})


def forty(seed: int) -> Corner:
    luck = Random(seed)
    speeds = [10 * 16 ** luck.random() for _ in range(40)]
    examples = [int(10 ** luck.uniform(0, 6)) for _ in range(40)]
    return Corner(Scenario("forty", seed, _silos(seed, speeds, examples), told=()), {"seconds": 8.0})


def at_once(seed: int) -> Corner:
    """All are alike to the last digit, and so answer in the same instant."""
    silos = _silos(seed, [100] * 4, [10, 100, 1000, 10000], jitter=0.0)
    return Corner(Scenario("at once", seed, silos), {"rounds": 40})


def comings(seed: int) -> Corner:
    """Silos join late, leave for good, leave and come back under their names, and start anew without being missed."""
    silos = _but(
        _silos(seed, [40, 60, 80, 100, 160], [5000, 50, 900, 10**6, 20]),
        {"restarts": (7.7, 7.9)},
        {"here": (1.0,)},
        {"here": (6.0, 15.2, 16.0)},
        {"here": (0.0, 4.1)},
        {"here": (0.5, 5.3, 9.1, 12.0, 12.5), "leaves_at_the_end": True},
    )
    return Corner(Scenario("comings", seed, silos), {"seconds": 24.0}, min_silos=3)


def windows(seed: int) -> Corner:
    """Two silos are there in windows and say so; one that is always there comes when they have been away for long."""
    silos = _but(
        _silos(seed, [60, 80, 140], [5000, 50, 900]),
        {"here": (0.0, 3.0, 8.0, 11.0, 16.0), "windows": True},
        {"here": (0.0, 4.1, 9.0, 14.0, 17.0), "windows": True},
        {"here": (13.0,)},
    )
    return Corner(Scenario("windows", seed, silos), {"seconds": 24.0})


def failing(seed: int) -> Corner:
    """Orders fail: two in a row, four in a row, which means two rests, and the first three of all."""
    silos = _but(
        _silos(seed, [20, 30, 40, 25], [5000, 500, 50, 50000]),
        {"failing": frozenset({2, 3, 9})},
        {"failing": frozenset({4, 5, 6, 7})},
        {"failing": frozenset({1, 2, 3})},
    )
    return Corner(Scenario("failing", seed, silos), {"seconds": 75.0})


def lying(seed: int) -> Corner:
    """Reports that cannot be true, answers that come twice, old news, false alarms, a machine with little memory."""
    silos = _but(
        _silos(seed, [60, 100, 80, 140], [5000, 50, 900, 10**5]),
        {"lying": frozenset({2, 5, 6}), "echoes": range(1, 10**6)},
        {"memory": 7},
        {"echoes": frozenset({1, 4, 8}), "lying": frozenset({9})},
    )
    return Corner(Scenario("lying", seed, silos, poll_s=0.5), {"rounds": 30, "seconds": 60.0})


def chaos(seed: int) -> Corner:
    """All of that, as it comes."""
    luck = Random(seed)

    def some(share: float) -> frozenset[int]:
        return frozenset(number for number in range(1, 200) if luck.random() < share)

    def here() -> tuple[float, ...]:
        times = sorted(luck.uniform(0.0, 20.0) for _ in range(luck.choice([0, 2, 4])))
        return (luck.choice([0.0, 0.0, 3.0]), *(3.0 + at_s for at_s in times))

    silos = [
        Silo(
            f"silo-{stream}",
            stream,
            examples=int(10 ** luck.uniform(1, 6)),
            speed=30 * 8 ** luck.random(),
            here=here(),
            restarts=(luck.uniform(0.0, 20.0),),
            failing=some(0.1),
            lying=some(0.05),
            echoes=some(0.1),
            memory=luck.choice([None, None, 9]),
            leaves_at_the_end=luck.random() < 0.2,
        )
        for stream in range(6)
    ]
    return Corner(Scenario("chaos", seed, tuple(silos)), {"seconds": 24.0}, min_silos=2)


def hopeless(seed: int) -> Corner:
    """Every order of every silo fails."""
    silos = _silos(seed, [50, 100], [5000, 500], failing=range(1, 10**6))
    return Corner(Scenario("hopeless", seed, silos), {"rounds": 100})


def target(seed: int) -> Corner:
    """Accuracy rises to what is wanted."""
    silos = _silos(seed, [60, 90, 120], [5000, 500, 2000])
    return Corner(Scenario("target", seed, silos, best_version=30), {"target_accuracy": 0.6, "seconds": 200.0})


def patience(seed: int) -> Corner:
    """Accuracy rises for five versions, and then no more."""
    silos = _silos(seed, [60, 90, 120], [5000, 500, 2000])
    return Corner(Scenario("patience", seed, silos, best_version=5), {"patience": 6, "seconds": 200.0})


def sealed(seed: int) -> Corner:
    """The server learns no loss and no score but what silos find together."""
    silos = _silos(seed, [40, 80, 80, 120], [5000] * 4)
    return Corner(Scenario("sealed", seed, silos, best_version=8, sealed=True), {"patience": 12, "seconds": 40.0})


def spare(seed: int) -> Corner:
    """There is time for predictors to train."""
    silos = _silos(seed, [40, 80, 120], [5000, 300, 10**4])
    return Corner(Scenario("spare", seed, silos, spare=True), {"rounds": 40})


_CORNERS: list[Callable[[int], Corner]] = [
    *(quiet, alone, unequal, long, forty, at_once, comings, windows, failing, lying, chaos),
    *(hopeless, target, patience, sealed, spare),
]


def applies(corner: Corner, policies: Policies, needs_losses: bool) -> bool:
    """Whether policies can be in this corner: some need what another does not tell."""
    if corner.scenario.sealed:
        return not needs_losses
    return policies.predictor.learns or not corner.scenario.spare
