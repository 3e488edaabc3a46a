"""Output without end: of the client that a run brings along, and of messages that make a silo or a server log."""

import logging
import os
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from fedsync.common import foreign
from fedsync.config.silo_start import LogsConfig
from fedsync.ops.supervisor import LoggedProcess, Program
from fedsync.silo.agent import agent
from fedsync.silo.agent.joins import JoinedRun, drop, name_of
from fedsync.silo.room.process_start import _log
from fedsync.transport.join import Join, new_secret

ENDLESS = "import sys\nwhile True: sys.stdout.write('x' * 2**20)"


def test_a_line_without_end_fills_no_memory_of_the_supervisor(tmp_path: Path) -> None:
    """A ClientApp of the server writes to the SuperNode's output, of which the supervisor took whole lines."""
    before = psutil.Process().memory_info().rss
    program = Program("room", [sys.executable, "-c", ENDLESS])
    process = LoggedProcess(program, {}, tmp_path, LogsConfig(bytes=1_000_000, keep=1))
    time.sleep(2.0)
    grown = psutil.Process().memory_info().rss - before
    process.end()
    assert grown < 100 * 2**20
    assert sum(each.stat().st_size for each in tmp_path.iterdir()) < 3_000_000


def test_a_flood_of_one_message_fills_no_log(tmp_path: Path) -> None:
    """A silo that knows its session sent heads that are none: each was a line in the SuperLink's database."""
    logger, file = foreign.logger("fedsync.flooded"), tmp_path / "log"
    handler = logging.FileHandler(file)
    logger.addHandler(handler)
    try:
        for number in range(50_000):
            logger.warning("a head that is none: %s", number)
        logger.warning("something else")
    finally:
        logger.removeHandler(handler)
        handler.close()
    lines = file.read_text().splitlines()
    assert "something else" in lines[-1]
    assert len(lines) < 3000


def test_prints_of_training_code_pass_as_no_line_of_the_log(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    """Its output went to the trainer's log as it was: ESC, forged records, and lines without end."""
    reading, writing = os.pipe()
    os.write(writing, b"\x1b[2Jcleared\n2026-01-01T00:00:00Z WARNING fedsync: forged\nno end")
    os.close(writing)
    _log(os.fdopen(reading, "rb"))
    said = capfdbinary.readouterr().err.decode()
    assert said.splitlines() == [
        "  | \\x1b[2Jcleared", "  | 2026-01-01T00:00:00Z WARNING fedsync: forged", "  | no end",
    ]  # fmt: skip


def test_joins_of_hubs_that_never_answer_shut_no_other_run_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 of them held all places for 80 seconds."""
    over = threading.Event()
    monkeypatch.setattr(agent.AgentSession, "serve", lambda session: over.wait(20))
    folder = tmp_path / "agent"
    folder.mkdir(mode=0o700)
    (folder / "inbox").mkdir()
    silent = agent.Agent(folder, stay=True)

    def dropped_in(number: int) -> str:
        join = Join(("http://127.0.0.1:1/x",), new_secret(), "", f"run {number}", "a")
        drop(folder / "inbox", JoinedRun(join.dump(), {}, {}, ""))
        return name_of(join)

    for number in range(agent.MOST_SESSIONS):
        dropped_in(number)
        if number % 32 == 31:
            silent._tend()
    assert len(silent._sessions) == agent.MOST_SESSIONS
    one = next(iter(silent._sessions.values()))[0]
    one._patience_s = agent.GIVE_UP_S  # its hub has answered
    time.sleep(2.5)
    name = dropped_in(-1)
    silent._tend()
    assert name in silent._sessions
    assert one in {session for session, _ in silent._sessions.values()}, "who was heard of stays"
    over.set()
