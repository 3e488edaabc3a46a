"""Real processes that train one silo together: what they come to, how they end, and who is left."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import parent_process
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor, nn

from fedsync.common.errors import ConfigError, Diverged, RunError
from fedsync.core.orders import Cursor, Split
from fedsync.evaluation.metrics.named import Wanted
from fedsync.tasks.task_protocol import Batch, SiloData, SiloSlot
from fedsync.train.options import LocalOptions
from fedsync.train.processes.group import GroupTrainer
from fedsync.train.silo_trainer import likely_update
from tests.train.make import Dropping, TwoClasses, order, slot, trainer

pytestmark = pytest.mark.full

OPTIONS = LocalOptions(device="cpu", processes=2, measured=Wanted(("accuracy", "auroc"), 2))
TOLERANCE = 1e-6


class Failing(TwoClasses):
    """Fails over shares of 13 samples, in every process but the first."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        if len(batch[0]) == 13 and parent_process() is not None:
            raise ArithmeticError("thirteen of them")
        return super().loss(model, batch)


class Unreadable(TwoClasses):
    """Has data in the first process only."""

    def data(self, slot: SiloSlot) -> SiloData:
        if parent_process() is not None:
            raise ConfigError("task", "the data are gone", "Bring them back")
        return super().data(slot)


@pytest.fixture(scope="module")
def group() -> Iterator[GroupTrainer]:
    subject = GroupTrainer(Failing, slot(), OPTIONS)
    yield subject
    if subject._group is not None:
        subject._group.end()


def members() -> list[psutil.Process]:
    """Processes that train with this one."""
    children = psutil.Process().children(recursive=True)
    return [child for child in children if any("spawn_main" in word for word in child.cmdline())]


def test_orders_and_evaluations_are_those_of_one_process(group: GroupTrainer) -> None:
    alone = trainer(options=replace(OPTIONS, processes=1))
    base = alone.initial_model()
    for size in (8, 7, 1):
        work = order(batch_size=size, max_steps=20, evaluate=True)
        expected, found = alone.run(work, base, Cursor()), group.run(work, base, Cursor())
        np.testing.assert_allclose(found.update, expected.update, rtol=0, atol=TOLERANCE)
        assert (found.report.samples, found.cursor) == (20 * size, expected.cursor)
        assert found.report.evaluation is not None and found.report.evaluation.samples == 10
    assert group.evaluate(base).correct == alone.evaluate(base).correct
    for each in (alone, group):
        each.evaluate(base, split=Split.TEST)
    assert alone.judged is not None and group.judged is not None and alone.judged.cells
    for key, cells in alone.judged.cells.items():
        np.testing.assert_array_equal(group.judged.cells[key], cells)
    likely = likely_update(group, 8, 4, 0.1, 7)[0]
    np.testing.assert_allclose(likely, likely_update(alone, 8, 4, 0.1, 7)[0], rtol=0, atol=1e-5)


def test_the_report_counts_the_memory_of_all(group: GroupTrainer) -> None:
    metrics = group.run(order(max_steps=200), group.initial_model(), Cursor()).report.metrics
    (other,) = members()
    own, others = psutil.Process().memory_info().rss, other.memory_info().rss
    assert metrics["peak_memory_bytes"] == pytest.approx(own + others, rel=0.2)
    assert group._own_s() > time.process_time()


def test_a_process_that_is_killed_fails_the_order_with_one_error_and_the_next_has_a_new_one(
    group: GroupTrainer,
) -> None:
    base = group.initial_model()
    expected = group.run(order(), base, Cursor()).update
    (other,) = members()
    killer = threading.Timer(0.3, other.kill)
    killer.start()
    with pytest.raises(RunError, match="process 1 of the 2 that train this silo ended with signal 9"):
        group.run(order(max_steps=10**6), base, Cursor())
    assert members() == []
    np.testing.assert_array_equal(group.run(order(), base, Cursor()).update, expected)
    (new,) = members()
    assert new != other
    new.kill()
    while group._group is not None and group._group.lives:
        time.sleep(0.01)
    np.testing.assert_array_equal(group.run(order(), base, Cursor()).update, expected)


def test_an_error_of_any_process_is_the_order_s_and_leaves_nobody_waiting(group: GroupTrainer) -> None:
    base = group.initial_model()
    with pytest.raises(ArithmeticError, match="thirteen of them"):
        group.run(order(batch_size=26), base, Cursor())
    group.run(order(), base, Cursor())

    def watch(steps: int, samples: int) -> bool:
        raise LookupError("of the first process")

    with pytest.raises(LookupError):
        group.run(order(max_steps=10**6), base, Cursor(), watch=watch)
    group.run(order(), base, Cursor())


def test_what_diverges_does_so_everywhere_and_costs_no_process(group: GroupTrainer) -> None:
    base = group.initial_model()
    group.run(order(), base, Cursor())
    before = members()
    with pytest.raises(Diverged):
        group.run(order(max_steps=40, learning_rate=1e30), base, Cursor())
    group.run(order(), base, Cursor())
    assert members() == before


def test_an_order_can_be_repeated_where_each_process_draws(group: GroupTrainer) -> None:
    subject = GroupTrainer(Dropping, slot(), OPTIONS)
    base = subject.initial_model()
    first = subject.run(order(), base, Cursor()).update
    subject.run(order(seed=2), base, Cursor())
    assert subject.run(order(), base, Cursor()).update.tobytes() == first.tobytes()
    assert subject._group is not None
    subject._group.end()


def test_what_one_process_cannot_load_is_the_error_and_nobody_stays() -> None:
    before = members()
    with pytest.raises(ConfigError, match="the data are gone"):
        GroupTrainer(Unreadable, slot(), OPTIONS)
    assert members() == before


SCRIPT = """
import time
from fedsync.train.processes.group import GroupTrainer
from fedsync.core.orders import Cursor
from tests.train.make import TwoClasses, order, slot
from tests.train.test_group import OPTIONS
if __name__ == "__main__":
    group = GroupTrainer(TwoClasses, slot(), OPTIONS)
    print("ready", flush=True)
    {then}
"""


@pytest.mark.parametrize(
    "then", ["time.sleep(600)", "group.run(order(max_steps=10**9), group.initial_model(), Cursor())"]
)
def test_nobody_outlives_the_first_process(then: str, tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(SCRIPT.format(then=then))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    first = subprocess.Popen([sys.executable, tmp_path / "first.py"], stdout=subprocess.PIPE, env=environment)
    try:
        assert first.stdout is not None and first.stdout.readline() == b"ready\n"
        others = psutil.Process(first.pid).children(recursive=True)
        assert len(others) >= 1
        time.sleep(0.5)
    finally:
        first.send_signal(signal.SIGKILL)
        first.wait()
    _, left = psutil.wait_procs(others, timeout=10)
    assert left == []


def test_the_interpreter_ends_with_its_group(tmp_path: Path) -> None:
    (tmp_path / "first.py").write_text(SCRIPT.format(then="pass"))
    environment = {**os.environ, "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, tmp_path / "first.py"], env=environment, timeout=60, check=False)
    assert done.returncode == 0


def test_there_are_not_so_many_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(ConfigError, match=r"local\.processes: 3, and from cuda:1 on torch sees 2 GPUs\. Write 2"):
        GroupTrainer(TwoClasses, slot(), LocalOptions(device="cuda:1", processes=3))
