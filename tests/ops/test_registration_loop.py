"""The registrar: it tries until all silos are registered, and says what is in the way."""

import logging
import threading
from collections.abc import Sequence

import pytest

from fedsync.common.errors import ConfigError, RunError
from fedsync.flower.registration import Registered
from fedsync.ops.registration_loop import PATIENCE_S, RegistrationLoop


class Stop(threading.Event):
    """Passes the time; set after so many pauses."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.pauses: list[float] = []
        self.most = most

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.pauses.append(timeout)
        return len(self.pauses) >= self.most


class Answers:
    """What the attempts come to, in turn; the last one stays."""

    def __init__(self, *answers: Registered | Exception) -> None:
        self.answers = list(answers)
        self.asked: list[list[str]] = []

    def __call__(self, names: Sequence[str]) -> Registered:
        self.asked.append(list(names))
        answer = self.answers[0] if len(self.answers) == 1 else self.answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer


def test_a_superlink_that_starts_is_tried_until_it_answers() -> None:
    answers = Answers(OSError("refused"), RunError("starting"), ValueError("odd"), Registered())
    registrar, stop = RegistrationLoop(["berlin", "paris"], answers), Stop(100)
    told = []
    for _ in range(2):
        registrar.attempt()
        told.append(registrar.told["berlin"])
    assert told == ["the SuperLink does not answer: refused", "the SuperLink does not answer: starting"]
    registrar.watch(stop)
    assert stop.pauses == [0.5]
    assert registrar.told == {"berlin": "registered", "paris": "registered"}


def test_those_that_are_registered_are_not_asked_for_again() -> None:
    bad = ConfigError("silos, berlin", "no public key", "send another")
    answers = Answers(Registered({"berlin": bad, "rome": RunError("refused")}), Registered({"berlin": bad}))
    registrar = RegistrationLoop(["berlin", "paris", "rome"], answers)
    registrar.watch(Stop(2))
    assert answers.asked == [["berlin", "paris", "rome"], ["berlin", "rome"]]
    assert registrar.told == {"berlin": str(bad), "paris": "registered", "rome": "registered"}


def test_pauses_grow_and_a_warning_comes_once(caplog: pytest.LogCaptureFixture) -> None:
    """By hand: 0.5, 1, 2, ..., 32 s, then a minute each; the warning after 0.5 + 1 + ... + 32 + 60 = 123.5 s."""
    stop = Stop(12)
    with caplog.at_level(logging.WARNING, "fedsync.ops.registration_loop"):
        RegistrationLoop(["berlin"], Answers(RunError("away"))).watch(stop)
    assert stop.pauses == [0.5, 1, 2, 4, 8, 16, 32, *[60] * 5] and PATIENCE_S < 123.5
    (record,) = caplog.records
    assert "not registered after 124 s" in record.getMessage() and "away" in record.getMessage()


def test_the_operator_hears_of_keys_that_were_taken_back(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fedsync.ops.registration_loop"):
        RegistrationLoop(["berlin", "rome"], Answers(Registered(retired={"berlin": 1}, unsure=["rome"]))).attempt()
    first, second = (record.getMessage() for record in caplog.records)
    assert first == "berlin has another key: the registration of 1 before it was taken back"
    assert "knew the key of rome before" in second


def test_without_silos_nothing_is_asked() -> None:
    answers = Answers(RunError("away"))
    RegistrationLoop([], answers).watch(Stop(1))
    assert answers.asked == []
