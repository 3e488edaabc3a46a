from __future__ import annotations

import pickle
from pathlib import Path
from textwrap import dedent

import pytest

from fedsync.core.errors import ConfigError
from fedsync.tasks.custom import load_task
from fedsync.tasks.protocol import Task

GOOD = """\
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from fedsync.tasks.protocol import SiloData, SiloSlot, Task

@dataclass
class Mine(Task):
    width: int = 3

    def model(self) -> nn.Module:
        return nn.Linear(self.width, 2)

    def data(self, slot: SiloSlot) -> SiloData:
        raise NotImplementedError
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "mine.py"
    path.write_text(dedent(text), encoding="utf-8")
    return path


def test_a_task_is_made_with_its_options(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, GOOD), {"width": 5})

    assert isinstance(task, Task)
    assert task.model().in_features == 5


def test_a_loaded_task_pickles(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, GOOD), {})

    assert pickle.loads(pickle.dumps(task)) == task


def test_files_of_one_name_in_two_folders_do_not_mix(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    first = load_task(write(tmp_path, GOOD), {})
    second = load_task(write(tmp_path / "other", GOOD), {})

    assert type(first) is not type(second)
    assert type(first).__module__ != type(second).__module__


def test_an_imported_task_does_not_count(tmp_path: Path) -> None:
    text = "from fedsync.tasks.digits import DigitsTask\n" + GOOD.replace("from __future__ import annotations\n", "")

    assert type(load_task(write(tmp_path, text), {})).__name__ == "Mine"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = (\n", r"mine\.py, line 1: running the file failed: SyntaxError"),
        ("x = 1\n\nx / 0\n", r"mine\.py, line 3: running the file failed: ZeroDivisionError"),
        ("import not_there\n", r"mine\.py, line 1: .*ModuleNotFoundError"),
        ("raise SystemExit(3)\n", r"mine\.py, line 1: .*SystemExit: 3"),
        ("x = 1\n", r"one subclass of fedsync\.tasks\.protocol\.Task is wanted, found: none"),
        (GOOD + "class Yours(Mine): pass\n", r"found: Mine, Yours"),
        (GOOD.replace("def data", "def dato"), r"making a Mine failed: TypeError.*data"),
        (
            GOOD + "    def __post_init__(self): raise KeyError(3)\n",
            r"mine\.py, line 15: making a Mine failed: KeyError",
        ),
    ],
)
def test_what_is_wrong_in_the_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_task(write(tmp_path, text), {})


def test_options_that_do_not_fit_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"class Mine: the options \['hight'\] do not fit: .*It takes \(width: .*= 3\)"
    ):
        load_task(write(tmp_path, GOOD), {"hight": 5})


def test_the_task_s_own_complaint_passes(tmp_path: Path) -> None:
    complaint = (
        "    def __post_init__(self):\n"
        "        from fedsync.core.errors import ConfigError\n"
        "        raise ConfigError('task.options.width', 'too wide', 'Narrow it')\n"
    )

    with pytest.raises(ConfigError) as caught:
        load_task(write(tmp_path, GOOD + complaint), {})

    assert caught.value.place == "task.options.width"


@pytest.mark.parametrize("name", ["no.py", "."])
def test_a_missing_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"there is no such file.*task\.file"):
        load_task(tmp_path / name, {})


def test_another_kind_of_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text(GOOD, encoding="utf-8")

    with pytest.raises(ConfigError, match=r"mine\.txt: this is not a Python file"):
        load_task(tmp_path / "mine.txt", {})
