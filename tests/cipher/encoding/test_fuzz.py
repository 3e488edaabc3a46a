"""Mutated messages against server and silo; `bench/faults/fuzz.py` sends three hundred times as many."""

import random
from collections.abc import Callable

import pytest

from bench.faults import fuzz
from bench.faults.fuzz_whole import Whole
from fedsync.common.errors import ProtocolError


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


@pytest.mark.parametrize("kind", fuzz.KINDS)
def test_words_that_nobody_sealed_fail_at_the_tag_and_reach_no_native_code(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    targets, opened = fuzz.Targets(kind), 0

    def count(*_: object) -> None:
        nonlocal opened
        opened += 1

    monkeypatch.setattr(targets._pipeline._sealer, "open", count)
    for seed in range(5):
        data = fuzz.noise(random.Random(seed), bytearray(targets.sum))
        with pytest.raises(ProtocolError) as caught:
            targets.silo(data)
        assert caught.value.check == "tag"
    assert opened == 0
