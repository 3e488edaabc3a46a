"""What silos send the server: it counts once, and one silo with another grid does not keep the others out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import WINDOW
from fedsync.cipher.keys.keywrap import SUITE, ServerKeys
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.cipher.silo.replica_state import ReplicaState
from fedsync.common.errors import PolicyError, ProtocolError
from fedsync.evaluation.version_scores import Selection
from fedsync.model.layout import Layout
from fedsync.model.server_optimizer import Adaptive, HeavyBall
from tests.cipher.make import INITIAL, LAYOUT, Federation, change, close, mean_of, plan

FOUR = {"a": 10, "b": 10, "c": 10, "d": 10}


@pytest.mark.parametrize("kind", ["bfv", "masked"])
def test_the_grid_of_most_silos_counts_anyway(kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(plan(kind), tmp_path, FOUR)
    federation.begin_all("abcd", 0)
    federation.own_grid("d", 7, 7, 7)
    federation.commit(1, federation.answer_all("dabc"))
    federation.unmask()
    assert "d/1 was sealed on another grid" in caplog.text
    close(federation.begin("a", 1), INITIAL + mean_of("abc"))


def test_an_update_is_committed_once_and_its_order_is_over(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, FOUR)
    federation.begin("a", 0)
    update_id, payload = federation.seal("a", change(1))
    federation.aggregator.put("a", update_id, payload)
    federation.commit(1, [update_id])
    with pytest.raises(ProtocolError, match="was not ordered"):
        federation.aggregator.put("a", update_id, payload)
    with pytest.raises(KeyError):
        federation.commit(2, [update_id])


def test_a_silo_more_than_a_sum_holds_costs_one_update_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Of 8 bits 16 updates; the silo that counts for nothing is another in the next version."""
    names = "abcdefghijklmnopq"
    federation = Federation(plan("pad", bits=8, quorum=2), tmp_path, dict.fromkeys(names, 10))
    expected, out = INITIAL, set[str]()
    for version in range(2):
        caplog.clear()
        updates = dict(zip(names, federation.run_round(version, names), strict=True))
        (left_out,) = [name for name in names if f"{name}/{version + 1} is beyond the 16 updates" in caplog.text]
        out.add(left_out)
        expected = expected + np.mean([update for name, update in updates.items() if name != left_out], axis=0)
    np.testing.assert_allclose(federation.begin("a", 2), expected, atol=2 * 2.0**-10)  # a step a version
    assert len(out) == 2


@pytest.mark.parametrize(("newest", "kept"), [(WINDOW - 1, 1), (WINDOW, 0)])
def test_an_update_from_a_forgotten_version_does_not_count(newest: int, kept: int, tmp_path: Path) -> None:
    """Silos take one that started up to `WINDOW` versions before the version that it leads to."""
    federation = Federation(plan("pad"), tmp_path, FOUR)
    federation.begin("a", 0)
    update_id = federation.answer("a", change(1))
    assert len(federation.aggregator._inbox.take([update_id], newest)) == kept


def test_too_few_greetings_are_not_added_up(tmp_path: Path) -> None:
    """A calibration of one silo would tell how large its updates are."""
    federation = Federation(plan("pad", members=2), tmp_path, FOUR)
    alone = EncryptedAggregator(federation.plan, federation.keys.server)
    alone.greet("a", -1, federation.silos["a"].greeting())
    with pytest.raises(PolicyError, match="too few to add up"):
        alone.outgoing("a")
    alone.greet("b", -1, federation.silos["b"].greeting())
    alone.outgoing("a")


def test_a_snapshot_is_no_larger_than_a_model_and_a_mebibyte(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, FOUR)
    most = federation.aggregator.snapshot_bytes
    assert LAYOUT.nbytes + 2**20 < most < LAYOUT.nbytes + 2**20 + 10_000
    with pytest.raises(ProtocolError, match="a name is empty"):  # not for its length
        federation.aggregator.put_snapshot("a", 0, np.zeros(most, dtype=np.uint8))
    for bad in (np.zeros(most + 1, dtype=np.uint8), np.zeros(3, dtype=np.float32)):
        with pytest.raises(ProtocolError, match="bytes, at most"):
            federation.aggregator.put_snapshot("a", 0, bad)


LARGE = Layout(("w",), ((600_000,),))
LARGE_SNAPSHOTS: dict[str, tuple[Layout, int, dict[str, Any]]] = {
    "many tensors": (Layout(tuple(f"layer{number}" for number in range(20_000)), ((1,),) * 20_000), 2, {}),
    "many silos": (Layout(("w",), ((1,),)), 2000, {}),
    "the best model": (LARGE, 3, {"selection": Selection()}),
    "two moments": (LARGE, 3, {"optimizer": Adaptive("adam", 0.05, 0.9, 0.99, 0.05)}),
    "a moment and the best model": (LARGE, 3, {"optimizer": HeavyBall(0.9, 1), "selection": Selection()}),
}


@pytest.mark.parametrize("what", LARGE_SNAPSHOTS)
def test_the_server_takes_snapshots_with_all_that_is_in_them(what: str) -> None:
    """Else it keeps every link, and asks again after each commit for what it then refuses."""
    layout, silos, more = LARGE_SNAPSHOTS[what]
    large, names = replace(plan(), layout=layout, **more), [f"{number:064}" for number in range(silos)]
    keys = ServerKeys(
        epoch=1, fingerprint=bytes(16), suite=SUITE, senders=dict.fromkeys(names, bytes(32)), administrator=bytes(32)
    )
    assert ReplicaState.most_bytes(large, names) + 1000 < EncryptedAggregator(large, keys).snapshot_bytes


def test_two_updates_with_one_nonce_are_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Silos refuse a sum of both, for ever, and count it as a forgery."""
    federation = Federation(plan("pad"), tmp_path, FOUR)
    monkeypatch.setattr("secrets.token_bytes", bytes)
    federation.begin("a", 0)
    federation.answer("a", change(1))
    federation.begin("a", 0)
    with pytest.raises(ProtocolError, match="nonce"):
        federation.answer("a", change(2))
