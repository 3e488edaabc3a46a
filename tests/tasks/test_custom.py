import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from textwrap import dedent

import pytest

from fedsync.common.errors import ConfigError
from fedsync.tasks.custom import load_task
from fedsync.tasks.task_protocol import SiloSlot, Task

GOOD = """\
from __future__ import annotations
from dataclasses import dataclass
from torch import nn
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task

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


def test_a_task_is_made_with_its_options_and_pickles(tmp_path: Path) -> None:
    task = load_task(write(tmp_path, GOOD), {"width": 5})
    assert isinstance(task, Task)
    assert task.model().in_features == 5
    assert pickle.loads(pickle.dumps(task)) == task


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
        ("x = 1\n", r"one subclass of fedsync\.tasks\.task_protocol\.Task is expected, found: none"),
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
        "        from fedsync.common.errors import ConfigError\n"
        "        raise ConfigError('task.options.width', 'too wide', 'Narrow it')\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_task(write(tmp_path, GOOD + complaint), {})
    assert caught.value.place == "task.options.width"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.py", r"there is no such file.*task\.file"),
        (".", r"there is no such file.*task\.file"),
        ("mine.txt", r"mine\.txt: this is not a Python file"),
    ],
)
def test_another_kind_of_file_is_named(tmp_path: Path, name: str, message: str) -> None:
    (tmp_path / "mine.txt").write_text(GOOD, encoding="utf-8")
    with pytest.raises(ConfigError, match=message):
        load_task(tmp_path / name, {})


BESIDE = """\
from my_model import Net
from my_package.part import SCALE
from fedsync.tasks.task_protocol import SiloData, SiloSlot, Task

class Mine(Task):
    def __init__(self, early: bool = False) -> None:
        if early:
            self.data(None)

    def model(self):
        return Net()

    def data(self, slot):
        from my_data import load
        return load() * SCALE
"""
SLOT = SiloSlot("a", 0, 1, 7)


@pytest.fixture
def _modules_go() -> Iterator[None]:
    """What tests import from their folders does not outlast them."""
    modules, path = set(sys.modules), list(sys.path)
    yield
    sys.path[:] = path
    for name in sys.modules.keys() - modules:
        if name.partition(".")[0] in ("my_model", "my_package", "my_data"):
            del sys.modules[name]


def write_with_neighbours(folder: Path, width: int) -> Path:
    """A task whose model has this many outputs, and whose data are ten times this number."""
    (folder / "my_package").mkdir(parents=True)
    (folder / "my_package" / "__init__.py").touch()
    (folder / "my_package" / "part.py").write_text("SCALE = 10\n", encoding="utf-8")
    model = f"""\
    from torch import nn

    class Net(nn.Linear):
        def __init__(self):
            super().__init__(4, {width})
    """
    (folder / "my_model.py").write_text(dedent(model), encoding="utf-8")
    (folder / "my_data.py").write_text(f"def load():\n    return {width}\n", encoding="utf-8")
    return write(folder, BESIDE)


@pytest.mark.usefixtures("_modules_go")
def test_tasks_with_modules_of_one_name_do_not_get_each_others(tmp_path: Path) -> None:
    first = load_task(write_with_neighbours(tmp_path / "a", 3), {"early": True})
    second = load_task(write_with_neighbours(tmp_path / "b", 5), {})
    assert (first.model().out_features, second.model().out_features) == (3, 5)
    assert second.data(SLOT) == 50, "what the first task imported has another place"
    assert pickle.loads(pickle.dumps(second.model())).out_features == 5
    again = load_task(tmp_path / "a" / "mine.py", {})
    assert (again.model().out_features, again.data(SLOT)) == (3, 30)
    assert sys.path.count(str(tmp_path / "a")) == 1 and str(tmp_path / "b") not in sys.path


@pytest.mark.usefixtures("_modules_go")
def test_what_the_process_had_imported_itself_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_with_neighbours(tmp_path / "a", 3)
    with monkeypatch.context() as patch:
        patch.syspath_prepend(tmp_path / "a")
        import my_model  # type: ignore[import-not-found]  # written above
    load_task(path, {})
    load_task(write_with_neighbours(tmp_path / "b", 5), {})
    assert sys.modules["my_model"] is my_model
