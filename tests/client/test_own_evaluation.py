"""Evaluation by a function of one's own: its pairs become sums, and what it measures is summed."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.core.orders import Cursor, Evaluation
from fedsync.evaluation.metrics.named import Wanted
from fedsync.train.guests.guest import GuestTrainer
from fedsync.train.loop import Trainer
from tests.client.test_own_loop import OPTIONS, SITE, app_of, plain_sgd, trainer
from tests.train.make import TwoClasses, order, slot


def evaluating(found: object) -> GuestTrainer:
    app = app_of(plain_sgd)
    app.evaluate()(lambda model, val: found)
    return GuestTrainer(app, SITE, OPTIONS)


@pytest.mark.parametrize(
    ("found", "sums"),
    [
        (
            {"loss": (0.5, 40), "dice": (0.75, 40), "auc": (0.9, 20)},
            Evaluation(20.0, 30.0, 40, {"eval_auc": (0.9, 20)}),
        ),
        ({"loss": (0.5, 40)}, Evaluation(20.0, None, 40)),
        # The loss keeps its mean where it has other samples than the score.
        ({"loss": (0.5, 100), "dice": (0.75, 40)}, Evaluation(20.0, 30.0, 40)),
        ({"loss": (float("nan"), 0), "dice": (0.75, 40)}, Evaluation(None, 30.0, 40)),
        ({"loss": (0.5, 100), "dice": (float("nan"), 0)}, Evaluation(50.0, None, 100)),
    ],
)
def test_an_evaluation_is_sums_of_its_means(found: dict[str, tuple[float, int]], sums: Evaluation) -> None:
    guest = evaluating(found)
    assert guest.evaluate(guest.initial_model()) == sums


def test_without_a_function_there_is_no_evaluation() -> None:
    without = trainer(plain_sgd)
    assert without.evaluate(without.initial_model()) == Evaluation(0.0, 0.0, 0)


@pytest.mark.parametrize(
    ("found", "problem"),
    [(0.5, "returned float"), ({"dice": 0.5}, "a pair"), ({"dice": (float("nan"), 3)}, "not finite")],
)
def test_an_evaluation_of_another_form_is_refused(found: object, problem: str) -> None:
    guest = evaluating(found)
    with pytest.raises(ConfigError, match=problem):
        guest.evaluate(guest.initial_model())


def test_what_an_evaluation_does_to_the_model_is_no_training() -> None:
    """An evaluation may adapt the model to the silo first, as a personal head."""

    def evaluate(model: nn.Module, val: Any) -> dict[str, tuple[float, int]]:
        for parameter in model.parameters():
            parameter.add_(1.0)
        return {"loss": (0.5, len(val))}

    app = app_of(plain_sgd, private=["2.bias"])
    app.evaluate()(evaluate)
    guest = GuestTrainer(app, SITE, OPTIONS)
    found = [guest.run(order(evaluate=each), guest.initial_model(), Cursor()) for each in (False, True)]
    assert (found[0].update == found[1].update).all() and found[0].cursor == found[1].cursor


@pytest.mark.parametrize("as_probabilities", [False, True])
def test_metrics_of_an_evaluation_of_one_s_own_are_summed_where_it_measures(as_probabilities: bool) -> None:
    options = replace(OPTIONS, measured=Wanted(("accuracy", "auroc"), 2))
    app = app_of(plain_sgd)

    @app.evaluate()
    def evaluate(model: nn.Module, val: Any, measure: Any) -> dict[str, tuple[float, int]]:
        for start in range(0, len(val), 4):
            inputs, labels = val[start : start + 4]
            outputs = model(inputs)
            if as_probabilities:
                measure(torch.softmax(outputs.double(), dim=1).numpy(), labels.numpy(), probabilities=True)
            else:
                measure(outputs, labels)
        return {"accuracy": (0.5, len(val))}

    guest = GuestTrainer(app, SITE, options)
    base = guest.initial_model()
    task = Trainer(TwoClasses(), slot(), options)
    assert guest.evaluate(base).sums == task.evaluate(base).sums
    assert set(guest.evaluate(base).sums) == {"confusion/2", "scores/256"}
