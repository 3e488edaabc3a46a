"""A step that waits for ever is noticed, although the trainer answers; the silo goes on with the next order."""

import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import Hanging
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.model.transfer import Payload, VersionMismatch
from fedsync.silo.owner.refusals import last_refusals
from fedsync.silo.protocol import (
    STATE,
    Collect,
    Identity,
    InProgress,
    Refusal,
    Refused,
    Reply,
    Request,
    Train,
    exchange,
)
from fedsync.silo.session import liveness
from fedsync.silo.session.liveness import StepSigns, hang_watch
from fedsync.silo.session.trainer_client import TrainerClient, stop_trainers
from fedsync.silo.session.trainer_folder import tenant
from fedsync.train.guests.guest_code import line_of
from fedsync.train.weights import TaskModel

LOOKS = int(liveness.UNWANTED_S / liveness.LOOK_S)


@pytest.mark.parametrize(
    ("looks", "still_s"),
    # Steps that have ended and processor time taken at each look, of which the first tells nothing.
    [
        ([(0, 0.0)] + [(0, 0.05 * n) for n in range(20)], 100.0),  # answers those who ask, and no more
        ([(0, 5.0 * n) for n in range(20)], 0.0),  # a long step that computes
        ([(n, 0.0) for n in range(20)], 0.0),  # short steps that another machine computes
        ([*[(3, 9.0)] * 20, (4, 9.0)], 0.0),
        ([*[(3, 9.0)] * 20, (3, 9.2)], 0.0),
        ([*[(3, 9.0)] * 3, (3, 2.0)], 15.0),  # a process that helped is gone, and its time
    ],
)
def test_steps_and_processor_time_are_signs_of_life(looks: list[tuple[int, float]], still_s: float) -> None:
    signs = StepSigns()
    for steps, cpu_s in looks:
        signs = signs.after(steps, cpu_s)
    assert signs.still_s == still_s


@pytest.mark.parametrize(
    ("waits", "unwanted", "found"), [(False, False, True), (True, False, False), (True, True, True)]
)
def test_what_may_wait_hangs_only_once_nobody_wants_it(
    waits: bool, unwanted: bool, found: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, seconds in {"LOOK_S": 0.01, "PATIENCE_S": 0.04, "UNWANTED_S": 0.02}.items():
        monkeypatch.setattr(liveness, name, seconds)
    monkeypatch.setattr(liveness, "_group_processor_s", lambda: 1.0)
    told, seen = list[Hanging](), threading.Event()

    def hangs(error: Hanging) -> None:
        told.append(error)
        seen.set()

    watch = hang_watch("order 'a/3'", lambda: 7, lambda: unwanted, hangs, line_of, waits=waits)
    with caplog.at_level(logging.WARNING), watch:
        seen.wait(10.0 if found else 0.3)
    assert bool(told) is found
    if found:
        place = rf"order 'a/3' hangs, after 7 steps, in {re.escape(__file__)}, line \d+: for 0 s no step ended"
        assert re.match(place, str(told[0])), told
        assert "seen.wait(" in caplog.text, "the whole stack is in the silo's log"


TASK = """
import threading
import torch
from fedsync import SiloData, Task
from fedsync.silo.session import liveness

liveness.LOOK_S, liveness.PATIENCE_S, liveness.UNWANTED_S = 1.0, {patience}, 2.0
DATA = torch.utils.data.TensorDataset(torch.randn(40, 4), torch.randint(0, 2, (40,)))

class Waiting(Task):
    steps = 0

    def model(self):
        return torch.nn.Linear(4, 2)

    def data(self, slot):
        return SiloData(train=DATA, test=DATA)

    def loss(self, model, batch):
        Waiting.steps += 1
        if Waiting.steps == 5:
            threading.Event().wait()  # for a disk that is gone
        return super().loss(model, batch)
"""


@pytest.fixture
def link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: Any) -> Any:
    """A real trainer whose fifth step waits for ever; no other does, also in the trainer that is started after it."""
    # Under a short name, for the trainer listens there.
    state, file = Path(tempfile.mkdtemp(prefix="f-")), tmp_path / "task.py"
    (tmp_path / "state").symlink_to(state)
    monkeypatch.setenv(STATE, str(state))
    file.write_text(TASK.format(patience=request.param))
    config = StrategyConfig.load("fedavg", [f"task={{kind: custom, file: {file}}}"])
    client = TrainerClient(Identity(RunSpec(seed=7, silos=1, task=config.task, local=config.local).dump(), 0, "a"))
    client.model = TaskModel(config.task.build(), 7).initial()  # type: ignore[attr-defined]
    yield client
    stop_trainers(state)
    shutil.rmtree(state)


def order(number: int, steps: int) -> WorkOrder:
    return WorkOrder(f"a/{number}", 0, number, 8, steps, 0.1, seed=number, evaluate=False)


def put(link: TrainerClient, request: Request, payload: Payload | None = None) -> Reply:
    return exchange(link.ask, request, payload)[0]


def until(asked: Callable[[], Reply]) -> Reply:
    """The reply that is not that an order goes on."""
    end_s = time.monotonic() + 60.0
    while isinstance(reply := asked(), InProgress):
        assert time.monotonic() < end_s
    return reply


@pytest.mark.slow
@pytest.mark.parametrize("link", [2.0], indirect=True)
def test_a_step_that_waits_for_ever_is_one_error_and_the_silo_goes_on(link: Any, tmp_path: Path) -> None:
    sent = put(link, Train(order(1, 9), 0.05), link.model)
    assert isinstance(sent, InProgress), "it answers all the time"
    first = tenant(link._folder)
    reply = until(lambda: put(link, Collect("a/1", 10.0, False)))
    assert isinstance(reply, Refused) and reply.code is Refusal.HANGS
    (note,) = last_refusals(tmp_path / "state")
    told = rf"order 'a/1' hangs, after 4 steps, in {re.escape(str(tmp_path))}/task.py, line 22: for 2 s no step ended"
    assert re.match(told, note.reason), note.reason
    done = until(lambda: put(link, Train(order(2, 3), 10.0), link.model))
    assert isinstance(done, WorkReport) and done.steps == 3
    assert tenant(link._folder) not in (first, None), "another trainer did it"


@pytest.mark.slow
@pytest.mark.parametrize("link", [600.0], indirect=True)
def test_one_that_the_server_has_given_up_does_not_hold_up_the_next_order(link: Any) -> None:
    """Here ten minutes are the silo's patience, and the server's is over before."""
    begun = put(link, Train(order(1, 9), 0.3), link.model)
    while isinstance(begun, InProgress) and begun.steps < 4:  # halted sooner, it would end before the step that waits
        begun = put(link, Collect("a/1", 0.05))
    assert isinstance(begun, InProgress)
    reply = until(lambda: put(link, Train(order(2, 3), 10.0), link.model))
    assert isinstance(reply, VersionMismatch), "it was never begun: send it again"
    done = until(lambda: put(link, Train(order(2, 3), 10.0), link.model))
    assert isinstance(done, WorkReport) and done.steps == 3
    np.testing.assert_equal(done.base_version, 0)
