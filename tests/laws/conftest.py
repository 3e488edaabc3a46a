"""Combinations of kinds go through the laws with ``make full``, in all tests."""

from pathlib import Path

import pytest

from tests.laws.kinds import COMBINED, name_of

FOLDER = Path(__file__).parent
NAMES = [name_of(case) for case in COMBINED]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        told = getattr(item, "callspec", None) if item.path.parent == FOLDER else None
        if told is not None and any(name in told.id for name in NAMES):
            item.add_marker(pytest.mark.full)
