"""Linear estimators of scikit-learn as models that travel."""

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.datasets import load_iris
from sklearn.decomposition import PCA
from sklearn.linear_model import (
    ElasticNet,
    GammaRegressor,
    HuberRegressor,
    LogisticRegression,
    SGDClassifier,
    SGDRegressor,
)
from torch import nn

from fedsync.client import Silo, SiloApp, Work
from fedsync.client.sklearn import SklearnModel
from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor
from fedsync.train.batches import Sampler
from fedsync.train.guests.guest import GuestTrainer
from fedsync.train.options import LocalOptions
from tests.train.make import order

X, Y = load_iris(return_X_y=True)
SITE = Silo(0, "silo-0", 7, "cpu")


def guest(model: Any, fit: Any) -> GuestTrainer:
    app = SiloApp()
    app.setup()(lambda silo: silo.use(model, X))
    app.train(opaque=True)(fit)
    app.evaluate()(evaluate)
    return GuestTrainer(app, SITE, LocalOptions(device="cpu"))


def evaluate(model: SklearnModel) -> Any:
    with model.estimator() as estimator:
        return {"accuracy": (estimator.score(X, Y), len(Y))}


def partial(work: Work, model: SklearnModel) -> None:
    with model.estimator() as estimator:
        estimator.partial_fit(X[work.rows], Y[work.rows])


def test_partial_fit_goes_on_from_what_came_and_its_weights_are_the_update() -> None:
    trainer = guest(lambda: SklearnModel(SGDClassifier(loss="log_loss", random_state=0), 4, [0, 1, 2]), partial)
    assert trainer.layout.shapes == ((3, 4), (3,)) and not trainer.initial_model().any()
    first = trainer.run(order(batch_size=30, max_steps=4), trainer.initial_model(), Cursor())
    rows = Sampler(len(X), 7, "silo-0").take(Cursor(), 120)[0]
    alone = SGDClassifier(loss="log_loss", random_state=0).partial_fit(X[rows], Y[rows], classes=[0, 1, 2])
    np.testing.assert_allclose(first.update, [*alone.coef_.ravel(), *alone.intercept_], rtol=1e-6)
    again = trainer.run(order(batch_size=30, max_steps=4), trainer.initial_model(), Cursor())
    assert (again.update == first.update).all()
    assert trainer.evaluate(first.update).correct == pytest.approx(alone.score(X, Y) * 150)
    second = trainer.run(order(batch_size=30, max_steps=4), first.update, first.cursor)
    assert second.report.samples == 120 and np.abs(second.update).max() < np.abs(first.update).max()


@pytest.mark.parametrize(
    ("estimator", "classes", "shapes"),
    [
        (LogisticRegression(warm_start=True, max_iter=1), [0, 1], ((1, 4), (1,))),
        (SGDClassifier(), ["no", "yes"], ((1, 4), (1,))),
        (SGDRegressor(), [], ((4,), (1,))),
        (ElasticNet(alpha=0.1, warm_start=True), [], ((4,), ())),
        (GammaRegressor(warm_start=True), [], ((4,), ())),
        (HuberRegressor(warm_start=True), [], ((4,), ())),
    ],
)
def test_shapes_are_the_estimators(estimator: Any, classes: list[Any], shapes: Any) -> None:
    def fit(work: Work, model: SklearnModel) -> None:
        labels = np.array(classes)[(Y > 0).astype(int)] if classes else Y + 1
        with model.estimator() as mine:
            (mine.partial_fit if hasattr(mine, "partial_fit") else mine.fit)(X[work.rows], labels[work.rows])
            assert len(mine.predict(X)) == 150

    trainer = guest(lambda: SklearnModel(estimator, 4, classes), fit)
    assert trainer.layout.shapes == shapes
    update = trainer.run(order(), trainer.initial_model(), Cursor()).update
    assert update.any()
    model = SklearnModel(estimator, 4, classes)
    nn.utils.vector_to_parameters(torch.from_numpy(update), model.buffers())
    with model.estimator() as other:  # as in an evaluation: not fitted in this order
        assert len(other.predict(X)) == 150


@pytest.mark.parametrize("estimator", [LogisticRegression(warm_start=True), SGDClassifier(random_state=0)])
def test_classes_may_come_in_any_order(estimator: Any) -> None:
    labels = np.array(["no", "yes"])[(Y > 0).astype(int)]
    model = SklearnModel(estimator, 4, ["yes", "no"])
    with model.estimator() as mine:
        (mine.partial_fit if hasattr(mine, "partial_fit") else mine.fit)(X, labels)
    with model.estimator() as mine:
        assert mine.score(X, labels) == 1
    with pytest.raises(ConfigError, match=r"classes.* but the model has"), model.estimator() as mine:
        mine.fit(X, Y > 0)


@pytest.mark.parametrize(
    ("estimator", "problem"),
    [
        (PCA(), "PCA has no array coef_"),
        (LogisticRegression(), "LogisticRegression starts each fit anew"),
        (LogisticRegression(solver="liblinear", warm_start=True), "LogisticRegression starts each fit anew"),
    ],
)
def test_an_estimator_that_cannot_continue_is_refused(estimator: Any, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        SklearnModel(estimator, 4, [0, 1])
