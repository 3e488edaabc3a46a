import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.tasks.partition import ByOwner, Dirichlet, Iid, Partition, Pathological, Shards, _deal

LABELS = np.repeat(np.arange(10), 60)


@pytest.mark.parametrize(
    "partition", [Iid(), Dirichlet(0.3), Dirichlet(100), Pathological(2), Pathological(10), ByOwner()]
)
@pytest.mark.parametrize("count", [5, 7])
def test_parts_are_sorted_disjoint_and_cover_all(partition: Partition, count: int) -> None:
    parts = partition.split(LABELS, count, seed=3)
    assert len(parts) == count
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert np.all(np.diff(part) > 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.3), Pathological(4), Shards(2)])
def test_the_seed_decides(partition: Partition) -> None:
    first, again, other = (partition.split(LABELS, 10, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(left, right) for left, right in zip(first, again, strict=True))
    assert not all(np.array_equal(left, right) for left, right in zip(first, other, strict=True))


@pytest.mark.parametrize("count", [1, 7, 600])
def test_iid_shares_are_those_of_flwr_datasets(count: int) -> None:
    parts = Iid().split(LABELS, count, seed=3)
    assert {len(part) for part in parts} <= {600 // count, -(-600 // count)}
    for part, same in zip(parts, _deal("IidPartitioner", LABELS, count, 3), strict=True):
        np.testing.assert_array_equal(part, same)


def test_a_small_alpha_is_more_uneven() -> None:
    def spread(alpha: float) -> float:
        parts = Dirichlet(alpha).split(LABELS, 5, seed=3)
        return float(np.std([np.bincount(LABELS[part], minlength=10) for part in parts]))

    assert spread(0.2) > 2 * spread(20.0)


@pytest.mark.parametrize(
    ("count", "classes_per_silo", "expected"),
    [
        (5, 2, [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]),
        (2, 5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]]),
        (4, 5, [[0, 1, 2, 3, 4], [5, 6, 7, 8, 9]] * 2),
        (10, 1, [[c] for c in range(10)]),
        (8, 3, [[c, c + 1, c + 2] for c in range(8)]),  # 3 does not divide 10: windows
        (3, 2, [[0, 1], [2, 3], [4, 5]]),  # few silos leave classes that nobody holds
    ],
)
def test_pathological_classes_by_hand(count: int, classes_per_silo: int, expected: list[list[int]]) -> None:
    parts = Pathological(classes_per_silo).split(LABELS, count, seed=3)
    assert [np.unique(LABELS[part]).tolist() for part in parts] == expected
    assert sum(map(len, parts)) == np.isin(LABELS, np.concatenate(expected)).sum()
    renamed = Pathological(classes_per_silo).split(10 * LABELS - 7, count, seed=3)
    assert all(np.array_equal(one, other) for one, other in zip(renamed, parts, strict=True)), "whatever the numbers"


@pytest.mark.parametrize(
    ("partition", "labels", "count", "problem", "remedy"),
    [
        (Iid(), LABELS, 601, "cannot be dealt to 601", "fewer silos"),
        (Iid(), LABELS, 0, "cannot be dealt to 0", "fewer silos"),
        (Dirichlet(0.001), LABELS, 40, "nearly without data", "Raise alpha"),
        (Shards(200), LABELS, 4, "more shards than the 600 samples", "Write fewer"),
        (ByOwner(), LABELS, 11, "10 owners are to go to 11 silos", "fewer silos"),
        (Pathological(11), LABELS, 5, "more than the 10 classes", "Write fewer"),
        (Pathological(1), np.array([0, 1, 1]), 3, "fewer samples than the silos", "fewer silos"),
    ],
)
def test_what_cannot_be_dealt(partition: Partition, labels: np.ndarray, count: int, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"task\.partition.*{problem}.*{remedy}"):
        partition.split(labels, count, seed=3)


def test_shards_are_sorted_by_class_and_of_one_size() -> None:
    """PSP, section 10.6.1: 10 silos and 20 shards of 30 rows; 60 rows a class make two shards of each class."""
    parts = Shards(2).split(LABELS, 10, seed=3)
    assert [len(part) for part in parts] == [60] * 10
    assert all(len(np.unique(LABELS[part])) <= 2 for part in parts)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(600))
    parts = Shards(2).split(LABELS, 7, seed=3)
    assert [len(part) for part in parts] == [2 * (600 // 14)] * 7, "rows that fill no shard are left over"
    assert len(np.unique(np.concatenate(parts))) == 14 * (600 // 14)


@pytest.mark.parametrize("partition", [Dirichlet(0.5), Pathological(2), Shards(2)])
def test_a_missing_library_is_explained(partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)
    with pytest.raises(ConfigError, match=r'pip install .*"\.\[sim\]"'):
        partition.split(LABELS, 5, seed=3)


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.5), Pathological(2), Shards(2)])
def test_dealing_touches_neither_network_nor_disk(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)
    partition.split(LABELS, 5, seed=3)
    assert list(tmp_path.iterdir()) == []
