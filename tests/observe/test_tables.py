"""What the tables of `fedsync compare` say."""

from typing import Any

from fedsync.observe.tables import Comparison, comparison_table
from fedsync.observe.terminal import Terminal


def summary(seed: int, seconds: float, accuracy: float | None) -> dict[str, Any]:
    return {"seed": seed, "seconds": seconds, "accuracy": accuracy, "utilisation": 0.5, "wait_fraction": 0.25}


def shown(comparisons: list[Comparison], *, trained: bool) -> list[list[str]]:
    """Words of the heading and of each row."""
    console = Terminal(width=120)
    with console.capture() as capture:
        console.print(comparison_table(comparisons, "title", trained=trained))
    lines = [line.split("  ") for line in capture.get().splitlines()]
    rows = [[cell.strip() for cell in line if cell.strip()] for line in lines]
    return [row for row in rows if len(row) > 1]


def test_strategies_stand_side_by_side_with_ratios_to_the_first() -> None:
    first = Comparison("one", [summary(7, 10.0, 0.9), summary(8, 14.0, 0.7)], [4.0, 8.0])
    second = Comparison("two", [summary(7, 10.0, 0.9), summary(8, 10.0, 0.9)], [3.0, 6.0])
    third = Comparison("three", [summary(7, 10.0, 0.9), summary(8, 10.0, 0.9)], [3.0, None])
    assert shown([first, second, third], trained=True) == [
        ["strategy", "to target s", "ratio", "reached", "total s", "accuracy", "utilised", "waiting"],
        # By hand: means of 4 and 8, of 10 and 14, of 0.9 and 0.7; 4.5 / 6.
        ["one", "6.0", "1.000", "2/2", "12.0", "0.8000", "50.0%", "25.0%"],
        ["two", "4.5", "0.750", "2/2", "10.0", "0.9000", "50.0%", "25.0%"],
        ["three", "missed", "-", "1/2", "10.0", "0.9000", "50.0%", "25.0%"],
    ]


def test_where_nothing_is_trained_there_is_no_target_to_miss() -> None:
    only = Comparison("one", [summary(7, 10.0, None)], [None])
    assert shown([only], trained=False) == [
        ["strategy", "total s", "utilised", "waiting"],
        ["one", "10.0", "50.0%", "25.0%"],
    ]
