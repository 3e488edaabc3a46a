"""Mutated messages against server and silo; `bench/faults/fuzz.py` sends three hundred times as many."""

import random
from collections.abc import Callable

import pytest

from bench.faults import fuzz
from bench.faults.fuzz_whole import Whole
from fedsync.core.errors import ProtocolError


def test_mutated_messages_do_no_harm() -> None:
    """`attack` raises whatever is no ProtocolError."""
    outcome = fuzz.attack(300, seed=1)
    assert outcome.done == 300
    assert sum(outcome.refused.values()) + outcome.harmless == 300
    # Every layer was reached: length, header, native code, tag.
    assert {"length", "header", "words", "tag", "magic", "sender"} <= outcome.refused.keys()
    assert outcome.growth < fuzz.MOST_GROWTH


@pytest.mark.parametrize("make", [lambda: fuzz.Targets("bfv"), lambda: fuzz.Targets("pad"), Whole])
def test_unchanged_messages_are_taken(make: Callable[[], fuzz.Targets | Whole]) -> None:
    """What is fuzzed would pass if it were not mutated."""
    targets = make()
    assert targets.server(targets.update)
    assert targets.silo(targets.sum)


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_words_that_nobody_sealed_reach_native_code_and_fail_at_the_tag(kind: str) -> None:
    targets = fuzz.Targets(kind)
    for seed in range(5):
        data = fuzz.noise(random.Random(seed), bytearray(targets.sum))
        with pytest.raises(ProtocolError) as caught:
            targets.silo(data)
        assert caught.value.check == "tag"
