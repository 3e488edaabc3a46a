"""What a silo has evaluated for the server: each model once on the same samples, also after a restart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.cipher.silo.replay_log import Asked
from fedsync.core.orders import Split, Subject, WorkOrder
from tests.cipher.make import order


def asking(
    number: int, subject: Subject = Subject.LAST, split: Split = Split.VALIDATION, rate: float = 0.1
) -> WorkOrder:
    return replace(order(f"a/{number}", number, number), subject=subject, split=split, learning_rate=rate)


def test_a_model_is_evaluated_once_in_rounds(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "asked.json")
    assert asked.admits(asking(1), "m1") and asked.admits(asking(2), "m2")
    for each in (asked, Asked(tmp_path / "asked.json")):
        assert not each.admits(asking(3), "m1") and not each.admits(asking(3), "m2")
        assert each.admits(asking(2), "m2"), "the same order, which was killed before its update left"


def test_of_rounds_the_last_ones_are_remembered(tmp_path: Path) -> None:
    asked = Asked(tmp_path / "asked.json")
    for number in range(1, 200):
        assert asked.admits(asking(number), f"m{number}")
    assert len((tmp_path / "asked.json").read_bytes()) < 10_000
    assert not Asked(tmp_path / "asked.json").admits(asking(200), "m199")


@pytest.mark.parametrize("again", [asking(2, Subject.LAST, Split.TEST, 0), asking(2, Subject.BEST, Split.TEST, 0)])
def test_the_test_split_is_for_one_model_of_each_kind(again: WorkOrder, tmp_path: Path) -> None:
    asked = Asked(tmp_path / "asked.json")
    first = asking(1, Subject.LAST, Split.TEST, 0)
    assert asked.admits(first, "m1") and asked.admits(first, "m1")
    for each in (asked, Asked(tmp_path / "asked.json")):
        assert not each.admits(again, "m1")
        assert each.admits(again, "m2") == (again.subject is Subject.BEST)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rounds": 1, "tests": {}}', '{"rounds": [], "tests": {"last": 1}}'])
def test_a_record_that_is_damaged_counts_as_if_all_had_been_asked(text: str, tmp_path: Path) -> None:
    (tmp_path / "asked.json").write_text(text)
    asked = Asked(tmp_path / "asked.json")
    assert not any(asked.admits(asking(1, subject, Split.TEST, 0), "m1") for subject in Subject)
    assert asked.admits(asking(2), "m2"), "and the run goes on"
