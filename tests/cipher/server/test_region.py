"""A relay adds what its silos sealed; the server adds relays' sums; silos open what single updates would have made."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedsync.cipher.encoding.sealed_wire import MAX_ANNEX
from fedsync.cipher.server.sealed_aggregator import EncryptedAggregator
from fedsync.common.errors import ProtocolError
from fedsync.core.actions import Commit
from fedsync.extras.relays.region_sums import RegionSum
from fedsync.extras.relays.sealed_region import SealedRegion
from fedsync.extras.relays.sealed_sum import most_bytes
from fedsync.extras.tracing.evidence import Evidence
from fedsync.model.transfer import Payload
from tests.cipher.make import INITIAL, Federation, change, close, mean_of, plan

FIVE = dict.fromkeys("abcde", 10)
Sealed = dict[str, tuple[str, Payload]]


def sealed(federation: Federation, version: int = 0) -> Sealed:
    """What each silo answers an order for this version with."""
    federation.begin_all(federation.examples, version)
    return {name: federation.seal(name, change(100 * version + ord(name))) for name in federation.examples}


def sums_of(federation: Federation, answers: Sealed, names: str, folder: Path | None = None) -> Sequence[RegionSum]:
    """What the relay of these silos makes of their answers."""
    region = SealedRegion(federation.plan, federation.keys.server, folder)
    for name in names:
        update_id, payload = answers[name]
        region.put(name, update_id, federation.bases[update_id], 1.0, payload)
    return region.sums([answers[name][0] for name in names])


def send(federation: Federation, sums: Sequence[RegionSum], to: EncryptedAggregator | None = None) -> list[str]:
    """The server gets regions' sums; returns the ids of all updates."""
    aggregator = to or federation.aggregator
    for each in sums:
        if len(each.update_ids) == 1:
            aggregator.put(each.update_ids[0][0], each.update_ids[0], each.payload)
        else:
            assert each.payload.nbytes <= aggregator.sum_bytes(len(each.update_ids))
            aggregator.put_sum("relay", each.update_ids, each.payload)
    return [update_id for each in sums for update_id in each.update_ids]


@pytest.mark.parametrize("kind", ["bfv", "pad", "masked"])
def test_silos_open_sums_of_sums_bit_for_bit_as_sums_of_single_updates(kind: str, tmp_path: Path) -> None:
    """Two regions and a silo without one; a server that had each update alone sends the same bytes."""
    federation = Federation(plan(kind), tmp_path, FIVE)
    answers = sealed(federation)
    alone = EncryptedAggregator(federation.plan, federation.keys.server)
    alone.restore(deepcopy(federation.aggregator.state()))
    if kind == "masked":
        # What was restored begins attempts of its own; this one did not.
        alone._inbox._attempts = federation.aggregator._inbox._attempts
    for name, (update_id, payload) in answers.items():
        alone.put(name, update_id, payload)
    ids = [
        update_id for names in ("ad", "be", "c") for update_id in send(federation, sums_of(federation, answers, names))
    ]
    summed = federation.aggregator
    for federation.aggregator in (alone, summed):
        federation.commit(1, ids)
        federation.unmask()
    if kind != "masked":  # who signed first, and so whose signatures travel, is as it happens
        assert bytes(summed.outgoing("a")) == bytes(alone.outgoing("a"))
    models = [federation.begin(name, 1).copy() for name in "abcde"]
    close(models[0], INITIAL + mean_of("abcde"))
    for model in models:
        np.testing.assert_array_equal(model, models[0])


def test_what_is_in_the_clear_is_weighed_as_if_it_had_come_alone(tmp_path: Path) -> None:
    """The relay's mean by shares 1 and 3, times the 0.8 that both count together, and 0.2 of the third."""
    federation = Federation(plan("pad", only=("body.*",), by="examples"), tmp_path, {"a": 10, "b": 30, "c": 10})
    answers = sealed(federation)
    region = SealedRegion(federation.plan, federation.keys.server)
    for name, share in (("a", 1.0), ("b", 3.0)):
        region.put(name, answers[name][0], 0, share, answers[name][1])
    ids = send(federation, region.sums(["a/1", "b/1"]))
    federation.aggregator.put("c", *answers["c"])
    federation.aggregator.commit(Commit(1, {"a/1": 0.2, "b/1": 0.6, "c/1": 0.2}))
    expected = INITIAL + 0.2 * change(ord("a")) + 0.6 * change(ord("b")) + 0.2 * change(ord("c"))
    assert ids == ["a/1", "b/1"]
    close(federation.begin("a", 1), expected)


