"""A silo that lies to an honest relay. It spoils its own answer, and costs its region and its relay nothing more."""

import json
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.orders import WorkReport
from fedsync.extras.relays.relay import MOST_TEXT, RelayService
from fedsync.extras.relays.relay_messages import MAX_SILOS, RegionAsk, RegionReply
from fedsync.silo.protocol import MAX_EVALUATION_TEXT, MAX_TEXT, Collect, InProgress, write_reply, write_request
from fedsync.transport.port import SiloAnswer
from tests.silo.test_relay import Silos, ask, request, train

NORMALISED = RunSpec.of(
    StrategyConfig.load("fedavg", ["task={kind: digits}", "aggregation={kind: fednova, weight: samples}"]), None, 3
).dump()


@pytest.fixture
def silos() -> Silos:
    return Silos()


@pytest.fixture
def relay(silos: Silos) -> RelayService:
    return relay_of(silos)


def relay_of(silos: Silos) -> RelayService:
    found = RelayService(silos, clock=lambda: silos.now_s)
    found.turn()
    ask(found, request())
    return found


def work_on(relay: RelayService, silos: Silos) -> None:
    """Both silos are at work, and are asked for their updates."""
    ask(relay, request(train("a"), train("b")))
    silos.came = [SiloAnswer(name, write_reply(InProgress(1, 8))) for name in ("m1", "m2")]
    relay.turn()
    ask(relay, request(collect("a"), collect("b")))


def collect(silo: str, number: int = 1) -> RegionAsk:
    text = write_request(Collect(f"{silo}/{number}", 1.0))
    return replace(train(silo, number), number=f"s/{silo}{number}+", text=text)


LIES: dict[str, dict[str, Any]] = {
    "no steps": {"steps": 0},
    "more steps than it was to make": {"steps": 10**12},
    "samples that were not there": {"samples": 10**9},
    "less than no samples": {"samples": -40},
    "no time": {"compute_s": 0.0},
    "another version": {"base_version": 7},
}


@pytest.mark.parametrize("later", [False, True])
@pytest.mark.parametrize("lie", LIES)
def test_a_report_that_cannot_be_is_in_no_sum_however_it_was_asked_for(
    lie: str, silos: Silos, monkeypatch: pytest.MonkeyPatch, *, later: bool
) -> None:
    """One that comes later is the answer to a `Collect`, which does not say again what the order was."""
    monkeypatch.setattr("tests.silo.test_relay.SPEC", NORMALISED)
    relay = relay_of(silos)
    if later:
        work_on(relay, silos)
    else:
        ask(relay, request(train("a"), train("b")))
    report = replace(WorkReport(0, 5, 40, 1.0, 1.0), **LIES[lie])
    values = np.array([1, 2], np.float32).view(np.uint8)
    silos.came = [SiloAnswer(f"m{len(silos.sent) - 1}", write_reply(report), values)]
    silos.answers(len(silos.sent), [3, 4])
    relay.turn()
    reply, pieces = ask(relay, request())
    assert reply.sums == ()
    assert [each.text for each in reply.answers if each.number.startswith("s/a")][-1] == write_reply(report)
    (honest,) = [each for each in reply.answers if each.number.startswith("s/b") and each.piece >= 0]
    np.testing.assert_array_equal(pieces[honest.piece].view(np.float32), [3, 4])


def test_a_relay_that_knows_no_order_adds_nothing(relay: RelayService, silos: Silos) -> None:
    """It was started again, and the server asks for what was in work."""
    ask(relay, request(collect("a"), collect("b")))
    silos.answers(1, [1, 2])
    silos.answers(2, [3, 4])
    relay.turn()
    reply, _ = ask(relay, request())
    assert reply.sums == () and [each.piece for each in reply.answers] == [0, 1]


def test_orders_that_nobody_answers_fill_no_memory(relay: RelayService) -> None:
    for number in range(1, 2 * MAX_SILOS + 50):
        ask(relay, request(train("a", number)))
    (run,) = relay._runs.values()
    assert len(run.orders) == 2 * MAX_SILOS and f"a/{2 * MAX_SILOS + 49}" in run.orders


def test_words_without_end_are_a_problem_of_who_says_them(relay: RelayService, silos: Silos) -> None:
    """The server takes 2 MiB of texts in one answer, and would lose those of the region with it."""
    ask(relay, request(train("a"), train("b")))
    silos.came = [SiloAnswer("m1", "x" * (MAX_EVALUATION_TEXT + 1), np.zeros(8, np.uint8))]
    silos.answers(2, [3, 4])
    relay.turn()
    reply, _ = ask(relay, request())
    told = {each.number: each for each in reply.answers}
    assert told["s/a1"].problem == f"its answer has {MAX_EVALUATION_TEXT + 1} characters, at most {MAX_EVALUATION_TEXT}"
    assert told["s/a1"].text == "" and told["s/b1"].piece == 0


def test_many_long_answers_come_one_reply_after_the_other_each_with_its_sum(relay: RelayService, silos: Silos) -> None:
    """Quotation marks count twice, for so they travel."""
    asks = [train(silo, number) for number in range(1, 31) for silo in "ab"]
    ask(relay, request(*asks))
    report = WorkReport(0, 5, 40, 1.0, 1.0, overhead_s={'"' * 120 + f"{name}": 1.0 for name in range(64)})
    text = write_reply(report)
    assert len(text) <= MAX_TEXT
    silos.came = [SiloAnswer(f"m{number}", text, np.zeros(8, np.uint8)) for number in range(1, 61)]
    relay.turn()
    replies = list[RegionReply]()
    while len([answer for reply in replies for answer in reply.answers]) < 60:
        replies.append(ask(relay, request())[0])
    assert len(replies) > 1
    for reply in replies:
        assert sum(len(json.dumps(answer.text)) for answer in reply.answers) <= MOST_TEXT
        summed = {number for each in reply.sums for number in each.numbers}
        assert summed
        assert {answer.number for answer in reply.answers if answer.piece < 0} == summed
    assert sorted(answer.number for reply in replies for answer in reply.answers) == sorted(one.number for one in asks)


def test_a_sum_that_cannot_be_made_costs_one_answer_and_not_all_that_come(
    relay: RelayService, silos: Silos, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that is full: the server asks again for what it does not hear of."""
    ask(relay, request(train("a"), train("b")))
    silos.answers(1, [1, 2])
    silos.answers(2, [3, 4])
    relay.turn()

    full = ConfigError("disk", "it is full", "Make room")
    with monkeypatch.context() as patch, pytest.raises(ConfigError):
        patch.setattr("fedsync.model.chunked_arrays.ArrayKeeper.make", Mock(side_effect=full))
        ask(relay, request())
    ask(relay, request(collect("a"), collect("b")))
    silos.answers(3, [1, 2])
    silos.answers(4, [3, 4])
    relay.turn()
    reply, _ = ask(relay, request())
    assert len(reply.answers) == 2 and [each.update_ids for each in reply.sums] == [("a/1", "b/1")]
