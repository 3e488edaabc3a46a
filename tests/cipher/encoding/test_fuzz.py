"""Mutated messages against server and silo; `bench/faults/fuzz.py` sends three hundred times as many."""

from collections.abc import Callable

import pytest

from bench.faults import fuzz
from bench.faults.fuzz_whole import Whole


def test_mutated_messages_do_no_harm() -> None:
    """`attack` raises whatever is no ProtocolError."""
    outcome = fuzz.attack(300, seed=1)
    assert outcome.done == 300
    assert sum(outcome.refused.values()) + outcome.harmless == 300
    # Every layer was reached.
    assert {"length", "header", "words", "tag", "magic"} <= outcome.refused.keys()
    assert outcome.growth < fuzz.MOST_GROWTH


@pytest.mark.parametrize("make", [lambda: fuzz.Targets("bfv"), lambda: fuzz.Targets("pad"), Whole])
def test_unchanged_messages_are_taken(make: Callable[[], fuzz.Targets | Whole]) -> None:
    """What is fuzzed would pass if it were not mutated."""
    targets = make()
    assert targets.server(targets.update)
    assert targets.silo(targets.sum)
