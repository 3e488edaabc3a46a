from typing import Any

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.extras.readers.samples import Pairs, Samples, deal
from fedsync.tasks.partition import ByOwner, Iid, Pathological
from tests.tasks.given import Given, slot

LABELS = np.arange(100) % 4
OWNERS = np.arange(100) // 10


def numbered(labels: Any = LABELS, owners: Any = None) -> Samples:
    """Each sample's input is its own number."""
    return Samples(np.arange(len(labels), dtype=np.float32)[:, None], np.asarray(labels), owners)


def numbers(samples: Samples) -> list[int]:
    return np.asarray(samples.inputs)[:, 0].astype(int).tolist()


def test_a_whole_is_dealt_and_its_test_split_is_everybody_s() -> None:
    source = Given(numbered(), classes=4)
    dealt = [deal(source, Iid(), 0.2, slot(index, 3)) for index in range(3)]
    assert [numbers(test) for _, test in dealt] == [numbers(dealt[0][1])] * 3
    assert np.bincount(dealt[0][1].targets).tolist() == [5, 5, 5, 5]  # a fifth of each class of 25
    everything = [number for train, _ in dealt for number in numbers(train)] + numbers(dealt[0][1])
    assert sorted(everything) == list(range(100))


def test_test_samples_that_the_source_keeps_apart_are_taken_as_they_are() -> None:
    source = Given(numbered(), numbered(np.array([3, 0, 1])), classes=4)
    train, test = deal(source, Iid(), 0.2, slot())
    assert (len(train.targets), test.targets.tolist()) == (100, [3, 0, 1])


@pytest.mark.parametrize("apart", [False, True])
def test_classes_that_nobody_holds_are_not_tested(apart: bool) -> None:
    source = Given(numbered(), numbered() if apart else None, classes=4)
    _, test = deal(source, Pathological(1), 0.2, slot(0, 2))
    assert np.unique(test.targets).tolist() == [0, 1]


def test_without_a_partition_all_is_the_silo_s_own_and_its_split_too() -> None:
    source = Given(numbered(), classes=4)
    (first, kept), (again, _), (other, _) = (deal(source, None, 0.2, slot(index, 3)) for index in (0, 0, 1))
    assert sorted(numbers(first) + numbers(kept)) == list(range(100))
    assert numbers(first) == numbers(again) != numbers(other)
    train, test = deal(Given(numbered(), numbered(LABELS[:5])), None, 0.2, slot())
    assert (len(train.targets), len(test.targets)) == (100, 5)


def test_owners_stay_together() -> None:
    source = Given(numbered(owners=OWNERS), classes=4)
    parts = [set(deal(source, ByOwner(), 0.2, slot(index, 3))[0].owners.tolist()) for index in range(3)]
    assert sorted(map(len, parts)) == [3, 3, 4]
    assert set.union(*parts) == set(range(10))
    with pytest.raises(ConfigError, match=r"task\.partition\.kind: the data do not say who"):
        deal(Given(numbered()), ByOwner(), 0.2, slot())


def test_numbers_are_dealt_by_tenths_of_their_distribution() -> None:
    source = Given(numbered(np.arange(100, dtype=np.float32)), classes=0)
    parts = [deal(source, Pathological(5), 0.2, slot(index, 2)) for index in range(2)]
    assert max(parts[0][0].targets) < min(parts[1][0].targets)
    assert len(parts[0][1].targets) == 20


def test_sparse_rows_become_cells_and_columns_that_come_twice_add_up() -> None:
    pairs = Pairs(np.array([[1, 1], [0, 2]]), np.array([[1.0, 2.0], [4.0, 0.0]], dtype=np.float32), 3)
    np.testing.assert_array_equal(pairs.dense(), [[0, 3, 0], [4, 0, 0]])
    np.testing.assert_array_equal(pairs.take(np.array([1])).dense(), [[4, 0, 0]])
