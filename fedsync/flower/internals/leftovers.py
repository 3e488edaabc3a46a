"""What runs that failed leave in a SuperLink's database: messages that nobody answered, with their parts.

Flower removes what is left of a run that is stopped, or that somebody asks for once it is over. A run whose server
process died is over when nobody heard of it for a minute, and FedSync goes on with it as another one: nobody asks for
the first. So whenever a run begins, what is left of those that are over goes. For the versions in
`fedsync.flower.internals.versions.TESTED` only, and where there is a database.
"""

from __future__ import annotations

from typing import Any

from flwr.common.constant import Status

from fedsync.flower.internals.one_transaction import has_one_database


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
