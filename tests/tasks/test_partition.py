from __future__ import annotations

import socket
import sys
from pathlib import Path

import numpy as np
import pytest

from fedsync.core.errors import ConfigError
from fedsync.tasks.partition import Dirichlet, Iid, Partition, Pathological

LABELS = np.repeat(np.arange(10), 60)


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.3), Dirichlet(100), Pathological(2), Pathological(10)])
@pytest.mark.parametrize("count", [5, 7])
def test_parts_are_sorted_disjoint_and_cover_all(partition: Partition, count: int) -> None:
    parts = partition.split(LABELS, count, seed=3)

    assert len(parts) == count
    for part in parts:
        assert part.dtype == np.int64
        assert len(part) > 0
        assert np.all(np.diff(part) > 0)
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(len(LABELS)))


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.3), Pathological(4)])
def test_the_seed_decides(partition: Partition) -> None:
    first, again, other = (partition.split(LABELS, 10, seed) for seed in (1, 1, 2))

    assert all(np.array_equal(left, right) for left, right in zip(first, again, strict=True))
    assert not all(np.array_equal(left, right) for left, right in zip(first, other, strict=True))


def test_iid_shares_are_equal_and_mixed() -> None:
    parts = Iid().split(LABELS, 7, seed=3)

    assert {len(part) for part in parts} == {600 // 7, 600 // 7 + 1}
    assert all(len(np.unique(LABELS[part])) == 10 for part in parts)


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
    ],
)
def test_pathological_classes_by_hand(count: int, classes_per_silo: int, expected: list[list[int]]) -> None:
    parts = Pathological(classes_per_silo).split(LABELS, count, seed=3)

    assert [np.unique(LABELS[part]).tolist() for part in parts] == expected


def test_few_silos_leave_classes_that_nobody_holds() -> None:
    parts = Pathological(2).split(LABELS, 3, seed=3)

    assert [np.unique(LABELS[part]).tolist() for part in parts] == [[0, 1], [2, 3], [4, 5]]
    assert sum(map(len, parts)) == np.isin(LABELS, range(6)).sum()


def test_classes_need_not_be_numbered_from_zero() -> None:
    labels = np.repeat([7, -2, 40, 9], 5)

    parts = Pathological(2).split(labels, 2, seed=3)

    assert [np.unique(labels[part]).tolist() for part in parts] == [[-2, 7], [9, 40]]


@pytest.mark.parametrize(
    ("partition", "labels", "count", "problem", "remedy"),
    [
        (Iid(), LABELS, 601, "cannot be dealt to 601", "fewer silos"),
        (Iid(), LABELS, 0, "cannot be dealt to 0", "fewer silos"),
        (Dirichlet(0.001), LABELS, 40, "nearly without data", "Raise alpha"),
        (Pathological(11), LABELS, 5, "more than the 10 classes", "Write fewer"),
        (Pathological(1), np.array([0, 1, 1]), 3, "fewer samples than the silos", "fewer silos"),
    ],
)
def test_what_cannot_be_dealt(partition: Partition, labels: np.ndarray, count: int, problem: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=rf"task\.partition.*{problem}.*{remedy}"):
        partition.split(labels, count, seed=3)


@pytest.mark.parametrize("alpha", [0.0, -1.0, float("nan")])
def test_alpha_is_checked(alpha: float) -> None:
    with pytest.raises(ConfigError, match=r"task\.partition\.alpha"):
        Dirichlet(alpha)


def test_classes_per_silo_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"task\.partition\.classes_per_silo"):
        Pathological(0)


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.5), Pathological(2)])
def test_a_missing_library_is_explained(partition: Partition, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flwr_datasets.partitioner", None)

    with pytest.raises(ConfigError, match=r'pip install "fedsync\[sim\]"'):
        partition.split(LABELS, 5, seed=3)


@pytest.mark.parametrize("partition", [Iid(), Dirichlet(0.5), Pathological(2)])
def test_dealing_touches_neither_network_nor_disk(
    partition: Partition, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.chdir(tmp_path)

    partition.split(LABELS, 5, seed=3)

    assert list(tmp_path.iterdir()) == []
