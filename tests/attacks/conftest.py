"""Federations for adversaries."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.adversary import Federation

Make = Callable[..., Federation]


@pytest.fixture(scope="session")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What all federations share: keys, which take a while to make, and the silos' data."""
    folder = tmp_path_factory.mktemp("adversary")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def make(root: Path, tmp_path: Path) -> Make:
    """Makes a federation in the hands of an adversary."""
    tmp_path.chmod(0o700)

    def made(count: int = 3, **options: Any) -> Federation:
        return Federation(root, tmp_path, count, **options)

    return made
