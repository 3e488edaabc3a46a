"""``fedsync new``: what it makes is a project that validates, runs and learns."""

import json
import runpy
from pathlib import Path

import pytest

from fedsync.commands.new import TEMPLATES, TaskKind
from fedsync.common.errors import ConfigError
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.silo_start import SiloStartConfig
from fedsync.config.yaml_file import YamlFile
from tests.commands.call import call

every_kind = pytest.mark.parametrize("kind", TaskKind)


def made(folder: Path, kind: TaskKind = TaskKind.CLASSES) -> Path:
    call("new", folder, "--task", kind)
    return folder


def test_the_line_that_enters_the_folder_can_be_pasted(tmp_path: Path) -> None:
    assert f"  cd '{tmp_path / 'my proj'}'\n" in call("new", tmp_path / "my proj")
    assert f"  cd {tmp_path / 'plain'}\n" in call("new", tmp_path / "plain")


@pytest.mark.slow
@every_kind
def test_a_project_validates_and_learns_until_its_target_is_reached(tmp_path: Path, kind: TaskKind) -> None:
    project = made(tmp_path / "deep" / "project", kind)
    call("validate", project / "strategy.yaml")
    call("validate", project / "silos.yaml")
    call("run", project / "strategy.yaml", "--silos", project / "silos.yaml", "--runtime", "virtual", "--out", tmp_path)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["stopped_by"].startswith("target accuracy")
    assert summary["seconds_to_target"] is not None
    # By chance one of four classes is right in four; numbers of variance about 1 are missed by as much.
    assert summary["accuracy"] > (0.75 if kind is TaskKind.CLASSES else -0.25)
    rows = [json.loads(line) for line in (tmp_path / "rounds.jsonl").read_text().splitlines()]
    assert rows[0]["accuracy"] < summary["accuracy"]


def test_the_project_s_own_test_passes(tmp_path: Path) -> None:
    project = made(tmp_path / "project", TaskKind.NUMBERS)
    test = runpy.run_path(str(project / "test_project.py"))["test_a_few_rounds_learn"]
    test(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"project", "1", "5"}, "it has run"


@every_kind
def test_a_silo_s_own_data_are_read_beside_the_task(tmp_path: Path, kind: TaskKind) -> None:
    import numpy as np

    from fedsync.tasks.custom import load_task
    from fedsync.tasks.task_protocol import SiloSlot

    project = made(tmp_path / "project", kind)
    features, name = (32, "labels") if kind is TaskKind.CLASSES else (6, "targets")
    slot = SiloSlot("north", index=0, count=1, seed=7)

    def parts(rows: int, width: int) -> list[int]:
        np.savez(project / "data.npz", inputs=np.ones((rows, width)), **{name: np.arange(rows) % 2})
        data = load_task(project / "task.py", {"file": "data.npz"}).data(slot)
        return [len(data.train), len(data.test)]  # type: ignore[arg-type]  # datasets that have a length

    with pytest.raises(ConfigError, match="does not exist"):
        load_task(project / "task.py", {"file": "data.npz"}).data(slot)
    assert parts(20, features) == [16, 4]
    with pytest.raises(ConfigError, match=r"inputs of .* are \(20, 5\)"):
        parts(20, 5)


@every_kind
def test_any_seed_of_a_run_makes_data_up(tmp_path: Path, kind: TaskKind) -> None:
    from fedsync.config.sections.strategy_sections import MAX_SEED
    from fedsync.tasks.custom import load_task
    from fedsync.tasks.task_protocol import SiloSlot

    task = load_task(made(tmp_path / "project", kind) / "task.py", {"samples": 10})
    assert len(task.data(SiloSlot("north", index=1, count=2, seed=MAX_SEED)).train) == 8  # type: ignore[arg-type]


def test_the_files_of_server_and_silo_are_of_their_form_and_fit_the_silos(tmp_path: Path) -> None:
    project = made(tmp_path / "project")
    server = YamlFile.read(project / "site" / "server.yaml").validate(ServerStartConfig)
    silo = YamlFile.read(project / "site" / "silo.yaml").validate(SiloStartConfig)
    simulated = YamlFile.read(project / "silos.yaml").data["silos"]
    assert list(server.silos) == [entry["name"] for entry in simulated]
    assert silo.name in server.silos


def test_every_file_of_the_templates_is_named_in_the_readme_and_made(tmp_path: Path) -> None:
    project = made(tmp_path / "project")
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    assert files == {
        *("README.md", "task.py", "strategy.yaml", "silos.yaml", "test_project.py"),
        *("site/server.yaml", "site/silo.yaml"),
    }
    readme = (project / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in files - {"README.md"})


def test_every_kind_has_templates_and_the_other_way_round() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == {"shared", *TaskKind}


@pytest.mark.parametrize("there", ["task.py", ".git"])
def test_a_folder_that_is_not_empty_is_left_as_it_is(tmp_path: Path, there: str) -> None:
    (tmp_path / there).write_text("mine")
    with pytest.raises(ConfigError, match=r"the folder is not empty\. Name one that is"):
        call("new", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [there]
    assert (tmp_path / there).read_text() == "mine"


def test_an_empty_folder_will_do_and_a_file_will_not(tmp_path: Path) -> None:
    made(tmp_path)
    with pytest.raises(ConfigError, match="the project cannot be written"):
        call("new", tmp_path / "task.py")


def test_an_unknown_kind_is_the_users_mistake(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as ended:
        call("new", tmp_path / "x", "--task", "poems")
    assert ended.value.code == 2 and not (tmp_path / "x").exists()
