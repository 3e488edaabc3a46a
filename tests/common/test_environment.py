"""Environment variables for a while."""

import os

import pytest

from fedsync.common.environment import environment


def test_all_is_as_before_whatever_happened_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDSYNC_A", "before")
    monkeypatch.delenv("FEDSYNC_B", raising=False)
    with pytest.raises(KeyError), environment({"FEDSYNC_A": "now", "FEDSYNC_B": "now"}):
        assert os.environ["FEDSYNC_A"] == os.environ["FEDSYNC_B"] == "now"
        del os.environ["FEDSYNC_B"]
        raise KeyError
    assert os.environ["FEDSYNC_A"] == "before" and "FEDSYNC_B" not in os.environ
