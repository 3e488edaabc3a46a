"""Which of an app's messages still wait at the SuperLink: what nobody has fetched is not lost.

A message that has no answer for long may be lost on its way, and then it has to be asked for again. Where a server has
much to do, it more likely waits for its turn. Whoever asks again then makes the backlog longer that he waits for.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from fedsync.flower.internals.one_transaction import has_one_database

_WAITING = """
SELECT message_id FROM message_ins WHERE run_id = ? AND message_id IN (SELECT value FROM json_each(?)) AND (
    delivered_at = ''
    OR EXISTS (
        SELECT 1 FROM message_res WHERE reply_to_message_id = message_ins.message_id AND message_res.delivered_at = ''
    )
)
"""


def still_waiting(state: Any, run_id: int, names: Sequence[str]) -> list[str]:
    """Those of a run's messages that no node has fetched, or whose answer the app has not.

    Args:
        state: of the SuperLink; one without a database says of no message that it waits.
        run_id: of the run.
        names: of messages.
    """
    from flwr.supercore.utils import uint64_to_int64

    if not has_one_database(state):
        return []
    with state.session() as session:
        do = session.connection().connection.driver_connection.execute
        return [name for (name,) in do(_WAITING, [uint64_to_int64(run_id), json.dumps(names)])]
