"""Silos that refuse a run or an order, or are away: what the driver does with the others, and what it says."""

import re
import time
from pathlib import Path

import pytest
from flwr.app import Context, Message

from fedsync.common.errors import RunError
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import Refusal, Refused, Train
from tests.flower.grid import DirectGrid, asked, honest, saying
from tests.server.test_driver import fed_sync

pytestmark = pytest.mark.usefixtures("silos_here")


def _no_folder(message: Message, context: Context) -> Message:
    return saying(message, Refused(Refusal.CONFIG, "no folder /data"))


def test_a_run_that_all_silos_refuse_ends_at_once_with_a_refusal(tmp_path: Path) -> None:
    grid = DirectGrid(3, dict.fromkeys((1, 2, 3), _no_folder))
    told = r"needs 3 silos, and at most 2 of .* node 1 answers CONFIG: .*no folder /data"
    with pytest.raises(RunError, match=told):
        fed_sync(tmp_path).start(grid)
    assert grid.pushed == [(node, "Describe") for node in (1, 2, 3)]


def test_a_silo_that_answers_away_has_not_failed_and_nobody_waits_for_it(tmp_path: Path) -> None:
    """It answers AWAY to its first order: the run goes on with the others, and ends."""
    away: list[str] = []

    def closes(message: Message, context: Context) -> Message | None:
        request = asked(message)
        if not isinstance(request, Train):
            return honest(message, context)
        away.append(request.order.update_id)
        return saying(message, Refused(Refusal.AWAY, back_s=3600.0))

    fed_sync(tmp_path).start(DirectGrid(3, {2: closes}))
    assert away == ["b/1"], "it is not asked again in this hour"
    journal = (tmp_path / "journal.jsonl").read_text()
    assert journal.count('"back_s":3600.0') == 1 and "b is away for 3600 s" in journal


def test_a_silo_whose_disk_is_full_rests_before_its_next_order(tmp_path: Path) -> None:
    """Orders of milliseconds must not use up its three failures while its disk is full for a moment."""
    full: list[float] = []

    def full_twice(message: Message, context: Context) -> Message | None:
        if isinstance(asked(message), Train) and len(full) < 2:
            full.append(time.monotonic())
            return saying(message, Refused(Refusal.DISK))
        return honest(message, context)

    timing = Timeouts(poll_s=0.001, order_timeout_s=20, join_timeout_s=60, rest_s=0.2)
    run = fed_sync(tmp_path, "min_silos=3", "stop.rounds=5", timing=timing)
    summary = run.start(DirectGrid(3, {2: full_twice})).summary
    assert full[1] >= full[0] + 0.2 and not summary.get("lost")
    told = "2 of 5 orders of b failed, the last by: b answers DISK"
    assert any(note.startswith(told) for note in summary["notes"])


def test_a_result_names_the_silos_that_refused_the_run(tmp_path: Path) -> None:
    """The run begins without them; it stood in the log alone. One note is of all that say the same."""
    result = fed_sync(tmp_path, "min_silos=1").start(DirectGrid(3, {1: _no_folder, 3: _no_folder}))
    notes = [note for note in result.summary["notes"] if note.startswith("took no part")]
    assert len(notes) == 1 and re.match("took no part: each of node 1, node 3 answers CONFIG.*/data", notes[0])


def test_nobody_joins(tmp_path: Path) -> None:
    timing = Timeouts(poll_s=0.001, join_timeout_s=0.1)
    with pytest.raises(RunError, match="silos here: none"):
        fed_sync(tmp_path, timing=timing).start(DirectGrid(0))
