"""A silo's task files are those of the Flower app that it was sent, where its owner has not fenced it in."""

import os
import sys
from pathlib import Path

import pytest

from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.core.errors import OwnerRefusal
from fedsync.trainer.bundle import APP, announce
from fedsync.trainer.owner_policy import OwnerPolicy


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app where Flower unpacks it, and another by the same name where the silo happens to have been started."""
    monkeypatch.setenv(APP, "before")
    for folder in (tmp_path / "apps" / "mine", tmp_path / "here"):
        (folder / "mine").mkdir(parents=True)
        (folder / "pyproject.toml").touch()
        for name in ("mine/client_app.py", "task.py"):
            (folder / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    # Ray has the folder there in which the SuperLink was started.
    folders = [tmp_path, tmp_path / "here", tmp_path / "apps" / "mine"]
    monkeypatch.setattr(sys, "path", ["", *map(str, folders), *sys.path])
    announce(tmp_path / "apps")
    assert os.environ[APP] == str(tmp_path / "apps" / "mine")
    return tmp_path / "apps" / "mine"


def spec(task: str) -> RunSpec:
    return RunSpec.of(StrategyConfig.load("fedavg", [f"task={task}"]), None, 2)


def test_files_of_the_app_go_first(app: Path) -> None:
    found = OwnerPolicy().checked(spec("{kind: clientapp, app: 'mine.client_app:app'}"), 0).task
    assert found.folder == str(app)  # type: ignore[union-attr]
    found = OwnerPolicy().checked(spec("{kind: custom, file: task.py}"), 0).task
    assert found.file == str(app / "task.py")  # type: ignore[union-attr]
    assert OwnerPolicy().checked(spec("{kind: custom, file: other.py}"), 0).task.file == "other.py"  # type: ignore[union-attr]


def test_an_owners_fence_stays_closed(app: Path, tmp_path: Path) -> None:
    with pytest.raises(OwnerRefusal):
        OwnerPolicy(data=[str(tmp_path / "here")]).checked(spec(f"{{kind: custom, file: {app / 'task.py'}}}"), 0)


def test_elsewhere_paths_stay_as_they_are(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(APP)
    assert OwnerPolicy().checked(spec("{kind: custom, file: task.py}"), 0).task.file == "task.py"  # type: ignore[union-attr]
