"""Federations for adversaries."""

import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.attacks.adversary import Federation
from tests.attacks.private_silo import Silo

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


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder with a short path: a silo's state folder may have only sixty bytes."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def silo(place: Path) -> Silo:
    return Silo(place / "s")


@pytest.fixture
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No noise, and all units in each step: what is left of an update is what the data did."""
    from fedsync.train.dp_sgd.private_step import SystemRandom

    monkeypatch.setattr(SystemRandom, "add_noise", lambda self, total, deviation: None)
    monkeypatch.setattr(SystemRandom, "chosen", lambda self, units, rate: np.arange(units))
