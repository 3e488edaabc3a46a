"""The server asks silos for the model that it cannot build, whatever some of them answer."""

from dataclasses import replace

import numpy as np
import pytest

from fedsync.common.errors import RunError
from fedsync.flower.first_model import ask_for_model
from fedsync.model.layout import Layout
from fedsync.model.transfer import Payload
from fedsync.server.nodes import Admission
from fedsync.server.timeouts import Timeouts
from fedsync.silo.protocol import AskModel, InitialModel, InProgress, Refusal, Refused, read_request
from fedsync.transport.port import SiloAnswer, SiloQuestion
from tests.flower.named_nodes import saying, silent, silos_of
from tests.transport.memory_transport import MemorySilo

SOON = Timeouts(poll_s=0.001, join_timeout_s=0.05)
LONG = Timeouts(poll_s=0.001, join_timeout_s=60.0)
WEIGHTS = np.array([1.0, 2.0], np.float32)


def model(*shape: int) -> InitialModel:
    return InitialModel(Layout(("w",), (shape,)))


def fails(asked: SiloQuestion, payload: Payload | None) -> SiloAnswer:
    assert isinstance(read_request(asked.text), AskModel)
    return SiloAnswer("", problem="error 2: no data", code=2)


HONEST = saying(model(2), WEIGHTS)
BAD = {
    "no reply": lambda asked, payload: SiloAnswer(""),
    "an error": fails,
    "another reply": saying(InProgress(1, 1)),
    "a claim of 16 TiB": saying(model(2**42), WEIGHTS),
    "not a number": saying(model(3), np.full(3, np.nan, np.float32)),
    "nothing": saying(model(2)),
}


class Turns:
    """A silo that answers so at first, and honestly from the n-th question on."""

    def __init__(self, first: MemorySilo, honest: int = 3) -> None:
        self.first, self.honest, self.asked = first, honest, 0

    def __call__(self, asked: SiloQuestion, payload: Payload | None) -> SiloAnswer | None:
        self.asked += 1
        return (self.first if self.asked < self.honest else HONEST)(asked, payload)


@pytest.mark.parametrize("name", BAD)
def test_an_answer_that_is_no_model_costs_its_silo_its_turn(name: str, caplog: pytest.LogCaptureFixture) -> None:
    found, about = ask_for_model(silos_of(BAD[name], HONEST), "{}", LONG)
    np.testing.assert_array_equal(found, WEIGHTS)
    assert about.layout == Layout(("w",), ((2,),))
    assert "node 1 failed the check" in caplog.text


def test_where_no_silo_has_a_model_the_last_problem_is_told() -> None:
    with pytest.raises(RunError, match=r"no silo sent a model in 0.05 s; node 1 failed the check 'answer': .*no data"):
        ask_for_model(silos_of(fails), "{}", SOON)


@pytest.mark.parametrize(("first", "soon"), [(fails, {"look_s": 0.001}), (silent, {"ask_s": 0.01})])
def test_silos_without_a_model_or_the_question_are_asked_again_later(first: MemorySilo, soon: dict[str, float]) -> None:
    found, _ = ask_for_model(silos_of(Turns(first)), "{}", replace(LONG, **soon))
    np.testing.assert_array_equal(found, WEIGHTS)


def test_nobody_is_asked_again_at_once() -> None:
    silo = Turns(fails, honest=9)
    with pytest.raises(RunError):
        ask_for_model(silos_of(silo), "{}", SOON)
    assert silo.asked == 1


def test_where_all_silos_refuse_the_run_nobody_is_asked_again() -> None:
    silos = [Turns(saying(Refused(Refusal.OWNER)), honest=9) for _ in range(2)]
    with pytest.raises(RunError, match=r"every silo refuses the run, OWNER: .* node 1, node 2: its own log"):
        ask_for_model(silos_of(*silos), "{}", LONG, Admission(expected=2))
    assert [silo.asked for silo in silos] == [1, 1]
