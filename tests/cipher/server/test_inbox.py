"""What silos send the server: one silo with another grid does not keep the others out."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fedsync.core.layout import Vector
from tests.cipher.make import INITIAL, Federation, change, close, plan

FOUR = {"a": 10, "b": 10, "c": 10, "d": 10}


def _spoil(federation: Federation, name: str) -> None:
    """The silo seals on a grid of its own from now on."""
    silo = federation.silos[name]
    silo._state = replace(silo._state, scales=replace(silo._state.scales, exponents=((7, 7, 7),)))


def _answers(federation: Federation, names: str, liar: str) -> tuple[list[str], list[Vector]]:
    """All answer, the liar first."""
    for name in names:
        federation.begin(name, 0)
    _spoil(federation, liar)
    updates = {name: change(ord(name)) for name in names}
    ids = [federation.answer(name, updates[name]) for name in sorted(names, key=lambda name: name != liar)]
    return ids, [updates[name] for name in names if name != liar]


@pytest.mark.parametrize("kind", ["bfv", "masked"])
def test_the_grid_that_most_silos_used_counts_whoever_was_first(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation = Federation(plan(kind), tmp_path, FOUR)
    ids, honest = _answers(federation, "abcd", liar="d")
    federation.commit(1, ids)
    while federation.aggregator.blocked:
        for name, question in federation.aggregator.questions().items():
            federation.aggregator.answer(name, federation.silos[name].answer(question))
    assert "d/1 was sealed on another grid" in caplog.text
    close(federation.begin("a", 1), INITIAL + np.mean(honest, axis=0))


def test_an_update_from_before_an_agreement_is_no_spoiler(tmp_path: Path) -> None:
    """Two updates on the new grid, one on the old that its silo was given: all count."""
    federation = Federation(plan(quorum=2), tmp_path, FOUR)
    for name in "abc":
        federation.begin(name, 0)
    federation.commit(1, [federation.answer(name, change(ord(name))) for name in "ab"])
    for name in "ab":
        federation.begin(name, 1)
    ids = [federation.answer(name, change(ord(name))) for name in "abc"]
    before = federation.silos["a"].model
    federation.commit(2, ids)
    close(federation.begin("a", 2), before + np.mean([change(ord(name)) for name in "abc"], axis=0), 3)
