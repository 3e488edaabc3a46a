"""The resident ClientApp process while it waits for a message; that it answers one is in tests/e2e."""

from __future__ import annotations

import threading

import pytest

from fedsync.runtime import executor
from fedsync.runtime.executor import _GivenUp, _unless_given_up


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "_WANTED_S", 0.01)


def never() -> str:
    threading.Event().wait()
    return "unreachable"


def test_a_message_that_comes_is_taken() -> None:
    assert _unless_given_up(lambda: "message", lambda: True, lambda: "other") == "message"


def test_a_message_that_takes_its_time_is_waited_for() -> None:
    asked = threading.Event()

    def slow() -> str:
        asked.wait()
        return "message"

    def acquire() -> None:
        asked.set()

    assert _unless_given_up(slow, lambda: True, acquire) == "message"


def test_what_prevents_it_is_said() -> None:
    def broken() -> str:
        raise OSError("no route")

    with pytest.raises(OSError, match="no route"):
        _unless_given_up(broken, lambda: True, lambda: None)


def test_the_next_task_takes_the_place_of_one_whose_rest_never_comes() -> None:
    tokens = iter([None, None, "next"])
    with pytest.raises(_GivenUp) as caught:
        _unless_given_up(never, lambda: True, lambda: next(tokens))
    assert caught.value.following == "next"


def test_a_task_that_is_not_wanted_any_more_is_left() -> None:
    with pytest.raises(_GivenUp) as caught:
        _unless_given_up(never, lambda: False, lambda: None)
    assert caught.value.following is None
