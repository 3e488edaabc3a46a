"""Code that a run names: the one place where such a name becomes code.

What a run names comes from the server, so a silo's owner says what may be run: files that ``code_files`` in silo.yaml
names, and what is called in them by name. Names of modules are no way to code where a silo has an owner. An emulated
silo has none, and neither has who starts a run: there the run's own words count. With ``code: shipped`` the server's
client runs whatever it likes, so files are not asked about.

| a run names | at a silo with an owner |
|---|---|
| a Python file (``task.file``, ``task.app``) | run, if its owner named the file; with ``code: reviewed``, if a |
| | reviewer signed its folder |
| what makes the first model (``task.model``) | called, if its owner named ``file.py:name`` |
| a function that chooses the best version | refused: silos need none |

Where an owner approves runs (``approve: ask``), files run only as they were then; see `fedsync.common.sandbox.code_review`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedsync.common.errors import ConfigError, OwnerRefusal
from fedsync.common.sandbox.path_sandbox import ALLOWED, fence_here, open_data

if TYPE_CHECKING:
    from fedsync.common.sandbox.code_review import Check

CONFIRMED = "FEDSYNC_CONFIRMED"
"""Environment variable of a trainer: the record of its run's approval, where the silo's owner approves runs."""

_NAME = "fedsync_file_"


def function_of(name: str, key: str) -> Callable[..., Any]:
    """The function that ``module:name`` means, for whoever starts a run.

    Raises:
        OwnerRefusal: this process has an owner.
        ConfigError: there is none.
    """
    if os.environ.get(ALLOWED):
        problem = f"the run names a function, {name!r}, and a silo calls none that a run names"
        raise OwnerRefusal(key, problem, "Write pooled or worst")
    module, _, function = name.partition(":")
    made: Callable[..., Any] | None = getattr(_imported(module, key), function, None)
    if not callable(made):
        raise ConfigError(key, f"{name!r} is no function", "Write def rule(pooled, silos): ...")
    return made


def run_plugin(name: str) -> None:
    """Run what a strategy file names as its ``plugin``: a Python file, or an installed module by its dotted name.

    Raises:
        ConfigError: there is none, or it does not run.
    """
    if is_module(name):
        _imported(name, "plugin")
    else:
        run_file(Path(name), "plugin")


def is_module(name: str) -> bool:
    """Whether it is the name of a module, and no path."""
    return not name.endswith(".py") and all(part.isidentifier() for part in name.split("."))


def _imported(module: str, key: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ConfigError:
        raise
    except (Exception, SystemExit) as error:
        remedy = "Install the module where the server runs, or name its folder in PYTHONPATH"
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if not missing or not f"{module}.".startswith(f"{missing}."):
            remedy = "Mend the module"
        elif key == "plugin" and "." not in module:
            remedy = f"{remedy}. If it is a file beside the strategy file, write {module}.py"
        raise ConfigError(key, f"{module!r} cannot be imported: {tell(error)}", remedy) from error


def run_file(path: Path, key: str, module_name: str = "", call: str = "") -> ModuleType:
    """Run a user's file as a module, once more if it was run before.

    Args:
        path: a Python file.
        key: of the YAML file, which names it.
        module_name: with dots, where the file belongs to a package: it then imports from the package's folder.
        call: what the run has called in it, if anything.

    Raises:
        ConfigError: no such file, or it does not run. Names the file, and the line where there is one.
        OwnerRefusal: this process has an owner, who did not name the file or confirm its content.
    """
    here = path.resolve()
    root = here.parents[module_name.count(".")]
    check = _admit(here, root, call)
    if not path.is_file():
        raise ConfigError(str(path), "there is no such file", f"Mend {key}; it is relative to the YAML file")
    name = module_name or f"{_NAME}{zlib.crc32(str(here).encode()):08x}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None:
        raise ConfigError(str(path), "this is not a Python file", "Give it a name that ends in .py")
    module = importlib.util.module_from_spec(spec)
    _neighbours.go_to(root, check)
    try:
        if module.__package__:
            importlib.import_module(module.__package__)
        # Dataclasses and pickle look up a class's module there.
        sys.modules[name] = module
        # Not by the loader, which opens whatever the path leads to by then, and runs bytecode from beside it.
        with open_data(path) as source:
            data = source.read()
        if check is not None:
            check(here, data)
        exec(compile(data, str(path), "exec"), vars(module))
    except ConfigError:
        sys.modules.pop(name, None)
        raise
    except (Exception, SystemExit) as error:
        sys.modules.pop(name, None)
        raise ConfigError(place_of(path, error), f"running the file failed: {tell(error)}", "Mend the file") from error
    return module


def _admit(here: Path, root: Path, call: str) -> Check | None:
    """See that this silo's owner, if it has one, allows a file of code, and that a name in it is called.

    Returns:
        The check of the content of each file, where the owner confirms content.

    Raises:
        OwnerRefusal: not so; or the file would import from a folder that is not its own.
    """
    text = os.environ.get(ALLOWED)
    policy = json.loads(text) if text else {}
    files, reviewers, approval = policy.get("code_files"), policy.get("reviewers"), os.environ.get(CONFIRMED)
    if files is None:
        return None
    if reviewers is None and not any(here == Path(each.rpartition(":")[0] if ":" in each else each) for each in files):
        remedy = "Have the owner name it below code_files in silo.yaml, once it was read"
        raise OwnerRefusal("task", f"this silo's owner named no code {here}", remedy)
    if call and f"{here}:{call}" not in files:
        remedy = f"Have the owner name {here}:{call} below code_files in silo.yaml, once it was read"
        raise OwnerRefusal("task", f"this silo's owner did not name {call} in {here}", remedy)
    packages = [folder for folder in here.parents if folder.is_relative_to(root) and folder != root]
    if not all((folder / "__init__.py").is_file() for folder in packages):
        problem = f"{here} is named as a module of {root}, and there is no such package"
        raise OwnerRefusal("task", problem, "Name it by its path, or give each package an __init__.py")
    if reviewers is None and not approval:
        return None
    from fedsync.common.sandbox.code_review import confirmed_by_approval, confirmed_by_review

    checks = [] if reviewers is None else [confirmed_by_review(root, reviewers)]
    checks += [confirmed_by_approval(Path(approval))] if approval else []

    def check(file: Path, data: bytes) -> None:
        for each in checks:
            each(file, data)

    return check


class _Neighbours:
    """Has the modules beside one task's file be found, those in one folder at a time.

    Modules go by their bare names, so those of two folders would be taken for each other.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._unconfirmed: Callable[[], None] | None = None
        self._before: frozenset[str] = frozenset()

    def go_to(self, folder: Path, check: Check | None) -> None:
        """Look in this folder first, and forget what was imported from the one before.

        Args:
            folder: absolute and without links.
            check: what each module in it has to pass; None for no check.
        """
        if folder != self._folder:
            self._leave()
            self._folder, self._before = folder, frozenset(sys.modules)
        self._look_elsewhere()
        sys.path.insert(0, str(folder))
        if check is not None:
            from fedsync.common.sandbox.code_review import confirm_imports

            self._unconfirmed = confirm_imports(folder, check)
        # Files may have come since somebody looked.
        importlib.invalidate_caches()

    def _leave(self) -> None:
        if self._folder is None:
            return
        self._look_elsewhere()
        gone = {name for name in sys.modules.keys() - self._before if self._is_beside(name)}
        for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
            sys.modules.pop(name, None)

    def _look_elsewhere(self) -> None:
        """Have no module be found in the folder."""
        if str(self._folder) in sys.path:
            sys.path.remove(str(self._folder))
        if self._unconfirmed is not None:
            self._unconfirmed()
        self._unconfirmed = None

    def _is_beside(self, name: str) -> bool:
        """Whether it is a module or package in the folder itself, and no task's file."""
        if "." in name or name.startswith(_NAME):
            return False
        module = sys.modules[name]
        places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
        return any(place is not None and Path(place).parent == self._folder for place in places)


_neighbours = _Neighbours()


def place_of(path: Path, error: BaseException) -> str:
    """The file and, if the error passed through it, the last line there."""
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def tell(error: BaseException) -> str:
    return f"{type(error).__name__}: {told(str(error))}"


def told(text: str) -> str:
    """Words of a file's, for whoever tries it out; where the silo has an owner, others hear of errors too."""
    return text if fence_here() is None else "(not told)"
