import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.extras.generators.digits28 import Digits28Source
from fedsync.extras.generators.keywords import KeywordsSource
from fedsync.extras.generators.numbers import BlobsSource, RatingsSource, SparseSource
from fedsync.extras.readers.libsvm import LibsvmSource
from fedsync.extras.readers.samples import Pairs, Samples, Source
from fedsync.extras.readers.table import TableSource

SOURCES = [
    Digits28Source(60, 30),
    KeywordsSource(60, words=3, frames=10, bands=6),
    BlobsSource(60, blobs=3, features=2),
    SparseSource(60, features=50, nonzeros=5, informative=10),
    SparseSource(60, features=50, nonzeros=5, informative=10, target="number"),
    RatingsSource(60, items=8),
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: type(source).__name__)
def test_samples_are_as_the_shape_says_and_the_same_each_time(source: Source) -> None:
    shape, (train, _), (again, _) = source.shape(), source.read(), source.read()
    assert train.dense().shape == (60, *shape.inputs)
    assert train.dense().dtype == torch.float32
    assert isinstance(train.inputs, Pairs) == shape.sparse
    torch.testing.assert_close(train.dense(), again.dense(), rtol=0, atol=0, equal_nan=True)
    np.testing.assert_array_equal(train.targets, again.targets)
    if shape.classes:
        assert train.targets.dtype == np.int64
        assert set(train.targets) <= set(range(shape.classes))
    else:
        assert train.targets.dtype == np.float32


def by_nearest_mean(train: Samples, test: Samples) -> float:
    """Share of ``test`` that is nearest to the mean of its own class in ``train``."""
    x, y = train.dense().flatten(1).numpy(), test.dense().flatten(1).numpy()
    means = np.stack([x[train.targets == label].mean(axis=0) for label in np.unique(train.targets)])
    said = ((y[:, None] - means) ** 2).sum(axis=2).argmin(axis=1)
    return float((said == test.targets).mean())


def test_digits_are_images_that_can_be_told_apart_but_are_not_trivial() -> None:
    train, test = Digits28Source(400, 200).read()
    assert test is not None
    assert train.inputs.shape == (400, 1, 28, 28)
    assert np.bincount(train.targets).min() > 20
    assert len(np.unique(train.inputs.reshape(400, -1), axis=0)) == 400
    assert 0.5 < by_nearest_mean(train, test) < 0.95
    train, _ = Digits28Source(3000, 10).read()
    originals = 1797 - round(0.2 * 1797)
    assert train.targets[0] == train.targets[originals], "more digits than originals are new variants"
    assert not np.array_equal(train.inputs[0], train.inputs[originals])


@pytest.mark.parametrize(
    ("library", "read"),
    [
        ("sklearn.datasets", Digits28Source(10, 10).read),
        ("sklearn.datasets", LibsvmSource("a.txt", features=4).read),
        ("pyarrow", TableSource("a.parquet").shape),
    ],
)
def test_missing_libraries_are_told(library: str, read: Callable[[], object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=r'pip install .*"\.\[sim\]"'):
        read()


def test_keywords_have_speakers_and_can_be_told_apart() -> None:
    samples, _ = KeywordsSource(600).read()
    assert samples.owners is not None
    assert len(np.unique(samples.owners)) == 40
    assert by_nearest_mean(samples.take(np.arange(300)), samples.take(np.arange(300, 600))) > 0.3


def test_blobs_are_as_far_apart_as_is_said() -> None:
    near, far = (BlobsSource(600, apart=apart).read()[0] for apart in (0.0, 10.0))
    assert by_nearest_mean(far, far) > 0.99
    assert by_nearest_mean(near, near) < 0.4


@pytest.mark.slow
def test_sparse_rows_follow_a_linear_truth() -> None:
    source = SparseSource(2000, features=200, nonzeros=10, informative=20, noise=0.1, target="number")
    samples, _ = source.read()
    x = np.concatenate([samples.dense().numpy(), np.ones((2000, 1))], axis=1)
    error = samples.targets - x @ np.linalg.lstsq(x, samples.targets, rcond=None)[0]
    assert samples.targets.std() == pytest.approx(1.0, abs=0.05)
    assert error.std() == pytest.approx(0.1, abs=0.02)
    classes, _ = SparseSource(2000).read()
    assert np.bincount(classes.targets).tolist() == [1000, 1000]


def ratings(users: int = 200, items: int = 20, **options: Any) -> NDArray[np.float32]:
    return RatingsSource(users, items=items, **options).read()[0].dense().numpy()


def test_ratings_have_the_rank_and_the_gaps_that_are_said() -> None:
    gaps = ratings(known=0.1)
    assert np.linalg.matrix_rank(ratings(rank=3, known=1.0, noise=0.0), tol=1e-3) == 3
    assert (~np.isnan(gaps)).any(axis=1).all()
    assert np.isnan(gaps).mean() == pytest.approx(0.9, abs=0.06)


def test_non_negative_ratings_are_of_non_negative_vectors() -> None:
    """Products of three pairs of |N(0, 1)|, over sqrt 3: mean sqrt 3 (2 / pi), variance 1 - (2 / pi)^2."""
    exact = ratings(2000, 200, rank=3, known=1.0, noise=0.0, non_negative=True)
    assert exact.min() > 0
    assert exact.mean() == pytest.approx(np.sqrt(3) * 2 / np.pi, rel=0.05)
    assert np.linalg.matrix_rank(exact[:60], tol=1e-3) == 3
    assert np.nanmin(ratings(noise=3.0, non_negative=True)) == 0
