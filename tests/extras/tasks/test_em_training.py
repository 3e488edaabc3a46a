"""Adding statistics is expectation maximisation on everybody's data: compared with plain NumPy in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor, WorkOrder
from fedsync.extras.readers.samples import Samples
from fedsync.extras.tasks.clustering import FuzzyTask, KMeansTask
from fedsync.extras.tasks.em_training import StatisticsTask
from fedsync.extras.tasks.factorisation import FactorisationTask
from fedsync.extras.tasks.gaussian_mixture import MixtureTask
from fedsync.tasks.partition import Dirichlet, Iid, Pathological
from fedsync.train.loop import Trainer
from tests.tasks.given import Given, average, slot, trainers

Numbers = NDArray[np.float64]
Solver = Callable[[Numbers, Numbers], Numbers]
GROUPS, FEATURES, ROUNDS = 3, 2, 5


def points(samples: int = 90) -> Samples:
    rng = np.random.default_rng(5)
    labels = np.arange(samples) % GROUPS
    centres = np.array([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
    return Samples((centres[labels] + rng.normal(0, 0.8, (samples, FEATURES))).astype(np.float32), labels)


def ratings(users: int = 60, items: int = 7) -> Samples:
    rng = np.random.default_rng(6)
    cells = rng.normal(0, 1, (users, 2)) @ rng.normal(0, 1, (2, items)) + rng.normal(0, 0.1, (users, items))
    cells[rng.random(cells.shape) < 0.4] = np.nan
    return Samples(cells.astype(np.float32), np.arange(users) % GROUPS)


def positive_ratings() -> Samples:
    """Absolute values: no product of vectors gives them, so some values of the vectors are held at 0."""
    made_up = ratings()
    return Samples(np.abs(made_up.dense().numpy()), made_up.targets)


def kept(*silos: Trainer) -> Numbers:
    """All samples of silos, in the order of the silos; EM does not care."""
    return np.concatenate([silo._samples.take(torch.arange(silo.examples))[0].double().numpy() for silo in silos])


def k_means(x: Numbers, theta: dict[str, Numbers]) -> tuple[dict[str, Numbers], Numbers]:
    """Lloyd: each to the nearest centre, each centre to the mean."""
    squared = ((x[:, None] - theta["centres"]) ** 2).sum(axis=2)
    nearest = squared.argmin(axis=1)
    groups = [x[nearest == k] for k in range(GROUPS)]
    centres = [group.mean(axis=0) if len(group) else theta["centres"][k] for k, group in enumerate(groups)]
    return {"centres": np.array(centres)}, squared.min(axis=1)


def fuzzy(x: Numbers, theta: dict[str, Numbers]) -> tuple[dict[str, Numbers], Numbers]:
    """Bezdek with m = 2.5: u = 1 / sum_j (d / d_j)^(2 / (m - 1)), centres weighted by u^m."""
    squared = ((x[:, None] - theta["centres"]) ** 2).sum(axis=2)
    u = 1 / ((squared[:, :, None] / squared[:, None, :]) ** (1 / 1.5)).sum(axis=2)
    weights = u**2.5
    return {"centres": weights.T @ x / weights.sum(axis=0)[:, None]}, (weights * squared).sum(axis=1)


def mixture(x: Numbers, theta: dict[str, Numbers]) -> tuple[dict[str, Numbers], Numbers]:
    """Textbook EM with diagonal covariances, 1e-3 added to each variance."""
    weights, means, variances = theta["weights"], theta["means"], theta["variances"]
    density = np.exp(-((x[:, None] - means) ** 2) / (2 * variances)) / np.sqrt(2 * np.pi * variances)
    joint = weights * density.prod(axis=2)
    r = joint / joint.sum(axis=1, keepdims=True)
    n = r.sum(axis=0)[:, None]
    centres = r.T @ x / n
    spread = np.stack([(r[:, k, None] * (x - centres[k]) ** 2).sum(axis=0) for k in range(GROUPS)]) / n + 1e-3
    return {"weights": r.mean(axis=0), "means": centres, "variances": spread}, -np.log(joint.sum(axis=1))


def row(gram: Numbers, product: Numbers) -> Numbers:
    """The x that minimises x' gram x - 2 product' x."""
    return np.linalg.solve(gram, product)


def non_negative_row(gram: Numbers, product: Numbers) -> Numbers:
    """As `row` for x >= 0, by SciPy: |L' x - L^-1 product|, where gram = L L'."""
    from scipy.optimize import nnls

    lower = np.linalg.cholesky(gram)
    return nnls(lower.T, np.linalg.solve(lower, product))[0]


def least_squares(solve: Solver, x: Numbers, theta: dict[str, Numbers]) -> tuple[dict[str, Numbers], Numbers]:
    """ALS row by row with ridge 0.05: users by sums over their ratings, items by means over all users."""
    items, known, ridge = theta["items"], ~np.isnan(x), 0.05 * np.eye(2)
    pairs = list(zip(x, known, strict=True))
    users = np.array([solve(items[k].T @ items[k] + ridge, items[k].T @ cells[k]) for cells, k in pairs])
    losses = [
        ((cells[k] - items[k] @ user) ** 2).sum() + 0.05 * user @ user
        for (cells, k), user in zip(pairs, users, strict=True)
    ]
    solved = []
    for item in range(x.shape[1]):
        k = known[:, item]
        solved.append(solve(users[k].T @ users[k] / len(x) + ridge, users[k].T @ x[k, item] / len(x)))
    return {"items": np.array(solved)}, np.array(losses)


def task(kind: str, partition: Any) -> StatisticsTask:
    made_up = {"factorisation": ratings, "non-negative": positive_ratings}.get(kind, points)
    source = Given(made_up())
    match kind:
        case "k-means":
            return KMeansTask(source, partition, clusters=GROUPS, spread=2.0)
        case "fuzzy":
            return FuzzyTask(source, partition, clusters=GROUPS, spread=2.0, fuzziness=2.5)
        case "mixture":
            return MixtureTask(source, partition, components=GROUPS, spread=2.0)
        case "factorisation" | "non-negative":
            return FactorisationTask(source, partition, factors=2, ridge=0.05, non_negative=kind == "non-negative")
    raise ValueError(kind)


def parameters(kind: str, vector: NDArray[np.float32]) -> dict[str, Numbers]:
    """The M-step, from the layout of the vector: counts, sums, squares; or grams, products."""
    s = vector.astype(np.float64)
    if kind in SOLVERS:
        grams, products = s[: 7 * 4].reshape(7, 2, 2) + 0.05 * np.eye(2), s[7 * 4 :].reshape(7, 2)
        return {"items": np.array([SOLVERS[kind](g, p) for g, p in zip(grams, products, strict=True)])}
    counts = s[:GROUPS, None]
    means = s[GROUPS : GROUPS + GROUPS * FEATURES].reshape(GROUPS, FEATURES) / counts
    if kind != "mixture":
        return {"centres": means}
    squares = s[GROUPS + GROUPS * FEATURES :].reshape(GROUPS, FEATURES)
    return {"weights": counts[:, 0] / counts.sum(), "means": means, "variances": squares / counts - means**2 + 1e-3}


SOLVERS: dict[str, Solver] = {"factorisation": row, "non-negative": non_negative_row}
CENTRAL = {
    "k-means": k_means,
    "fuzzy": fuzzy,
    "mixture": mixture,
    **{kind: partial(least_squares, solve) for kind, solve in SOLVERS.items()},
}
kinds = pytest.mark.parametrize("kind", CENTRAL)


@kinds
@pytest.mark.parametrize("partition", [Iid(), Pathological(1), Dirichlet(0.5)], ids=lambda p: type(p).__name__)
def test_a_round_on_all_data_is_an_iteration_of_em_on_the_data_of_all(kind: str, partition: Any) -> None:
    silos = trainers(task(kind, partition), 3)
    x = kept(*silos)
    model = silos[0].initial_model()
    expected = parameters(kind, model)
    losses = []
    for round in range(1, ROUNDS + 1):
        model = average(silos, model, round=round)
        expected, loss = CENTRAL[kind](x, expected)
        losses.append(loss.mean())
        for name, values in parameters(kind, model).items():
            np.testing.assert_allclose(values, expected[name], rtol=2e-4, atol=2e-4, err_msg=f"{name}, round {round}")
    assert losses[-1] < 0.9 * losses[0], "EM got somewhere"


@kinds
def test_the_reported_loss_is_that_of_the_parameters_before_the_step(kind: str) -> None:
    silo = trainers(task(kind, Iid()), 1)[0]
    model = silo.initial_model()
    outcome = silo.run(WorkOrder("u", 0, 1, silo.examples, 1, 1.0, seed=1), model, Cursor())
    expected = CENTRAL[kind](kept(silo), parameters(kind, model))[1].mean()
    assert outcome.report.loss == pytest.approx(expected, rel=1e-4)


@kinds
def test_a_step_at_a_lower_rate_goes_that_share_of_the_way(kind: str) -> None:
    silo = trainers(task(kind, Iid()), 1)[0]
    model = silo.initial_model()
    full, part = (
        silo.run(WorkOrder("u", 0, 1, 16, 1, rate, seed=1, evaluate=False), model, Cursor()).update
        for rate in (1.0, 0.25)
    )
    np.testing.assert_allclose(part, 0.25 * full, atol=1e-6)


@kinds
def test_a_batch_worked_off_in_pieces_gives_the_same_statistics(kind: str) -> None:
    silos = trainers(task(kind, Iid()), 2)
    silos[1] = trainers(task(kind, Iid()), 2)[0]
    silos[1]._cap.largest = 7
    model = silos[0].initial_model()
    whole, pieces = (
        silo.run(WorkOrder("u", 0, 1, 20, 1, 1.0, seed=1, evaluate=False), model, Cursor()) for silo in silos
    )
    np.testing.assert_allclose(pieces.update, whole.update, atol=1e-5)
    assert pieces.report.loss == pytest.approx(whole.report.loss, rel=1e-5)


@kinds
def test_small_batches_at_unequal_numbers_of_steps_learn_too(kind: str) -> None:
    silos = trainers(task(kind, Pathological(1)), 3)
    model, cursors = silos[0].initial_model(), [Cursor()] * 3
    before = silos[0].evaluate(model)
    for round in range(1, 6):
        merged = model.copy()
        for index, silo in enumerate(silos):
            order = WorkOrder("u", round, round, 8, 2 + index, 0.5, seed=round, evaluate=False)
            outcome = silo.run(order, model, cursors[index])
            cursors[index] = outcome.cursor
            merged += outcome.update / 3
        model = merged
    after = silos[0].evaluate(model)
    assert after.loss < 0.9 * before.loss
    assert after.correct == -after.loss


def test_a_cluster_without_samples_stays_where_it_is() -> None:
    x = np.array([[0.0], [0.2], [0.4]], dtype=np.float32)
    k_means_task = KMeansTask(Given(Samples(x, np.zeros(3, dtype=np.int64))), Iid(), clusters=2)
    statistics = {"counts": torch.tensor([0.5, 0.5]), "sums": torch.tensor([[0.05], [500.0]])}
    for _ in range(3):
        losses, statistics = k_means_task.expect(statistics, torch.from_numpy(x))
    centres = statistics["sums"] / statistics["counts"][:, None]
    np.testing.assert_allclose(centres.numpy(), [[0.2], [1000.0]], rtol=1e-5)
    np.testing.assert_allclose(losses.numpy(), [0.04, 0.0, 0.04], atol=1e-6)


def test_statistics_that_rounding_made_impossible_do_no_harm() -> None:
    mixture_task = MixtureTask(Given(points()), Iid(), components=GROUPS)
    statistics = {
        "counts": torch.tensor([0.5, -1e-6, 0.0]),
        "sums": torch.tensor([[0.5, 0.5], [1e-6, -1e-6], [0.0, 0.0]]),
        "squares": torch.tensor([[0.1, 0.1], [-1e-6, 1e-6], [0.0, 0.0]]),
    }
    losses, renewed = mixture_task.expect(statistics, torch.from_numpy(np.asarray(points().inputs)))
    assert torch.isfinite(losses).all()
    assert all(torch.isfinite(values).all() for values in renewed.values())
    assert (mixture_task.parameters(renewed)[2] > 0).all()


def test_ratings_are_tested_on_what_the_user_s_vector_has_not_seen() -> None:
    """One factor, items 1, 1, 1: from the ratings 3 and 5 (first and third) the user is 8 / 2, less the ridge."""
    factorisation = FactorisationTask(Given(ratings()), Iid(), factors=1, ridge=1e-6)
    statistics = {"grams": torch.ones(4, 1, 1), "products": torch.full((4, 1), 1 + 1e-6)}
    row = torch.tensor([[3.0, 7.0, torch.nan, 5.0]])
    loss = factorisation.unseen(statistics, row)
    assert float(loss[0]) == pytest.approx((7.0 - 4.0) ** 2, rel=1e-4)


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_no_value_of_a_vector_is_below_zero_at_a_silo(noise: float) -> None:
    """Also where statistics are off by rounding, as they are under encryption: diagonals below 0, products below 0."""
    made = task("non-negative", Iid())
    assert isinstance(made, FactorisationTask)
    generator = torch.Generator().manual_seed(3)
    statistics = {"grams": torch.zeros(7, 2, 2) - noise, "products": 0.1 * torch.randn(7, 2, generator=generator)}
    x = torch.from_numpy(np.asarray(positive_ratings().inputs))
    for _ in range(3):
        items = made.items(statistics)
        users = made._users(items, torch.nan_to_num(x), (~torch.isnan(x)).float())
        assert items.min() >= 0 and users.min() >= 0
        losses, statistics = made.expect(statistics, x)
        assert torch.isfinite(losses).all()
        assert all(value.min() >= 0 for value in statistics.values())


def test_ratings_below_zero_have_no_non_negative_factors() -> None:
    source = Given(ratings())
    with pytest.raises(ConfigError, match=r"task\.data: some ratings are below 0.*leave non_negative out"):
        FactorisationTask(source, Iid(), non_negative=True).data(slot())
