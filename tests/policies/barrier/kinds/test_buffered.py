"""FedBuff: so many updates make a commit, and nobody waits."""

import math
from pathlib import Path

import pytest

from fedsync.core.actions import Commit
from tests.policies.barrier.make import begins, commits, race

SPEEDS = [256.0, 128.0, 64.0]
"""Orders of 1, 2 and 4 s."""


def test_by_hand(tmp_path: Path) -> None:
    """K = 3. At 2 s a/1, b/1 and a/2 are in. At 4 s a/3 is, and of c/1, b/2 and a/4 the first two; a/4 waits.

    c/1 began with version 0 and is part of version 2: one version old.
    """
    aggregation = {"kind": "fedbuff", "server_rate": 1.5, "staleness": {"kind": "polynomial", "exponent": 0.5}}
    result = race(
        tmp_path, SPEEDS, {"kind": "buffered", "size": 3}, aggregation=aggregation, stop={"rounds": 3, "seconds": 9.0}
    )
    assert begins(result) == {"a": [0, 1, 2, 3, 4, 5], "b": [0, 2, 4], "c": [0, 4]}
    assert commits(result) == [(2, ["a/1", "a/2", "b/1"]), (4, ["a/3", "b/2", "c/1"]), (6, ["a/4", "a/5", "b/3"])]
    weights = [commit.weights for _, commit in result.actions(Commit)]
    assert dict(weights[0]) == pytest.approx(dict.fromkeys(["a/1", "a/2", "b/1"], 0.5))
    assert dict(weights[1]) == pytest.approx({"a/3": 0.5, "b/2": 0.5, "c/1": 0.5 / math.sqrt(2)})
    assert result.ledger.summary()["wait_fraction"] == pytest.approx(0)


def test_a_silo_s_several_updates_are_one_share_of_the_round(tmp_path: Path) -> None:
    result = race(tmp_path, SPEEDS, {"kind": "buffered", "size": 3}, stop={"rounds": 1, "seconds": 9.0})
    share = result.ledger.rounds[0].silos["a"]
    assert (share.steps, share.samples, share.wait_s) == (16, 512, 0.0)
    assert share.compute_s == pytest.approx(2.0)


def test_size_1_is_asp(tmp_path: Path) -> None:
    buffered = race(tmp_path / "buffered", SPEEDS, {"kind": "buffered", "size": 1})
    asp = race(tmp_path / "asp", SPEEDS, {"kind": "asp"})
    assert begins(buffered) == begins(asp)
    assert commits(buffered) == commits(asp)


def test_fedasync_by_hand(tmp_path: Path) -> None:
    """alpha = 1/2, s(x) = 1 / (1 + x); every silo adds 1 to the model it starts from.

    1 s: a, fresh: 0.5 x 0 + 0.5 x 1 = 0.5. 2 s: b from version 0 makes version 2, so it is 1 old and alpha 1/4:
    0.75 x 0.5 + 0.25 x 1 = 0.625; then a from version 1, where the model was 0.5, makes version 3 and is 1 old too:
    0.75 x 0.625 + 0.25 x 1.5 = 0.84375.
    """
    aggregation = {"kind": "fedasync", "mixing": 0.5, "staleness": {"kind": "polynomial", "exponent": 1.0}}
    stop = {"rounds": 3, "seconds": 9.0}
    result = race(tmp_path, SPEEDS[:2], {"kind": "asp"}, aggregation=aggregation, stop=stop)
    assert commits(result) == [(1, ["a/1"]), (2, ["b/1"]), (2, ["a/2"])]
    assert result.model is not None
    assert result.model.tolist() == [0.84375] * 3
