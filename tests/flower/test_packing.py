"""Payloads made ready for the wire, once for all silos that get the same."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedsync.core.transfer import Payload
from fedsync.flower.packing import MOST_BYTES, Packer
from fedsync.flower.parcels import Parcel, ParcelStore
from fedsync.flower.payloads import SMALL_BYTES


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ParcelStore]:
    store = ParcelStore.begin(tmp_path / "parcels")
    yield store
    store.end()


@pytest.fixture
def published(store: ParcelStore, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """First bytes of the payloads that are laid ready, in order."""
    found, publish = list[int](), store.publish

    def noted(payload: Payload) -> Parcel | None:
        found.append(int(payload[0]))
        return publish(payload)

    monkeypatch.setattr(store, "publish", noted)
    return found


def payload(byte: int, size: int = SMALL_BYTES + 1) -> Payload:
    return np.full(size, byte, np.uint8)


def test_silos_that_missed_other_versions_take_turns_and_each_payload_is_packed_once(
    store: ParcelStore, published: list[int]
) -> None:
    packer, missed = Packer(store), [payload(1), payload(2), payload(3)]
    names = [packer.pack(each, fetches=True) for _ in range(4) for each in missed]
    assert published == [1, 2, 3]
    assert names == names[:3] * 4
    assert packer.digests == {each.digest for each in names if isinstance(each, Parcel)}
    assert len(packer.digests) == 3


def test_no_more_is_kept_than_fits_and_the_newest_in_any_case(store: ParcelStore, published: list[int]) -> None:
    packer, half = Packer(store), MOST_BYTES // 2
    first, second, third = (payload(byte, half) for byte in (1, 2, 3))
    for each in (first, second, third, second, third, first):
        packer.pack(each, fetches=True)
    assert published == [1, 2, 3, 1]  # the third took the place of the first, and the first that of the second
    large = payload(4, MOST_BYTES + 1)
    packer.pack(large, fetches=True)
    packer.pack(large, fetches=True)
    assert published == [1, 2, 3, 1, 4]
    assert len(packer.digests) == 1


def test_a_node_that_fetches_nothing_gets_bytes_and_the_next_one_a_parcel(store: ParcelStore) -> None:
    packer, model = Packer(store), payload(1)
    packed = [packer.pack(model, fetches=fetches) for fetches in (False, True, False)]
    assert [isinstance(each, Parcel) for each in packed] == [False, True, False]
    assert packed[0] is packed[2]
    assert isinstance(packer.pack(payload(1, SMALL_BYTES), fetches=True), bytes)
