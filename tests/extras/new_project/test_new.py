"""``fedsync new``: what it makes is a project that validates, runs and learns."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

from fedsync.common.errors import ConfigError
from fedsync.config.sections.strategy_sections import MAX_SEED
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.tasks.custom import load_task
from fedsync.tasks.task_protocol import SiloSlot
from tests.commands.call import call


def made(folder: Path) -> Path:
    call("new", folder)
    return folder


@pytest.mark.slow
def test_a_project_validates_and_learns_until_its_target_is_reached(tmp_path: Path) -> None:
    project = made(tmp_path / "deep" / "project")
    call("validate", project / "strategy.yaml")
    call("validate", project / "silos.yaml")
    call("run", project / "strategy.yaml", "--silos", project / "silos.yaml", "--runtime", "virtual", "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped_by"].startswith("target accuracy")
    assert summary["seconds_to_target"] is not None
    assert summary["accuracy"] > 0.75, "by chance one of four classes is right in four"
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert rows[0]["accuracy"] < summary["accuracy"]


@pytest.mark.slow
def test_the_project_s_own_test_passes(tmp_path: Path) -> None:
    project = made(tmp_path / "project")
    test = runpy.run_path(str(project / "test_project.py"))["test_a_few_rounds_learn"]
    test(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"project", "1", "5"}, "it has run"


def test_a_silo_s_own_data_are_read_beside_the_task_and_any_seed_makes_data_up(tmp_path: Path) -> None:
    task = made(tmp_path / "project") / "task.py"

    def parts(options: dict[str, object], seed: int = 7) -> list[int]:
        data = load_task(task, options).data(SiloSlot("north", index=0, count=1, seed=seed))
        return [len(data.train), len(data.test)]  # type: ignore[arg-type]  # datasets that have a length

    with pytest.raises(ConfigError, match="does not exist"):
        parts({"file": "data.npz"})
    for width in (32, 5):
        np.savez(task.parent / f"{width}.npz", inputs=np.ones((20, width)), labels=np.arange(20) % 2)
    assert parts({"file": "32.npz"}) == [16, 4]
    with pytest.raises(ConfigError, match=r"inputs of .* are \(20, 5\)"):
        parts({"file": "5.npz"})
    assert parts({"samples": 10}, MAX_SEED) == [8, 2]


def test_the_files_fit_each_other_and_the_readme_names_each(tmp_path: Path) -> None:
    project = made(tmp_path / "project")
    server = YamlFile.read(project / "site" / "server.yaml").validate(ServerStartConfig)
    silo = YamlFile.read(project / "site" / "silo.yaml").validate(SiloStartConfig)
    simulated = YamlFile.read(project / "silos.yaml").data["silos"]
    assert list(server.silos) == [entry["name"] for entry in simulated]
    assert silo.name in server.silos
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == {
        *("README.md", "task.py", "strategy.yaml", "silos.yaml", "test_project.py"),
        *("site/server.yaml", "site/silo.yaml"),
    }
    readme = (project / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in files - {"README.md"})


def test_only_an_empty_folder_is_written(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match="the project cannot be written"):
        call("new", tmp_path / "task.py")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / ".git").write_text("mine")
    with pytest.raises(ConfigError, match=r"the folder is not empty\. Name one that is"):
        call("new", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == [".git"]
