"""When a supervisor restarts what, on a clock that the test moves."""

import itertools
from typing import Any
from unittest.mock import Mock

from fedsync.ops.supervisor import HEALTHY_S, Program, Supervisor


class Fake:
    """A process that runs until the test ends it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.code: int | None = None
        self.ended = False

    def poll(self) -> int | None:
        return self.code

    def last_words(self) -> str:
        return "no such file"

    def end(self) -> None:
        self.ended = True


class Stage:
    """A supervisor, and every process that it has started, by role."""

    def __init__(self, *programs: Program) -> None:
        self.started: dict[str, list[Fake]] = {program.role: [] for program in programs}
        self.count = 0
        # 0.5 is the middle of the jitter: pauses as they are without it, times 0.75.
        self.supervisor = Supervisor(programs, self.launch, lambda: 0.5, 0.0)

    def launch(self, program: Program) -> Any:
        self.count += 1
        self.started[program.role].append(Fake(self.count))
        return self.started[program.role][-1]

    def fail(self, role: str, at_s: float, code: int = 1) -> None:
        self.started[role][-1].code = code
        self.supervisor.step(at_s)


def test_all_start_in_order_and_end_in_reverse() -> None:
    stage = Stage(Program("one", ["1"]), Program("two", ["2"]))
    assert not stage.supervisor.running
    stage.supervisor.step(0.0)
    assert stage.supervisor.running and stage.supervisor.restarts == 0
    assert stage.supervisor.processes() == {"one": {"pid": 1, "restarts": 0}, "two": {"pid": 2, "restarts": 0}}
    stage.supervisor.stop()
    assert all(fake.ended for (fake,) in stage.started.values())


def test_what_fails_again_and_again_is_started_ever_more_rarely() -> None:
    stage = Stage(Program("one", ["1"], rejoins=True))
    now_s, starts = 0.0, []
    while now_s < 200.0:
        stage.supervisor.step(now_s)
        if stage.supervisor.running:
            starts.append(now_s)
            stage.fail("one", now_s)
        now_s += 0.25
    gaps = [after - before for before, after in itertools.pairwise(starts)]
    # By hand: 0.75, 1.5, 3 s, and from then on 6 s.
    assert gaps[:3] == [0.75, 1.5, 3.0] and set(gaps[3:]) == {6.0} and len(gaps) >= 7
    assert stage.supervisor.restarts == len(starts)
    # Flower says only that there was no connection; what a new silo lacks most often is its registration.
    assert "`fedsync server register` at the server" in stage.supervisor.last_error
    assert stage.supervisor.last_error.startswith("one ended with code 1 (")
    assert stage.supervisor.last_error.endswith("wait 60 s after a crash; do two machines use it?): no such file")


def test_a_healthy_run_begins_anew_with_the_shortest_pause() -> None:
    stage = Stage(Program("one", ["1"]))
    for at_s in (0.0, 0.75, 2.25):
        stage.supervisor.step(at_s)
        stage.fail("one", at_s)
    stage.supervisor.step(10.0)
    stage.fail("one", 10.0 + HEALTHY_S)
    stage.supervisor.step(10.0 + HEALTHY_S + 0.74)
    assert not stage.supervisor.running
    stage.supervisor.step(10.0 + HEALTHY_S + 0.75)
    assert stage.supervisor.running


def test_a_program_that_is_not_there_is_tried_again() -> None:
    launch = Mock(side_effect=FileNotFoundError("no such program"))
    supervisor = Supervisor([Program("one", ["1"])], launch, lambda: 0.5, 0.0)
    supervisor.step(0.0)
    assert not supervisor.running
    assert supervisor.last_error == "one could not be started: no such program"
