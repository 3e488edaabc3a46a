"""Settings that all tests share."""

import os

import pytest
from hypothesis import settings

# The same examples in every run, and no clock: a busy machine must not fail a test.
settings.register_profile("fedsync", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fedsync")


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written does not reach the disk."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
