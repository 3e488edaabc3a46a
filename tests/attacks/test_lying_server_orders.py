"""A lying server's orders: what they tell of rows of data, and of single silos' figures.

It chooses who trains when, how long, in which batches and from which model.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import Start
from fedsync.core.orders import Cursor, Evaluation, Window, WorkOrder, WorkReport
from fedsync.silo.protocol import EvaluateModel, Train
from fedsync.train.batches import Sampler
from tests.attacks.adversary import FEATURES, Federation
from tests.attacks.conftest import Make
from tests.attacks.forgery import EMPTY, beginning, give


def rows_found(federation: Federation, losses: dict[int, list[float]], bias: float) -> int:
    """Rows of the silos' table that losses of linear models tell to three decimals."""
    found = 0
    for each in losses.values():
        if len(each) < FEATURES + 1 or not all(map(np.isfinite, each)):
            continue
        shifts = np.sqrt(2 * np.abs(np.array(each[: FEATURES + 1])))
        row = np.array([*(shifts[1:] - shifts[0]), bias - shifts[0]])
        found += bool(np.min(np.max(np.abs(federation.rows - row), axis=1)) < 1.5e-3)
    return found


def test_losses_of_chosen_models_tell_no_row(make: Make) -> None:
    """Batches of 1, a model of the server's choice and the loss in the clear gave every row by 13 orders."""
    federation, bias = make(), 1000.0
    victim = federation.silo("silo-a")
    examples = victim.session._trainer.facts.examples
    order_of_rows = Sampler(examples, federation.spec().seed, "silo-a").take(Cursor(), examples * (FEATURES + 1))[0]
    losses: dict[int, list[float]] = defaultdict(list)
    for version, row in enumerate(map(int, order_of_rows), start=1):
        model = np.zeros(FEATURES + 1, dtype="<f4")
        model[-1] = bias
        if losses[row]:
            model[len(losses[row]) - 1] = 1.0
        order = federation.order("silo-a", base_version=version, batch_size=1, max_steps=1, learning_rate=1e-30)
        links = [EMPTY] * version
        heard = victim.ask(Train(order), beginning(federation, *links, start=Start.CLEAR, model=model.tobytes()))
        losses[row].append(heard.reply.loss if isinstance(heard.reply, WorkReport) else np.nan)
    assert rows_found(federation, losses, bias) == 0


_OVERFLOW = float(np.sqrt(3.4028235e38))
"""An error whose square is the largest float32."""


def bits_by_divergence(fails: Callable[[float], bool], truth: float) -> float:
    """Bits of a number that tell at which learning rate training overflows [bits].

    The second step's error is r times something of the first two batches; its square is the loss, which overflows.
    """
    low, high = 15.0, 25.0
    for _ in range(20):
        middle = (low + high) / 2
        low, high = (low, middle) if fails(10.0**middle) else (middle, high)
    found = _OVERFLOW / 10.0**low
    return float(max(0.0, -np.log2(abs(found / truth - 1) + 2**-24)))


def second_error(federation: Federation, rows: int) -> float:
    """Error of the second step over batches of so many rows, in units of the learning rate: for the judge."""
    rate, trainer = 1e6, federation.silo("silo-a").session._trainer
    order = WorkOrder("", 0, 1, rows, 2, rate, seed=federation.spec().seed, evaluate=False)
    return float(np.sqrt(4 * trainer.run(order, federation.first_model, Cursor()).report.loss) / rate)


@pytest.mark.parametrize("way", ["greeting", "order"])
def test_nothing_tells_where_training_on_one_row_overflows(way: str, make: Make) -> None:
    """The specification says how large the first batch is, and the greeting trains on it, which no limit counts."""
    federation = make()
    beginning(federation)

    def fails(rate: float) -> bool:
        if way == "greeting":
            local = {"steps": 2, "batch_size": 1, "learning_rate": rate}
            return federation.silo("silo-a", federation.spec(local=local)).refusal() is not None
        order = federation.order("silo-a", batch_size=1, max_steps=2, learning_rate=rate)
        return federation.silos["silo-a"].ask(Train(order), beginning(federation)).refused

    gained = bits_by_divergence(fails, second_error(federation, 1))
    assert gained < 2, f"{gained:.1f} bits of an error on one row"


def test_evaluations_of_single_silos_stay_there(make: Make) -> None:
    federation = make()
    federation.round()
    federation.follow()
    victim = federation.silos["silo-a"]
    truth = victim.session._trainer._trainer.evaluate(victim.model)
    heard = victim.ask(EvaluateModel(1), federation.aggregator.outgoing("silo-a"))
    if isinstance(heard.reply, Evaluation):
        assert heard.reply.loss != truth.loss
    assert f"{truth.loss:.6g}"[:6] not in heard.words
    order = federation.order("silo-a", evaluate=True)
    heard = victim.ask(Train(order), federation.aggregator.outgoing("silo-a"))
    assert f"{truth.loss:.6g}"[:6] not in heard.words


def test_a_model_that_the_owner_pinned_in_silo_yaml_is_the_only_one_taken(make: Make) -> None:
    """From the file over the environment down to the replica."""
    federation = make()
    pinned, other = (np.full(FEATURES + 1, value, dtype="<f4") for value in (0.5, 0.25))
    silo = federation.silo("silo-a", first_model=hashlib.sha256(pinned.tobytes()).hexdigest())
    for model, taken in ((other, False), (pinned, True)):
        give(silo, beginning(federation, start=Start.CLEAR, model=model.tobytes()), 0)
        assert (silo.replica.holds == 0) is taken
    np.testing.assert_array_equal(silo.model, pinned)


def test_seconds_and_pressures_tell_no_number_of_samples(make: Make) -> None:
    """Seconds of an evaluation, times the speed, were the samples of the split, to a tenth."""
    federation = make()
    report = federation.train("silo-a", federation.order("silo-a", evaluate=True)).reply
    assert isinstance(report, WorkReport)
    assert set(report.overhead_s) <= {"open", "seal"}
    shares = [share for window in report.windows for share in (window.cpu, window.memory) if share is not None]
    assert shares == [round(share, 2) for share in shares]
    measured = replace(report, windows=(Window(1.0, 0.123456789, 0.987654321),))
    kept = federation.silos["silo-a"].replica.disclosed(measured)
    assert kept.windows == (Window(1.0, 0.12, 0.99),)
