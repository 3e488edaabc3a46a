"""Settings that all tests share."""

import os
from collections.abc import Generator
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings

from fedsync.common.sandbox.named_code import CONFIRMED
from fedsync.common.sandbox.path_sandbox import ALLOWED
from tests.parallel import long_lived, turn

# The same examples in every run, and no clock: a busy machine must not fail a test.
settings.register_profile("fedsync", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("fedsync")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The file of adapters imports libraries for seconds, where they are installed, and all its tests need them."""
    adapters = collection_path == Path(__file__).with_name("client") / "test_adapters.py"
    return True if adapters and "not examples" in config.option.markexpr else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes longest begins early: begun last, it would go on while the other processes have nothing left to do."""
    items.sort(key=turn)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with long_lived():
        return (yield)


@pytest.fixture(autouse=True)
def no_word_of_another_command() -> Generator[None]:
    """Commands that run in this process leave variables for their own children, which are not for later tests."""
    with patch.dict(os.environ):  # on the way out as well: fixtures of a whole file come before this one
        for name in ("PYTHONSAFEPATH", ALLOWED, CONFIRMED, "FEDSYNC_KEYS", "FEDSYNC_PASSPHRASE_ENV"):
            os.environ.pop(name, None)
        yield


@pytest.fixture
def full_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is written does not reach the disk."""

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)


@pytest.fixture
def silos_here() -> Generator[None]:
    """Silos have their trainers in this process, which belongs to a run of Flower's."""
    from tests.flower.grid import silos_in_this_process  # most tests need no Flower, which takes a second to import

    with silos_in_this_process():
        yield
