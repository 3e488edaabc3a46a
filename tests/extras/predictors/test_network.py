"""The small network: its derivatives against differences, and what it can learn."""

import numpy as np

from fedsync.extras.predictors.small_network import Training, improve, outputs, random_parameters, split
from fedsync.extras.predictors.small_network import _slopes as slopes

DRAW = np.random.default_rng(3)


def test_the_output_is_what_the_formula_says() -> None:
    parameters = np.arange(1.0, 12.0) / 10  # one input, three hidden: W, b, w of 3 each, s, c
    layer, bias, out, straight, constant = split(parameters, 3)
    np.testing.assert_allclose(layer[:, 0], [0.1, 0.2, 0.3])
    expected = (
        0.7 * np.tanh(0.1 * 2 + 0.4) + 0.8 * np.tanh(0.2 * 2 + 0.5) + 0.9 * np.tanh(0.3 * 2 + 0.6) + 1.0 * 2 + 1.1
    )
    np.testing.assert_allclose(outputs(parameters, 3, np.array([[2.0]]))[0], [expected])
    np.testing.assert_allclose([*bias, *out, *straight, constant], parameters[3:])


def test_slopes_are_the_derivatives() -> None:
    parameters = DRAW.normal(size=4 * (3 + 2) + 3 + 1)
    x = DRAW.normal(size=(5, 3))
    told = slopes(parameters, 4, x, outputs(parameters, 4, x)[1])
    for index in range(len(parameters)):
        nudge = np.zeros(len(parameters))
        nudge[index] = 1e-6
        differences = (outputs(parameters + nudge, 4, x)[0] - outputs(parameters - nudge, 4, x)[0]) / 2e-6
        np.testing.assert_allclose(told[:, index], differences, atol=1e-8)


def test_it_learns_a_curve_despite_outliers_and_stops() -> None:
    """A knee with a stall in one of twenty samples: a squared loss would be a twentieth of 5 too low everywhere."""
    x = DRAW.normal(size=(800, 2))
    truth = np.minimum(x[:, 0], 0.3) + 0.5 * x[:, 1]
    y = np.where(np.arange(800) % 20 == 0, truth - 5.0, truth + DRAW.normal(0, 0.05, 800))
    training = Training(x[:600], y[:600], x[600:], y[600:], 8, random_parameters(2, 8, DRAW))
    while not training.ended:
        training = improve(training)
    assert training.best is not None
    assert training.epochs <= 60
    error = outputs(training.best, 8, x)[0] - truth
    assert np.sqrt(np.mean(error**2)) < 0.1
    assert abs(error.mean()) < 0.05
