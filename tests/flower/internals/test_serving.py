"""What the SuperLink's process says."""

import logging

import pytest

from fedsync.flower.internals.serving import say_less


def test_records_that_no_log_shows_are_not_made(monkeypatch: pytest.MonkeyPatch) -> None:
    flowers, seen = logging.getLogger("tests.say_less"), list[str]()
    handler = logging.Handler(logging.INFO)
    monkeypatch.setattr(handler, "emit", lambda record: seen.append(record.getMessage()))
    flowers.addHandler(handler)
    say_less(flowers)
    assert not flowers.isEnabledFor(logging.DEBUG)
    flowers.info("[Fleet.PushMessages] Push replies from node_id=%s", 7)
    flowers.info("[Fleet.ActivateNode] Activated node_id=%s", 7)
    assert seen == ["[Fleet.ActivateNode] Activated node_id=7"]
    handler.setLevel(logging.DEBUG)  # as FLWR_LOG_LEVEL has it
    say_less(flowers)
    assert flowers.isEnabledFor(logging.DEBUG)
