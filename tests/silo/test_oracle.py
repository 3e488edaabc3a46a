"""A silo tells a server that forges nothing but that it refuses: every forgery has one answer, byte by byte."""

import sys
from pathlib import Path

import numpy as np
import pytest

from bench.faults.oracle import (
    ONE_ANSWER,
    SUITES,
    Recorded,
    _distance,
    chance_of_one_distribution,
    compare,
    forge,
    kinds_of,
)
from fedsync.common.files import private_folder


@pytest.mark.parametrize("suite", SUITES)
def test_no_forgery_is_told_from_another(suite: str, tmp_path: Path) -> None:
    """What is refused by the tag, by a digest, by a member's name or by a mask is the same word, and has no more."""
    folder = private_folder(tmp_path / "k")
    recorded = Recorded(suite, folder)
    found = forge(recorded, folder, 200, seed=1)
    assert len(found) >= 13
    assert {name: dict(each.answers) for name, each in found.items() if not each.one_answer} == {}
    assert ONE_ANSWER == '{"type":"Refused","code":"integrity"}'
    pairs = compare(found, kinds_of(recorded))
    assert len(pairs) == 20 and all(0 <= chance <= 1 for chance in pairs.values()), "times are not for a test"


def test_distributions_that_differ_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    one, same, later = (list(rng.exponential(1.0, 300) + shift) for shift in (0.0, 0.0, 0.5))
    assert _distance(np.array([1.0, 2.0]), np.array([2.0, 3.0])) == 0.5, "by hand: at 1 and at 2"
    for installed in (True, False):
        if not installed:
            monkeypatch.setitem(sys.modules, "scipy.stats", None)
        assert chance_of_one_distribution(one, same, rng) > 0.05
        assert chance_of_one_distribution(one, later, rng) < 0.01
