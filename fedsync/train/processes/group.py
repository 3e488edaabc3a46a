"""Process group that trains one silo; the first process takes orders, starts the other processes and ends them.

| the group is | an order or evaluation | goes to |
|---|---|---|
| forming | waits until all processes have loaded task, data and model | ready, or fails with the first error |
| ready | goes to each process, with base and data position; each process reports the end of its share | ready, broken |
| broken | fails once, with the cause; the other processes are killed | forming, with the next order |

The group is broken when a process ends for any reason, or when a process's share fails. Orders do not depend on earlier
orders, so new processes can repeat a failed order.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Unpack

import psutil
import torch

from fedsync.common import foreign
from fedsync.common.errors import Diverged, RunError
from fedsync.common.processes import exit_with_parent
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.model.layout import Vector
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.tasks.task_protocol import SiloSlot, Task
from fedsync.train.loop import Trainer
from fedsync.train.machine import device as devices
from fedsync.train.machine.resources import Resources, allowed_processors
from fedsync.train.options import LocalOptions
from fedsync.train.order_clock import MachineProbe
from fedsync.train.processes.rank import OthersGone, Rank
from fedsync.train.silo_trainer import Outcome, RunOptions

MakeTask = Callable[[], Task]
"""Builds the task; must be picklable, because every process builds its own task."""

logger = foreign.logger(__name__)

_Asked = tuple[WorkOrder | Split, Cursor]
"""An order, or the split of an evaluation, with the data position."""

_LAST_WORDS_S = 2.0
"""Time in which a process that breaks the group may report the reason."""


class GroupTrainer(Trainer):
    """Trainer of a task in ``options.processes`` processes, this process included; see `Trainer`.

    The update equals the update of one process, but the order of float sums differs, and each process applies batch
    normalisation and dropout to its own rows only. Raises `ConfigError` also if the machine has too few GPUs.
    """

    def __init__(self, make: MakeTask, slot: SiloSlot, options: LocalOptions, run: PartPatterns = UNSAID) -> None:
        places = devices.several(options.device, options.processes)
        threads = options.threads or (max(1, allowed_processors() // len(places)) if places[0] == "cpu" else None)
        each = [replace(options, device=place, threads=threads, processes=1) for place in places]
        self._size = len(each)
        self._start = partial(_Group, make, slot, each, run)
        group = self._start()  # The other processes load while this process loads.
        try:
            super().__init__(make(), slot, each[0], run)
            self.rank = group.form(self._device)
        except BaseException:
            group.end()
            raise
        self._group: _Group | None = group
        self._probe = MachineProbe(self._device, options.resources, Resources(own_s=self._own_s))

    def find_batch_cap(self, limit_s: float = 10.0) -> int | None:
        """See `Trainer.find_batch_cap`; the limits of all processes add up, as each takes a share of a batch."""
        found = super().find_batch_cap(limit_s)
        return None if found is None else found * self._size

    def run(self, order: WorkOrder, base: Vector, cursor: Cursor, **options: Unpack[RunOptions]) -> Outcome:
        """See `LocalTrainer.run`; raises `RunError` if another process ends. The next order starts new processes."""
        with self._together((order, cursor), base, options.get("correction")) as group:
            outcome = super().run(order, base, cursor, **options)
            held = outcome.report.metrics.get("peak_memory_bytes")
            others = group.done()
        if held is None:
            return outcome
        metrics = {**outcome.report.metrics, "peak_memory_bytes": held + others}
        return replace(outcome, report=replace(outcome.report, metrics=metrics))

    def evaluate(self, model: Vector, cursor: Cursor | None = None, split: Split = Split.VALIDATION) -> Evaluation:
        """See `LocalTrainer.evaluate`; raises `RunError` as `run` does."""
        with self._together((split, cursor or Cursor()), model) as group:
            found = super().evaluate(model, cursor, split)
            group.done()
        return found

    @contextmanager
    def _together(self, asked: _Asked, model: Vector, correction: Vector | None = None) -> Iterator[_Group]:
        self.layout.check(model)
        group, rank = self._formed()
        try:
            group.ask(asked, corrected=correction is not None)
            rank.spread(model, len(model))
            if correction is not None:
                rank.spread(correction, len(correction))
            try:
                yield group
            except Diverged:
                group.done()  # All processes have reached the same weights, so the group stays usable.
                raise
        except Diverged:
            raise
        except BaseException as error:
            self._group = self.rank = None
            why = group.why(error)
            group.end()
            if why is error:
                raise
            raise why from error

    def _formed(self) -> tuple[_Group, Rank]:
        if self._group is None or self.rank is None or not self._group.lives:
            if self._group is not None:
                self._group.end()
            self._group, group = None, self._start()
            try:
                self.rank = group.form(self._device)
            except BaseException:
                group.end()
                raise
            self._group = group
        return self._group, self.rank

    def _own_s(self) -> float:
        """Processor time of all processes [s]."""
        return time.process_time() + (0.0 if self._group is None else self._group.cpu_s())


class _Group:
    """Other processes of a silo's group, numbered from 1; ``each`` holds options per process, the first included."""

    def __init__(self, make: MakeTask, slot: SiloSlot, each: Sequence[LocalOptions], run: PartPatterns) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="fedsync-group-"))
        self._processes: list[SpawnProcess] = []
        self._pipes: list[Connection] = []
        # Registered before the start of processes: at exit, the interpreter would wait for them.
        args = (self._processes, self._pipes, self._folder)
        self._finalizer = Finalize(self, _end, args=args, exitpriority=10)
        context = get_context("spawn")  # A process with threads and a GPU cannot be forked.
        for number, options in enumerate(each[1:], 1):
            pipe, theirs = context.Pipe()
            others = (number, len(each), self._folder, theirs, os.getpid())
            process = context.Process(
                target=_follow, args=(make, slot, options, run, *others), name=f"{slot.name}-{number}"
            )
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(pipe)

    def form(self, device: torch.device) -> Rank:
        """Wait until all processes have loaded, and connect to them; raises the first error of any process."""
        try:
            self._hear()
            rank = Rank(0, len(self._processes) + 1, self._folder, device)
        except OthersGone as error:
            raise self.why(error) from error.__cause__
        shutil.rmtree(self._folder, ignore_errors=True)
        if device.type == "cuda":
            threading.Thread(target=self._notice, args=(rank,), daemon=True).start()
        return rank

    def _notice(self, rank: Rank) -> None:
        wait([process.sentinel for process in self._processes])
        rank.abort()

    @property
    def lives(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def ask(self, asked: _Asked, *, corrected: bool) -> None:
        """Send an order to all processes; ``corrected``: a gradient correction follows the model."""
        with _gone():
            for pipe in self._pipes:
                pipe.send((*asked, corrected))

    def done(self) -> float:
        """Wait until all processes are done; return the memory that they hold together [bytes]."""
        return sum(self._hear())

    def cpu_s(self) -> float:
        taken = 0.0
        for process in self._processes:
            with contextlib.suppress(psutil.Error):
                times = psutil.Process(process.pid).cpu_times()
                taken += times.user + times.system
        return taken

    def why(self, error: BaseException) -> BaseException:
        """Return the cause of a broken group: ``error``, unless it only reports the end of another process."""
        end_s = time.monotonic() + _LAST_WORDS_S
        while isinstance(error, OthersGone):
            for pipe in self._pipes:
                with contextlib.suppress(EOFError, OSError):
                    while pipe.poll():
                        said = pipe.recv()
                        if isinstance(said, Exception) and not isinstance(said, OthersGone):
                            return said
            over = time.monotonic() > end_s
            for number, process in enumerate(self._processes, 1):
                # A process that only lost its connection to another exits with code 1 by itself.
                if process.exitcode is not None and (process.exitcode < 0 or over):
                    how = f"signal {-process.exitcode}" if process.exitcode < 0 else f"code {process.exitcode}"
                    return RunError(
                        f"process {number} of the {len(self._processes) + 1} that train this silo ended with {how}; "
                        "the system may have killed it for its memory. The next order starts new ones"
                    )
            if over:
                break
            time.sleep(0.02)
        return error

    def end(self) -> None:
        self._finalizer()

    def _hear(self) -> list[float]:
        said = []
        with _gone():
            for pipe in self._pipes:
                said.append(pipe.recv())
                if isinstance(said[-1], Exception):
                    raise said[-1]
        return said


@contextmanager
def _gone() -> Iterator[None]:
    try:
        yield
    except (EOFError, BrokenPipeError, ConnectionError) as error:
        raise OthersGone("another process of this silo's group has ended") from error


def _end(processes: list[SpawnProcess], pipes: list[Connection], folder: Path) -> None:
    for process in processes:
        process.kill()
    for process in processes:
        process.join()
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


def _follow(
    make: MakeTask,
    slot: SiloSlot,
    options: LocalOptions,
    run: PartPatterns,
    number: int,
    size: int,
    folder: Path,
    pipe: Connection,
    first: int,
) -> None:
    """Do one process's share of each order of the first process, whose process id is ``first``."""
    exit_with_parent(first)
    try:
        trainer = Trainer(make(), slot, replace(options, resources=False), run)
        pipe.send(0.0)
        device = torch.device(trainer.device)
        trainer.rank = Rank(number, size, folder, device)
        while True:
            try:
                asked, cursor, corrected = pipe.recv()
            except EOFError:
                return
            model = trainer.rank.spread(None, trainer.layout.size)
            correction = trainer.rank.spread(None, trainer.layout.size) if corrected else None
            if isinstance(asked, Split):
                trainer.evaluate(model, cursor, asked)
            else:
                trainer.follow(asked, model, cursor, correction)
            pipe.send(float(devices.held_bytes(device)))
    except Exception as error:
        if not isinstance(error, OthersGone):
            logger.exception("another rank failed")
        with contextlib.suppress(OSError):
            pipe.send(_told(error))
        sys.exit(1)


def _told(error: Exception) -> Exception:
    """Convert an error to a class that another process can unpickle; classes of user code may be missing there."""
    known = type(error).__module__.partition(".")[0] in ("builtins", "torch", "fedsync")
    return error if known else RunError(f"{type(error).__name__}: {error}")
