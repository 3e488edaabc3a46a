"""A silo gets the model of all again, whatever became of its copy; and whatever it says, the server goes on."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from fedsync.cipher.silo import replica_state
from fedsync.cipher.silo.replay_log import ChainLog
from fedsync.common.errors import ConfigError, ProtocolError
from tests.cipher.make import Federation, change, order, plan, report

THREE = {"a": 100, "b": 300, "c": 600}
COMMITS = 10


def _history(
    federation: Federation, file: Path, commits: int, remember_at: int = -1, snapshot_at: int = -1
) -> dict[int, bytes]:
    """Updates of a and b are committed one by one; returns what c had on its disk at each version."""
    federation.silos["c"] = federation.copy("c", file)
    kept = {}
    federation.begin_all("abc", 0)
    for version in range(commits + 1):
        kept[version] = file.read_bytes()
        if version == remember_at:
            federation.aggregator.savepoint()
        if version == snapshot_at:
            federation.aggregator.put_snapshot("c", version, federation.silos["c"].snapshot())
        if version < commits:
            name = "ab"[version % 2]
            federation.commit(version + 1, [federation.answer(name, change(version))])
            for one in (name, "c"):
                federation.begin(one, version + 1)
            federation.aggregator.holds("c", version + 1)
    return kept


@pytest.fixture(params=[(-1, -1), (-1, 4), (1, 4)], ids=["links", "snapshot", "snapshot after what is remembered"])
def history(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Federation, dict[int, bytes]]:
    """A run of ten commits."""
    federation = Federation(plan("pad", quorum=32, rate=0.25), tmp_path, THREE)
    remember_at, snapshot_at = request.param
    return federation, _history(federation, tmp_path / "copy.bin", COMMITS, remember_at, snapshot_at)


def test_a_silo_with_any_earlier_copy_or_none_comes_to_the_model_of_all(
    history: tuple[Federation, dict[int, bytes]], tmp_path: Path
) -> None:
    federation, kept = history
    expected = federation.silos["c"].model
    for version in (-1, *kept):
        file = tmp_path / f"{version}.bin"
        if version >= 0:
            file.write_bytes(kept[version])
        silo = federation.copy("c", file)
        assert silo.holds == version
        federation.aggregator.greet("c", version, None)
        np.testing.assert_array_equal(silo.receive(federation.aggregator.outgoing("c"), COMMITS), expected)
        assert federation.copy("c", file).holds == COMMITS


def test_no_number_that_a_silo_says_ends_the_run(history: tuple[Federation, dict[int, bytes]]) -> None:
    federation, _ = history
    for version in (-(10**9), -7, -2, COMMITS + 1, 999, 10**9, 10**30):
        with pytest.raises(ProtocolError, match=r"silo 'b' failed the check 'version'"):
            federation.aggregator.holds("b", version)
        with pytest.raises(ProtocolError, match=r"silo 'b' failed the check 'version'"):
            federation.aggregator.greet("b", version, None)
    for version in range(-1, COMMITS + 1):
        federation.aggregator.holds("b", version)
        for name in "abc":
            federation.aggregator.outgoing(name)
    with pytest.raises(ProtocolError, match="no key"):
        federation.aggregator.holds("stranger", 0)


def test_a_silo_that_does_not_say_how_large_its_updates_are_is_refused_while_it_matters(tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, THREE)
    with pytest.raises(ProtocolError, match="greeting"):
        federation.aggregator.greet("a", -1, None)
    federation.aggregator.outgoing("a")
    federation.aggregator.greet("a", -1, None)


# The silo's disk.


def test_a_full_disk_changes_nothing_and_ends_with_new_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    federation = Federation(plan("pad", quorum=9), tmp_path, THREE)
    file = tmp_path / "copy.bin"
    federation.silos["c"] = federation.copy("c", file)

    def full(path: Path, pieces: object, mode: int) -> None:
        raise ConfigError(str(path), "cannot be written: No space left on device", "Check the disk")

    with monkeypatch.context() as patch:
        for version in range(5):
            if version == 2:
                patch.setattr(replica_state, "write_pieces", full)
            names = "abc" if version < 2 else "ab"
            federation.begin_all(names, version)
            if version >= 2:
                with pytest.raises(ConfigError, match="No space left"):
                    federation.begin("c", version)
                assert federation.silos["c"].holds == federation.copy("c", file).holds == 1
            federation.commit(version + 1, [federation.answer(name, change(version)) for name in names])
    federation.silos["c"] = federation.copy("c", file)  # its machine was restarted, too
    federation.aggregator.greet("c", federation.silos["c"].holds, None)
    np.testing.assert_array_equal(federation.begin("c", 5), federation.begin("a", 5))


def test_a_model_is_not_kept_before_it_is_put_down_which_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a trainer that died between the two could be led along another chain in another folder."""
    federation = Federation(plan("pad"), tmp_path, THREE)
    silo = federation.copy("c", tmp_path / "copy.bin")

    def full(self: ChainLog, known: Mapping[int, bytes]) -> None:
        raise ConfigError("chains", "cannot be written: No space left on device", "Check the disk")

    monkeypatch.setattr(ChainLog, "enter", full)
    with pytest.raises(ConfigError, match="No space left"):
        silo.receive(federation.aggregator.outgoing("c"), 0)
    assert silo.holds == -1 and not (tmp_path / "copy.bin").exists()


# Nonces.


@pytest.mark.parametrize("kind", ["bfv", "pad"])
def test_no_two_uploads_have_one_nonce_whatever_they_are_called(kind: str, tmp_path: Path) -> None:
    """The same order twice, with two updates: with one nonce the pad's difference would be that of the updates."""
    federation = Federation(plan(kind), tmp_path, {"a": 1})
    federation.begin("a", 0)
    envelopes = []
    for seed in range(2):
        update = federation.silos["a"].send(change(seed), order("a/1", 0), report(0))
        federation.aggregator.begin("a/1")
        federation.aggregator.put("a", "a/1", update)
        envelopes.append(federation.envelope("a/1"))
        federation.aggregator.discard("a/1")
    one, other = envelopes
    assert one.head.members[0].nonce != other.head.members[0].nonce
    # Slots differ by fewer than 2^44; of 4,096 uniform words of 60 bits and more hardly one is as near.
    near = np.abs((one.words - other.words).view(np.int64)) < 2**44
    assert near.mean() < 0.01
