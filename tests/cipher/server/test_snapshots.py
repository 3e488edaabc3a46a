"""Which snapshot the server relies on: one that half of the silos stand for."""

import logging

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import WINDOW
from fedsync.cipher.server.chain import KeptSnapshot, Snapshots
from tests.cipher.sealers import member_of


def snapshot(version: int, silo: str = "a") -> KeptSnapshot:
    return KeptSnapshot(silo, version, np.zeros(1, dtype=np.uint8))


def test_a_snapshot_counts_once_enough_silos_have_built_on_it() -> None:
    snapshots = Snapshots(needed=3)
    snapshots.offer(snapshot(5))
    for name, base in (("a", 6), ("b", 5), ("b", 7), ("c", 4)):  # its author again, one twice, one from before
        snapshots.attest([member_of(name, base)])
        assert snapshots.settle(links=40) is None
    snapshots.attest([member_of("c", 5)])
    assert snapshots.settle(links=40) == snapshots.relied == snapshot(5)
    assert snapshots.candidate is None


def test_a_newer_one_begins_anew_and_the_older_is_relied_on_meanwhile() -> None:
    snapshots = Snapshots(needed=2)
    snapshots.offer(snapshot(5))
    snapshots.attest([member_of("b", 5)])
    snapshots.settle(links=10)
    snapshots.offer(snapshot(9))
    snapshots.attest([member_of("b", 8)])
    assert snapshots.settle(links=10) is None
    assert (snapshots.relied, snapshots.newest) == (snapshot(5), 9)


def test_where_nobody_attests_the_server_forgets_after_all_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    snapshots = Snapshots(needed=2)
    with caplog.at_level(logging.WARNING):
        for version in (WINDOW, 2 * WINDOW):
            snapshots.offer(snapshot(version))
            assert snapshots.settle(WINDOW) is None
            assert snapshots.settle(WINDOW + 1) == snapshot(version)
    assert caplog.text.count("fewer than 2 silos have attested") == 1
