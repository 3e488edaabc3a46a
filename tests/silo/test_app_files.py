"""A silo's task files are those of the Flower app that it was sent, where its owner has not fenced it in."""

import sys
from pathlib import Path
from typing import Any

import pytest

from fedsync.common.errors import OwnerRefusal
from fedsync.config.run_spec import RunSpec
from fedsync.config.strategy import StrategyConfig
from fedsync.silo.owner.app_files import APP, announced
from fedsync.silo.owner.owner_policy import OwnerPolicy
from fedsync.silo.protocol import STATE, Identity
from fedsync.silo.session import trainer_client as client


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An app where Flower unpacks it, and another by the same name where the silo happens to have been started."""
    for folder in (tmp_path / "apps" / "mine", tmp_path / "here"):
        (folder / "mine").mkdir(parents=True)
        (folder / "pyproject.toml").touch()
        for name in ("mine/client_app.py", "task.py"):
            (folder / name).touch()
    monkeypatch.chdir(tmp_path / "here")
    # Ray has the folder there in which the SuperLink was started.
    folders = [tmp_path, tmp_path / "here", tmp_path / "apps" / "mine"]
    monkeypatch.setattr(sys, "path", ["", *map(str, folders), *sys.path])
    found = announced(sys.path, tmp_path / "apps")
    assert found == str(tmp_path / "apps" / "mine")
    monkeypatch.setenv(APP, found)
    return tmp_path / "apps" / "mine"


def spec(task: str) -> RunSpec:
    return RunSpec.of(StrategyConfig.load("fedavg", [f"task={task}"]), None, 2)


def test_the_apps_files_go_first_and_elsewhere_paths_stay(app: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def found(task: str) -> Any:
        return OwnerPolicy().checked(spec(task), 0).task

    assert found("{kind: clientapp, app: 'mine.client_app:app'}").folder == str(app)
    assert found("{kind: custom, file: task.py}").file == str(app / "task.py")
    assert found("{kind: custom, file: other.py}").file == "other.py"
    monkeypatch.delenv(APP)
    assert found("{kind: custom, file: task.py}").file == "task.py"


def test_an_owners_fence_stays_closed(app: Path, tmp_path: Path) -> None:
    with pytest.raises(OwnerRefusal):
        OwnerPolicy(data=[str(tmp_path / "here")]).checked(spec(f"{{kind: custom, file: {app / 'task.py'}}}"), 0)


def test_a_process_that_has_no_app_names_none(tmp_path: Path) -> None:
    assert announced(["", str(tmp_path), str(tmp_path / "nothing")], tmp_path / "apps") == ""


@pytest.mark.parametrize("run_s", ["", "/apps/mine"])
def test_a_trainer_starts_with_the_app_of_its_run(run_s: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent has trainers of many runs, each with an app of its own; a process of Flower's has one."""
    noted = tmp_path / "noted"
    tmp_path.chmod(0o700)
    monkeypatch.setenv(STATE, str(tmp_path))
    monkeypatch.setenv(APP, "/apps/of-this-process")
    stub = f"import os; open({str(noted)!r}, 'w').write(os.environ[{APP!r}])"
    monkeypatch.setattr(client, "INTERPRETER", (sys.executable, "-P", "-c", stub))
    token = client.app_folder.set(run_s)
    try:
        client.TrainerClient(Identity("{}", 0, "a"))._start().wait()
    finally:
        client.app_folder.reset(token)
    assert noted.read_text() == (run_s or "/apps/of-this-process")
