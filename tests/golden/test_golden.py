"""The code decides today as it did when the golden journal was written."""

from __future__ import annotations

from pathlib import Path

from fedsync.core.actions import Dispatch
from fedsync.core.journal import read_journal
from fedsync.observe.replay import replay
from tests.golden.lb_bsp import JOURNAL, run


def test_the_golden_journal_is_reproduced_byte_for_byte(tmp_path: Path) -> None:
    """The header, which names the version of FedSync, may differ. To change it on purpose, see lb_bsp.py."""
    golden, now = JOURNAL.read_text(encoding="utf-8").splitlines(), run(tmp_path).text.splitlines()
    for number, (old, new) in enumerate(zip(golden[1:], now[1:], strict=True), start=2):
        assert new == old, f"line {number} of {JOURNAL.name}"


def test_the_golden_journal_still_replays() -> None:
    """Journals of older versions stay readable: the header validates, and the decisions come out the same."""
    assert len(replay(JOURNAL)) == len(JOURNAL.read_text(encoding="utf-8").splitlines()) - 1


def test_the_golden_journal_says_what_lb_bsp_does() -> None:
    """Of 72, c's memory takes 20; a and b share the rest, 52, equally at first and then as 300:200.

    Round 2: speeds 3:2:1 would be 36, 24, 12, so nothing is capped. Round 1: 24 each, c capped at 20: 26, 26, 20.
    """
    _, entries = read_journal(JOURNAL)
    orders = [action for entry in entries for action in entry.actions if isinstance(action, Dispatch)]
    sizes = [(order.silo, order.order.batch_size) for order in orders]
    assert sizes == [("a", 26), ("b", 26), ("c", 20), *[("a", 36), ("b", 24), ("c", 12)] * 2]
