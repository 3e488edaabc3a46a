"""Two processors; the counters are what the test sets them to."""

from dataclasses import dataclass, field

import pytest

from fedsync.train.machine.resources import Resources


@dataclass
class Machine:
    """Counters by hand; `work` lets a second pass."""

    busy: float = 1000.0
    own: float = 10.0
    now_s: float = 0.0
    resources: Resources = field(init=False)

    def __post_init__(self) -> None:
        self.resources = Resources(lambda: self.busy, lambda: self.own, lambda: 0.25, 2)
        self.resources.begin(self.now_s)

    def work(self, own: float, others: float, seconds: float = 1.0) -> tuple[float | None, float]:
        """What is read after ``seconds`` in which this process and others worked as long as given."""
        self.own += own
        self.busy += own + others
        self.now_s += seconds
        return self.resources.read(self.now_s)


@pytest.mark.parametrize(
    ("own", "others", "share"),
    [
        (2.0, 0.0, 1.0),  # what the trainer uses itself is available to it
        (0.0, 0.0, 1.0),
        (1.0, 1.0, 0.5),  # one of two processors
        (0.5, 1.5, 0.25),
        (0.0, 2.0, 0.0),
    ],
)
def test_others_leave_the_rest(own: float, others: float, share: float) -> None:
    cpu, memory = Machine().work(own, others)
    assert cpu == pytest.approx(share)
    assert memory == 0.25
    assert Machine().work(own, others, seconds=0.0) == (None, 0.25), "no time is no share"


def test_ticks_that_come_late_are_made_up_for() -> None:
    machine = Machine()
    # Own work is counted at once, the machine's 10 ms later; then both catch up: nobody else worked.
    assert machine.work(own=0.05, others=-0.01, seconds=0.05)[0] == 1.0
    assert machine.work(own=0.05, others=0.01, seconds=0.05)[0] == pytest.approx(1.0)
    # 20 ms of others in 50 ms of two processors.
    assert machine.work(own=0.05, others=0.02, seconds=0.05)[0] == pytest.approx(0.8)


def test_a_lasting_error_of_the_counters_hides_others_for_a_tick_only() -> None:
    machine = Machine()
    machine.work(own=1.0, others=-0.5)
    # At most 10 ms on each of two processors are owed.
    assert machine.work(own=0.0, others=1.02)[0] == pytest.approx(0.5)
