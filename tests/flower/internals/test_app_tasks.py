"""Which task an app is."""

from types import SimpleNamespace
from typing import Any

import pytest

from fedsync.flower.internals.app_tasks import AppTasks
from fedsync.flower.internals.one_transaction import CLEAN_UP_S
from fedsync.flower.internals.parcel_routes import NoParcel


def test_a_task_is_looked_up_once_for_many_requests_and_soon_no_more_when_it_is_over() -> None:
    times, there, asked = [0.0], {"a": "task a", "b": "task b"}, list[str]()

    def look(token: str) -> Any:
        asked.append(token)
        return there.get(token)

    state: Any = SimpleNamespace(get_task_by_token=look)
    tasks = AppTasks(lambda: state, lambda: times[-1])
    assert [tasks.of(token) for token in (b"a", b"b", b"a", b"a")] == ["task a", "task b", "task a", "task a"]
    assert asked == ["a", "b"]
    there.clear()
    times.append(CLEAN_UP_S)
    with pytest.raises(NoParcel, match="not an app"):
        tasks.of(b"a")
    with pytest.raises(NoParcel, match="not an app"):
        tasks.of(b"a")
    assert asked == ["a", "b", "a", "a"], "who is none is not remembered"
