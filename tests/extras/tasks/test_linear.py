import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.extras.generators.numbers import SparseSource
from fedsync.extras.readers.samples import Samples
from fedsync.extras.tasks.networks import LinearModel
from fedsync.extras.tasks.neural import LinearLoss, LinearTask
from fedsync.tasks.partition import Iid
from fedsync.train.loop import Trainer
from tests.tasks.given import OPTIONS, Given, slot, trainers

X = np.array([[1.0, 2.0], [-1.0, 0.5], [0.0, -2.0], [3.0, 1.0]], dtype=np.float32)
WEIGHT, BIAS = np.array([0.5, -0.25]), 0.1
SCORES = X @ WEIGHT + BIAS


def task(loss: LinearLoss, targets: NDArray[np.generic], classes: int, **penalties: float) -> LinearTask:
    return LinearTask(Given(Samples(X, targets), classes=classes), Iid(), loss_name=loss, **penalties)


def model(weight: NDArray[np.float64] = WEIGHT[:, None], bias: object = BIAS) -> LinearModel:
    made = LinearModel(*weight.shape)
    made.load_state_dict({"weight": torch.tensor(weight), "bias": torch.tensor(bias).reshape(-1)})
    return made


@pytest.mark.parametrize(
    ("loss", "targets", "each"),
    [
        # FSP, section 2.1: -log chi(x) for y = 1, -log(1 - chi(x)) for y = 0.
        ("logistic", [0, 1, 1, 0], np.log1p(np.exp(-SCORES * np.array([-1, 1, 1, -1])))),
        ("hinge", [0, 1, 1, 0], np.maximum(0, 1 - SCORES * np.array([-1, 1, 1, -1]))),
        ("squared", [1.0, -1.0, 0.5, 2.0], (SCORES - np.array([1, -1, 0.5, 2])) ** 2 / 2),
    ],
)
def test_losses_and_scores_by_hand(loss: LinearLoss, targets: list[float], each: NDArray[np.float64]) -> None:
    numbers = loss == "squared"
    y = np.array(targets, dtype=np.float32 if numbers else np.int64)
    made = task(loss, y, 0 if numbers else 2, l1=0.1, l2=0.2)
    batch = [torch.from_numpy(X), torch.from_numpy(y)]
    mean, (total, correct) = made.loss(model(), batch).detach(), made.score(model(), batch)
    penalty = 0.1 * np.abs(WEIGHT).sum() + 0.1 * (WEIGHT**2).sum()
    assert float(mean) == pytest.approx(each.mean() + penalty, rel=1e-5)
    assert float(total.detach()) == pytest.approx(each.sum(), rel=1e-5)
    expected = -2 * each.sum() if numbers else ((SCORES > 0) == (y == 1)).sum()
    assert float(correct.detach()) == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("loss", ["logistic", "hinge"])
def test_more_than_two_classes_by_hand(loss: LinearLoss) -> None:
    weight, bias, y = np.array([[1.0, 0.0, -1.0], [0.0, 1.0, 0.5]]), [0.0, 0.1, 0.2], np.array([0, 2, 1, 1])
    outputs = X @ weight + np.array(bias)
    if loss == "logistic":
        each = [np.log(np.exp(row).sum()) - row[label] for row, label in zip(outputs, y, strict=True)]
    else:
        each = [max(0, 1 + max(np.delete(row, label)) - row[label]) for row, label in zip(outputs, y, strict=True)]
    total, correct = task(loss, y, 3).score(model(weight, bias), [torch.from_numpy(X), torch.from_numpy(y)])
    assert float(total.detach()) == pytest.approx(sum(each), rel=1e-5)
    assert int(correct) == (outputs.argmax(axis=1) == y).sum()


def test_the_gradient_of_lasso_is_that_of_the_book() -> None:
    """X'(Xw + b - y) / n + l1 sign(w)."""
    y = np.array([1.0, -1.0, 0.5, 2.0], dtype=np.float32)
    made, linear = task("squared", y, 0, l1=0.3), model()
    made.loss(linear, [torch.from_numpy(X), torch.from_numpy(y)]).backward()
    expected = X.T @ (SCORES - y) / 4 + 0.3 * np.sign(WEIGHT)
    np.testing.assert_allclose(linear.weight.grad.numpy()[:, 0], expected, rtol=1e-5)


def test_full_batches_find_the_solution_of_ridge_regression() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(size=(50, 3)).astype(np.float32)
    y = (x @ np.array([1.0, -2.0, 0.5]) + 0.7 + rng.normal(0, 0.1, 50)).astype(np.float32)
    source = Given(Samples(x, y), Samples(x[:5], y[:5]), classes=0)
    silo = Trainer(LinearTask(source, Iid(), loss_name="squared", l2=0.1), slot(), OPTIONS)
    found = silo.run(WorkOrder("u", 0, 1, 50, 300, 0.3, seed=1, evaluate=False), silo.initial_model(), Cursor()).update
    # The bias is not penalised: centre both sides.
    centred, offset = x - x.mean(axis=0), y - y.mean()
    weight = np.linalg.solve(centred.T @ centred / 50 + 0.1 * np.eye(3), centred.T @ offset / 50)
    np.testing.assert_allclose(found, [*weight, y.mean() - x.mean(axis=0) @ weight], rtol=1e-3)


def test_lasso_leaves_little_of_features_that_do_not_count() -> None:
    source = SparseSource(400, features=60, nonzeros=6, informative=10, target="number")
    plain, sparing = (trainers(LinearTask(source, Iid(), loss_name="squared", l1=l1), 1)[0] for l1 in (0.0, 0.02))
    weights = [
        silo.run(WorkOrder("u", 0, 1, 32, 200, 0.1, seed=1, evaluate=False), silo.initial_model(), Cursor()).update
        for silo in (plain, sparing)
    ]
    small = [int((np.abs(each[:-1]) < 0.01).sum()) for each in weights]
    assert small[1] > small[0] + 10


def test_sparse_rows_say_the_same_as_dense_ones() -> None:
    samples, _ = SparseSource(30, features=20, nonzeros=4).read()
    linear = model(np.random.default_rng(1).normal(size=(20, 1)))
    columns, values, _ = LinearTask(SparseSource(), Iid()).dataset(samples).tensors
    torch.testing.assert_close(linear(columns, values), linear(samples.dense()))


@pytest.mark.parametrize(
    ("loss", "targets", "classes", "message"),
    [
        ("squared", np.array([0, 1, 0, 1]), 2, r"task\.loss: squared does not fit targets that are classes"),
        ("hinge", np.zeros(4, dtype=np.float32), 0, r"task\.loss: hinge does not fit targets that are numbers"),
    ],
)
def test_loss_and_targets_must_fit(loss: LinearLoss, targets: NDArray[np.generic], classes: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        task(loss, targets, classes).model()
