"""The server asks silos for the model that it cannot build, whatever some of them answer."""

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from flwr.app import Context, Error, Message, RecordDict

from fedsync.common.errors import RunError
from fedsync.flower.first_model import ask_for_model
from fedsync.flower.grid_transport import GridTransport
from fedsync.model.layout import Layout, Vector
from fedsync.server.nodes import Admission
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import InitialModel, InProgress, Refusal, Refused
from tests.flower.grid import Answer, DirectGrid, saying, silos_in_this_process

SOON = Timeouts(poll_s=0.001, join_timeout_s=0.05)
LONG = Timeouts(poll_s=0.001, join_timeout_s=60.0)
WEIGHTS = np.array([1.0, 2.0], np.float32)


@pytest.fixture(autouse=True)
def _identity() -> Iterator[None]:
    with silos_in_this_process():
        yield


def always(make: Callable[[Message], Message]) -> Answer:
    """A silo that answers every message like this."""
    return lambda message, context: make(message)


def model(values: Vector | None, *shape: int) -> Answer:
    """A silo that sends these values as one array of this shape."""
    layout = InitialModel(Layout(("w",), (shape,)))
    return always(lambda message: saying(message, layout, values))


HONEST = model(WEIGHTS, 2)
BAD = {
    "another record": always(lambda message: Message(RecordDict(), reply_to=message)),
    "an error": always(lambda message: Message(Error(code=2, reason="no data"), reply_to=message)),
    "another reply": always(lambda message: saying(message, InProgress(1, 1))),
    "a claim of 16 TiB": model(WEIGHTS, 2**42),
    "not a number": model(np.full(3, np.nan, np.float32), 3),
    "nothing": model(None, 2),
}


@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_is_no_model_costs_its_silo_its_turn(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found, about = ask_for_model(GridTransport(DirectGrid(2, {1: BAD[name], 2: HONEST})), "{}", LONG)
    np.testing.assert_array_equal(found, WEIGHTS)
    assert about.layout == Layout(("w",), ((2,),))
    assert "node 1 failed the check" in caplog.text


def test_where_no_silo_has_a_model_the_last_problem_is_told() -> None:
    with pytest.raises(RunError, match=r"no silo sent a model in 0.05 s; node 1 failed the check 'answer': .*no data"):
        ask_for_model(GridTransport(DirectGrid(1, {1: BAD["an error"]})), "{}", SOON)


def test_a_silo_that_had_no_model_is_asked_again_later() -> None:
    asked = 0

    def at_last(message: Message, context: Context) -> Message | None:
        nonlocal asked
        asked += 1
        return (HONEST if asked == 3 else BAD["an error"])(message, context)

    found, _ = ask_for_model(GridTransport(DirectGrid(1, {1: at_last})), "{}", replace(LONG, look_s=0.001))
    np.testing.assert_array_equal(found, WEIGHTS)


def test_nobody_is_asked_again_at_once() -> None:
    grid = DirectGrid(1, {1: BAD["an error"]})
    with pytest.raises(RunError):
        ask_for_model(GridTransport(grid), "{}", SOON)
    assert grid.pushed == [(1, "AskModel")]


def test_a_question_that_is_lost_is_asked_again() -> None:
    lost = 0

    def hears_at_last(message: Message, context: Context) -> Message | None:
        nonlocal lost
        lost += 1
        return HONEST(message, context) if lost == 3 else None

    found, _ = ask_for_model(GridTransport(DirectGrid(1, {1: hears_at_last})), "{}", replace(LONG, ask_s=0.01))
    np.testing.assert_array_equal(found, WEIGHTS)


def test_where_all_silos_refuse_the_run_nobody_is_asked_again() -> None:
    grid = DirectGrid(2, dict.fromkeys((1, 2), always(lambda message: saying(message, Refused(Refusal.OWNER)))))
    with pytest.raises(RunError, match=r"every silo refuses the run, OWNER: .* node 1, node 2: its own log"):
        ask_for_model(GridTransport(grid), "{}", LONG, Admission(expected=2))
    assert grid.pushed == [(1, "AskModel"), (2, "AskModel")]
