"""Two processors unless a test says otherwise; the kernel's counters are what the test sets them to."""

from dataclasses import dataclass, field
from pathlib import Path

import psutil
import pytest

from fedsync.train.machine.resources import Resources, machine_busy_s, machine_memory_share
from tests.train.test_cgroups import unified, write


@dataclass
class Machine:
    """Counters by hand; `work` lets a second pass."""

    root: Path
    busy: float = 1000.0
    own: float = 10.0
    used: float = 0.25
    now_s: float = 0.0
    resources: Resources = field(init=False)

    def __post_init__(self) -> None:
        self.resources = Resources(self.root, lambda: self.busy, lambda: self.own, lambda: self.used, 2, 2)
        self.resources.begin(self.now_s)

    def work(self, own: float, others: float, seconds: float = 1.0) -> tuple[float | None, float | None]:
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
def test_others_leave_the_rest(tmp_path: Path, own: float, others: float, share: float) -> None:
    cpu, memory = Machine(tmp_path).work(own, others)
    assert cpu == pytest.approx(share)
    assert memory == 0.25


def test_one_of_two_processors_suffers_half_of_what_others_do(tmp_path: Path) -> None:
    counters = Machine(tmp_path)
    confined = Resources(tmp_path, lambda: counters.busy, lambda: counters.own, lambda: 0.0, allowed=1, processors=2)
    confined.begin(0.0)
    counters.busy += 1.0
    # Others kept one of the two busy, either by turns.
    assert confined.read(1.0)[0] == pytest.approx(0.5)


def test_ticks_that_come_late_are_made_up_for(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    # Own work is counted at once, the machine's 10 ms later; then both catch up: nobody else worked.
    assert machine.work(own=0.05, others=-0.01, seconds=0.05)[0] == 1.0
    assert machine.work(own=0.05, others=0.01, seconds=0.05)[0] == pytest.approx(1.0)
    # 20 ms of others in 50 ms of two processors.
    assert machine.work(own=0.05, others=0.02, seconds=0.05)[0] == pytest.approx(0.8)


def test_a_lasting_error_of_the_counters_hides_others_for_a_tick_only(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.work(own=1.0, others=-0.5)
    # At most 10 ms on each of two processors are owed.
    assert machine.work(own=0.0, others=1.02)[0] == pytest.approx(0.5)


def test_a_quota_is_all_there_is_and_its_group_shares_it(tmp_path: Path) -> None:
    folder = unified(tmp_path)  # 1.5 processors
    machine = Machine(tmp_path)
    # In the group: own 0.9 s and 0.3 s of others; on the machine 0.4 s of others.
    write(folder, {"cpu.stat": f"usage_usec {2_500_000 + 1_200_000}\n"})
    # The machine leaves 2 - 0.4 = 1.6, the quota 1.5 - 0.3 = 1.2 of 1.5.
    assert machine.work(own=0.9, others=0.4)[0] == pytest.approx(0.8)


def test_a_quota_that_is_lowered_shows(tmp_path: Path) -> None:
    folder = unified(tmp_path)
    machine = Machine(tmp_path)
    write(folder, {"cpu.max": "75000 100000\n"})
    assert machine.work(own=0.5, others=0.0)[0] == pytest.approx(0.5)


def test_the_tightest_memory_counts(tmp_path: Path) -> None:
    unified(tmp_path)  # half of its limit
    assert Machine(tmp_path, used=0.25).work(0.0, 0.0)[1] == 0.5
    assert Machine(tmp_path, used=0.625).work(0.0, 0.0)[1] == 0.625


def test_sources_that_fail_are_left_out(tmp_path: Path) -> None:
    def broken() -> float:
        raise OSError("no /proc here")

    resources = Resources(tmp_path, broken, lambda: 0.0, broken)
    resources.begin(0.0)
    assert resources.read(1.0) == (None, None)


def test_the_first_reading_has_nothing_to_compare_with(tmp_path: Path) -> None:
    resources = Resources(tmp_path, lambda: 0.0, lambda: 0.0, lambda: 0.5)
    assert resources.read(1.0) == (None, 0.5)
    assert resources.read(1.0) == (None, 0.5), "no time has passed"


def test_this_machine_answers() -> None:
    resources = Resources()
    resources.begin(0.0)
    cpu, memory = resources.read(0.05)
    assert cpu is not None and 0 <= cpu <= 1
    assert memory is not None and 0 < memory < 1
    assert machine_busy_s() > 0
    assert 0 < machine_memory_share() < 1


def test_the_machine_s_figures_are_psutil_s() -> None:
    before = sum(psutil.cpu_times()[:8]) - psutil.cpu_times().idle - psutil.cpu_times().iowait
    assert machine_busy_s() == pytest.approx(before, abs=5.0)
    assert machine_memory_share() == pytest.approx(psutil.virtual_memory().percent / 100, abs=0.02)
