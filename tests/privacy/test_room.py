"""Private orders in a real silo's room: a named file, a process without keys and network, and one that is killed."""

import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from bench.faults.ledger_kills import BATCH, STEPS, VALUES, order_of, prepare, spec
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.privacy.release import Release
from fedsync.silo.owner.owner_policy import ALL_DATA, owner_environment
from fedsync.silo.owner.privacy_ledger import PrivacyLedger
from fedsync.silo.protocol import Identity, Reply, Train, read_reply, write_request
from fedsync.silo.room.process import TrainingProcess
from fedsync.silo.session.service import TrainerService


@pytest.fixture
def short() -> Iterator[Path]:
    """Folder of a silo, whose path may have sixty bytes."""
    with TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.mark.slow
def test_a_killed_training_process_is_private_again(short: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = prepare(short)
    home = short / "state" / "trainers" / "run-1"
    home.mkdir(mode=0o700, parents=True)
    for name, value in owner_environment(config).items():
        monkeypatch.setenv(name, value)
    service = TrainerService(Identity(spec(1).dump(), 0, "silo-a"), home, confined=True)
    process = service._session._trainer
    assert isinstance(process, TrainingProcess)

    def ask(order: WorkOrder) -> Reply:
        model = np.zeros(VALUES, np.float32).view(np.uint8)
        return read_reply(service.ask(write_request(Train(order)), model)[0], "silo-a")

    try:
        first = ask(order_of(1))
        os.kill(process._started._process.pid, signal.SIGKILL)
        assert process._started.exit_code(10.0) is not None
        second = ask(order_of(2))
    finally:
        process.end()
    for report in (first, second):
        assert isinstance(report, WorkReport) and report.steps == STEPS and report.loss is None
    ledger = PrivacyLedger(ALL_DATA, config.privacy, short / "state" / "privacy" / f"{ALL_DATA}.jsonl").load()  # type: ignore[arg-type]
    units = service.facts.examples
    assert ledger.spent == Counter({Release(BATCH / units, 20.0): 2 * STEPS})
