"""Every strategy decides today as it did when its golden journal was written."""

from pathlib import Path

import pytest

from fedsync.core.actions import Commit, Dispatch
from fedsync.core.journal import read_journal
from fedsync.observe.replay import replay
from tests.golden.journals import BOOKS, BY_HAND, FOLDER, journal, names, run


@pytest.mark.slow
@pytest.mark.parametrize("name", names())
def test_a_golden_journal_is_reproduced_byte_for_byte(name: str, tmp_path: Path) -> None:
    """The header, which names the version of FedSync, may differ. To change it on purpose, see journals.py."""
    path = journal(name)
    assert path.exists(), f"no golden journal: python -m tests.golden.journals {name}"
    golden, now = path.read_text(encoding="utf-8").splitlines(), run(name, tmp_path).text.splitlines()
    for number, (old, new) in enumerate(zip(golden[1:], now[1:], strict=False), start=2):
        assert new == old, f"line {number} of {path.name}"
    assert len(now) == len(golden)


@pytest.mark.parametrize("name", names())
def test_a_golden_journal_still_replays_and_is_about_something(name: str) -> None:
    """It replays from its own header, and in it somebody was given work and something was committed."""
    assert len(replay(journal(name))) == len(journal(name).read_text(encoding="utf-8").splitlines()) - 1
    actions = [action for entry in read_journal(journal(name))[1] for action in entry.actions]
    assert any(isinstance(action, Dispatch) for action in actions)
    assert any(isinstance(action, Commit) for action in actions)


@pytest.mark.parametrize("file", BOOKS)
def test_what_others_read_of_a_run_is_as_it_was(file: str, tmp_path: Path) -> None:
    """Names and numbers of a run's files are promised; to change them on purpose, see journals.py."""
    run(BY_HAND, tmp_path)
    assert (tmp_path / file).read_text() == (FOLDER / "books" / file).read_text()


def test_lb_bsp_divides_as_by_hand() -> None:
    """Of 72, c's memory takes 20; a and b share the rest, 52, equally at first and then as 300:200.

    Round 2: speeds 3:2:1 would be 36, 24, 12, so nothing is capped. Round 1: 24 each, c capped at 20: 26, 26, 20.
    """
    _, entries = read_journal(journal(BY_HAND))
    orders = [action for entry in entries for action in entry.actions if isinstance(action, Dispatch)]
    sizes = [(order.silo, order.order.batch_size) for order in orders]
    assert sizes == [("a", 26), ("b", 26), ("c", 20), *[("a", 36), ("b", 24), ("c", 12)] * 2]


def test_no_journal_is_left_over() -> None:
    assert {path.stem for path in FOLDER.glob("*.jsonl")} == set(names())
