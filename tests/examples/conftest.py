"""The folder of an example, as its README's reader has it."""

import shutil
from pathlib import Path

import pytest

from tests.examples.reader import FOLDER, LIBRARIES


@pytest.fixture
def example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the example's folder, where its README's reader would be."""
    for library in LIBRARIES.get(name, ()):
        pytest.importorskip(library)
    shutil.copytree(FOLDER / name, tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    return tmp_path / name
