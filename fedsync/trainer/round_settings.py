"""The check of what an order says to training code beside ``train_config``: a run with ``on_round`` has such orders."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from fedsync.config.user_config import UserConfig
from fedsync.core.errors import SERVER, ProtocolError
from fedsync.core.orders import WorkOrder

_SETTINGS: TypeAdapter[dict[str, bool | int | float | str]] = TypeAdapter(UserConfig)


def check_settings(order: WorkOrder, expected: bool) -> None:
    """See that an order's settings are some, and that the run has settings by round.

    Args:
        order: says them as ``config``.
        expected: the run's specification, which the silo's owner may have confirmed, says so.

    Raises:
        ProtocolError: the server sent something else.
    """
    if not expected:
        raise ProtocolError(SERVER, "order", "it has settings of its own, and the run has none by round")
    try:
        _SETTINGS.validate_json(order.config)
    except ValidationError as error:
        raise ProtocolError(SERVER, "order", f"its settings are none: {error.errors()[0]['msg']}") from error
