"""Plain lines for people: one a round, none twice, none left out."""

from __future__ import annotations

import io

from rich.console import Console

from fedsync.observe.ledger import Ledger, Round, SiloShare
from fedsync.observe.progress import RunProgress


def row(version: int) -> Round:
    share = SiloShare(8, 4, 32, compute_s=1.5, overhead_s=0.5, wait_s=0.0)
    return Round(version, at_s=2.0 * version, seconds=2.0, loss=1.0, silos={"a": share})


def lines_of(versions: list[int]) -> list[str]:
    text = io.StringIO()
    ledger = Ledger()
    with RunProgress(Console(file=text, width=200), "mine", rounds=9) as progress:
        for version in versions:
            ledger.rounds.append(row(version))
            progress.follow(ledger)
            progress.follow(ledger)
    return text.getvalue().splitlines()


def test_each_round_gets_one_line() -> None:
    one, two = lines_of([1, 2])
    assert "mine" in one
    assert "1/9" in one
    assert "2/9" in two
    assert "slowest a (2.0 s)" in one


def test_a_version_that_was_rolled_back_to_hides_no_round() -> None:
    """Versions 2 and 4 are rollbacks, which are no rounds."""
    assert [line.split()[2].split("/")[0] for line in lines_of([1, 3, 5, 6])] == ["1", "3", "5", "6"]
