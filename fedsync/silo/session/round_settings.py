"""Check that an order's settings (such as learning rate) are those of the run's specification for its round."""

from __future__ import annotations

from pydantic import TypeAdapter, ValidationError

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.config.run_spec import RunSpec
from fedsync.config.training import UserConfig
from fedsync.core.orders import WorkOrder
from fedsync.policies.rounds.settings_by_round import RATE, Called

_SETTINGS: TypeAdapter[dict[str, bool | int | float | str]] = TypeAdapter(UserConfig)


def check_settings(order: WorkOrder, spec: RunSpec) -> None:
    """Raise `ProtocolError` if an order's settings differ from the specification's for its round. Where a function of
    the server decides, any settings are valid.
    """
    if order.scores_only and not order.config:
        return
    if spec.on_round is None:
        raise ProtocolError(SERVER, "order", "it has settings of its own, and the run has none by round")
    try:
        told = _SETTINGS.validate_json(order.config or "{}")
    except ValidationError as error:
        raise ProtocolError(SERVER, "order", f"its settings are invalid: {error.errors()[0]['msg']}") from error
    if isinstance(spec.on_round, Called):
        return
    expected = dict(spec.on_round.settings(order.base_version + 1, spec.local.learning_rate))
    expected.pop(RATE, None)
    if told != expected:
        raise ProtocolError(SERVER, "order", "its settings are not those that the run has for its round")
