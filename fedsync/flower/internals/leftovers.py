"""What Flower keeps for ever, though nobody asks for it any more: in a SuperLink's database, in a SuperNode's memory.

| what | goes, in Flower | here |
|---|---|---|
| messages that nobody answered, with their parts | when somebody asks for a run that is over | as another run begins |
| a run's log | never | but for the newest `KEPT_LOGS` pieces |
| a task for each message, at a SuperNode | never | is not made where nobody takes it |

A run whose server process died is over when nobody heard of it for a minute, and FedSync goes on with it as another
one: nobody asks for the first. For the versions in `fedsync.flower.internals.versions.TESTED` only; at a SuperLink
where there is a database.
"""

from __future__ import annotations

from itertools import count
from typing import Any

from flwr.common.constant import Status

from fedsync.flower.internals.one_transaction import has_one_database

KEPT_LOGS = 10_000
"""Pieces of each run's log that stay, the newest: what its app said within 0.2 s, about a round each, of 200 bytes."""

_SELDOM = 1000
"""Pieces after which older ones are looked for."""

_OLDER = """
    DELETE FROM task_logs WHERE task_id = :task AND timestamp <= (
        SELECT timestamp FROM task_logs WHERE task_id = :task ORDER BY timestamp DESC LIMIT 1 OFFSET :kept
    )
"""


def forget_runs_that_are_over(state: Any) -> None:
    """Have a state with a database remove what is left of runs that are over before another one begins."""
    if not has_one_database(state):
        return
    create_run = state.create_run

    def create(*arguments: Any, **options: Any) -> Any:
        for run in state.get_run_info(statuses=[Status.FINISHED]):
            if state.get_message_ids_from_run_id(run.run_id):
                state.cleanup_run(run.run_id)
        return create_run(*arguments, **options)

    vars(state)["create_run"] = create


def forget_old_logs(state: Any) -> None:
    """Have a state with a database keep the newest of each run's log."""
    if not has_one_database(state):
        return
    add, pieces = state.add_task_log, count(1)

    def add_and_forget(task_id: int, log_message: str) -> None:
        from flwr.supercore.utils import uint64_to_int64
        from sqlalchemy import text

        add(task_id, log_message)
        if next(pieces) % _SELDOM == 0:
            with state.session() as session:
                session.execute(text(_OLDER), {"task": uint64_to_int64(task_id), "kept": KEPT_LOGS})

    vars(state)["add_task_log"] = add_and_forget


def make_no_tasks(state: Any) -> None:
    """Have the state of a SuperNode that answers messages itself make no tasks for processes that would."""

    def create_task(**told: Any) -> int:
        return 0

    vars(state)["create_task"] = create_task