@pytest.mark.parametrize("kind", ["bfv", "masked"])
def test_a_silo_of_another_grid_or_with_other_masks_comes_alone(kind: str, tmp_path: Path) -> None:
    federation = Federation(plan(kind), tmp_path, FIVE)
    federation.begin_all("abbbc" if kind == "masked" else "abc", 0)  # a third order is another attempt
    if kind == "bfv":
        federation.own_grid("b", 7, 7, 7)
    answers = {name: federation.seal(name, change(ord(name))) for name in "abc"}
    found = sums_of(federation, answers, "abc")
    assert [each.update_ids for each in found] == [("a/1", "c/1"), (answers["b"][0],)]


def test_sums_wait_in_files(tmp_path: Path) -> None:
    federation = Federation(plan("bfv"), tmp_path, FIVE)
    (found,) = sums_of(federation, sealed(federation), "abc", tmp_path / "relay")
    ids = send(federation, [found])
    federation.commit(1, ids)
    close(federation.begin("a", 1), INITIAL + mean_of("abc"))


def test_a_sum_counts_whole_or_not_at_all(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation(plan("pad"), tmp_path, FIVE)
    answers = sealed(federation)
    send(federation, sums_of(federation, answers, "abc"))
    federation.aggregator.put("d", *answers["d"])
    federation.aggregator.put("e", *answers["e"])
    federation.aggregator.discard("b/1")
    federation.commit(1, ["a/1", "c/1", "d/1", "e/1"])
    assert "a/1 is in a region's sum with one that does not count" in caplog.text
    close(federation.begin("a", 1), INITIAL + mean_of("de"))


def test_a_commit_of_some_of_a_sum_has_none_of_it_then_nor_later(tmp_path: Path) -> None:
    federation = Federation(plan("pad", members=2), tmp_path, FIVE)
    answers = sealed(federation)
    send(federation, sums_of(federation, answers, "abc"))
    send(federation, sums_of(federation, answers, "de"))
    federation.commit(1, ["a/1", "d/1", "e/1"])
    federation.commit(2, ["b/1", "c/1"])
    close(federation.begin("a", 2), INITIAL + mean_of("de"))


@pytest.mark.parametrize("spoil", [False, True])
def test_sums_that_wait_outlive_the_server(tmp_path: Path, *, spoil: bool) -> None:
    federation = Federation(plan("pad"), tmp_path, FIVE)
    answers = sealed(federation)
    send(federation, sums_of(federation, answers, "abc"))
    send(federation, sums_of(federation, answers, "de"))
    if spoil:
        federation.aggregator.discard("a/1")
    before, federation.aggregator = federation.aggregator, EncryptedAggregator(federation.plan, federation.keys.server)
    federation.aggregator.restore(before.state())
    federation.commit(1, [f"{name}/1" for name in ("bcde" if spoil else "abcde")])
    counted = "de" if spoil else "abcde"
    close(federation.begin("a", 1), INITIAL + mean_of(counted))


def test_who_keeps_single_updates_says_that_a_region_sends_none(tmp_path: Path, caplog: Any) -> None:
    federation = Federation(plan("pad"), tmp_path, FIVE)
    evidence = Evidence(tmp_path / "evidence", "run", 8, 2**30)
    kept = EncryptedAggregator(federation.plan, federation.keys.server, evidence=evidence)
    kept.restore(federation.aggregator.state())
    federation.aggregator = kept
    federation.commit(1, send(federation, sums_of(federation, sealed(federation), "abc")))
    assert "regions' relays send sums" in caplog.text and not [*(tmp_path / "evidence").glob("*")]


# What the server refuses.


def test_an_update_is_in_one_sum_only(tmp_path: Path) -> None:
    """Two authentic sums that overlap would reveal their difference."""
    federation = Federation(plan("pad"), tmp_path, FIVE)
    answers = sealed(federation)
    sums = sums_of(federation, answers, "abc")
    send(federation, sums)
    with pytest.raises(ProtocolError, match="'a/1' is here already"):
        send(federation, sums_of(federation, answers, "ad"))
    with pytest.raises(ProtocolError, match="'a/1' is here already"):
        federation.aggregator.put("a", *answers["a"])
    federation.aggregator.discard("a/1")
    with pytest.raises(ProtocolError, match="'b/1' was not ordered"):
        federation.aggregator.put("b", *answers["b"])
    federation.commit(1, ["b/1", "c/1"])
    with pytest.raises(ProtocolError, match="'b/1' was not ordered"):
        send(federation, sums_of(federation, answers, "bc"))


def _cut(payload: Payload, at: int) -> Payload:
    return payload[:at]


def _flipped(payload: Payload, at: int) -> Payload:
    changed = payload.copy()
    changed[at] ^= 255
    return changed


ALTERED = {
    "empty": (lambda whole: whole[:0], "instead of bytes"),
    "no magic": (lambda whole: _flipped(whole, 0), "begins with"),
    "another version": (lambda whole: _flipped(whole, 4), "begins with"),
    "another number of members": (lambda whole: _flipped(whole, 6), "begins with"),
    "cut in its lengths": (lambda whole: _cut(whole, 12), "ends within its lengths"),
    "cut at its end": (lambda whole: _cut(whole, -8), "its parts have"),
    "one byte more": (lambda whole: np.append(whole, np.uint8(0)), "its parts have"),
    "other lengths": (lambda whole: _flipped(whole, 8), "its parts have"),
    "a slip that is altered": (lambda whole: _flipped(whole, 32), "bits"),
    "a word above the modulus": (lambda whole: np.concatenate([whole[:-8], np.full(8, 255, np.uint8)]), "modulus"),
    "numbers": (lambda whole: whole.view(np.int8), "instead of bytes"),
}


@pytest.mark.parametrize("how", ALTERED)
def test_a_sum_that_was_altered_is_refused(how: str, tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, FIVE)
    (whole,) = sums_of(federation, sealed(federation), "abc")
    change_it, check = ALTERED[how]
    with pytest.raises(ProtocolError, match=check):
        federation.aggregator.put_sum("relay", whole.update_ids, change_it(whole.payload.copy()))
    send(federation, [whole])  # none of it is here


@pytest.mark.parametrize(
    ("named", "check"),
    [
        ((), "0 updates"),
        (("a/1", "a/1", "b/1"), "twice"),
        (("a/1", "b/1"), "begins with"),
        (("a/1", "b/1", "d/1"), "sender"),
        (("b/1", "a/1", "c/1"), "sender"),
        (("a/1", "b/1", "c/2"), "was not ordered"),
    ],
)
def test_other_members_than_a_sum_has_are_refused(named: tuple[str, ...], check: str, tmp_path: Path) -> None:
    federation = Federation(plan("pad"), tmp_path, FIVE)
    (whole,) = sums_of(federation, sealed(federation), "abc")
    with pytest.raises(ProtocolError, match=check):
        federation.aggregator.put_sum("relay", named, whole.payload)


@pytest.mark.parametrize("bad", ["short", "floats", "of another", "of nobody", "not signed", "not finite"])
def test_a_relay_refuses_what_the_server_would(bad: str, tmp_path: Path) -> None:
    federation = Federation(plan("pad", only=("body.*",)), tmp_path, FIVE)
    answers = sealed(federation)
    update_id, payload = answers["a"]
    region = SealedRegion(federation.plan, federation.keys.server)
    wrong: dict[str, tuple[str, Payload]] = {
        "short": ("a", payload[:100]),
        "floats": ("a", payload.view(np.int8)),
        "of another": ("a", answers["b"][1]),
        "of nobody": ("z", payload),
        "not signed": ("a", _flipped(payload, -1 - 4 * federation.plan.clear_values)),
        "not finite": ("a", np.concatenate([payload[:-4], np.array([np.nan], np.float32).view(np.uint8)])),
    }
    silo, sent = wrong[bad]
    with pytest.raises(ProtocolError):
        region.put(silo, update_id, 0, 1.0, sent)
    region.put("a", update_id, 0, 1.0, payload)
    with pytest.raises(ProtocolError, match="nonce"):
        region.put("a", update_id, 0, 1.0, payload)


def test_a_sum_takes_no_more_than_the_words_of_one_and_slips_of_all() -> None:
    assert most_bytes(10, 2**20, MAX_ANNEX) == 2**20 + 10 * (4096 + MAX_ANNEX)
