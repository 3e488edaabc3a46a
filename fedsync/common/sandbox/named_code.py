"""Loader of the code that a run names, within the limits of the silo's owner.

The server chooses the names in a run, so a silo's owner decides what may run: the files in ``code_files`` of silo.yaml,
and named functions in them. A silo with an owner runs no code by module name. Emulated silos and the user who starts a
run have no such owner. With ``code: shipped``, the server may send any code, so files are not checked.

| a run names | at a silo with an owner |
|---|---|
| a Python file (``task.file``, ``task.app``) | runs if its owner named the file; with ``code: reviewed``, if a |
| | reviewer signed its folder |
| the maker of the first model (``task.model``) | called if its owner named ``file.py:name`` |
| a function that chooses the best version | refused: silos need none |

If an owner approves runs (``approve: ask``), files run only as approved; see `fedsync.common.sandbox.confirmed_code`.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import traceback
import zlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fedsync.common.errors import ConfigError, OwnerRefusal
from fedsync.common.sandbox.path_sandbox import ALLOWED, allowed_here, fence_here, open_data

if TYPE_CHECKING:
    from fedsync.common.sandbox.confirmed_code import Check

CONFIRMED = "FEDSYNC_CONFIRMED"
"""Environment variable of a trainer: record of its run's approval, if the silo's owner approves runs."""

_NAME = "fedsync_file_"


def function_of(name: str, key: str) -> Callable[..., Any]:
    """Return the function ``module:name``. Raises `ConfigError` if it is missing, and `OwnerRefusal` at a silo with an
    owner.
    """
    if os.environ.get(ALLOWED):
        problem = f"the run names the function {name!r}, and silos call no functions that a run names"
        raise OwnerRefusal(key, problem, "Write pooled or worst")
    module, _, function = name.partition(":")
    made: Callable[..., Any] | None = getattr(_imported(module, key), function, None)
    if not callable(made):
        raise ConfigError(key, f"{name!r} is no function", "Write def rule(pooled, silos): ...")
    return made


def run_plugin(name: str) -> None:
    """Run a strategy file's ``plugin``, a Python file or a module; raises `ConfigError` if it is missing or fails."""
    if is_module(name):
        _imported(name, "plugin")
    else:
        run_file(Path(name), "plugin")


def is_module(name: str) -> bool:
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
            remedy = "Correct the module"
        elif key == "plugin" and "." not in module:
            remedy = f"{remedy}. If it is a file beside the strategy file, write {module}.py"
        raise ConfigError(key, f"{module!r} cannot be imported: {tell(error)}", remedy) from error


def run_file(path: Path, key: str, module_name: str = "", call: str = "") -> ModuleType:
    """Run a user's file as a module, again if it was run before; the run calls the name ``call`` in it, if given.

    With the dotted ``module_name`` of a file in a package, imports start at the package's folder.

    Raises:
        ConfigError: the file is missing or fails; the error names the file and, if known, the line.
        OwnerRefusal: this process has an owner who did not name the file or confirm its content.
    """
    here = path.resolve()
    root = here.parents[module_name.count(".")]
    check = _admit(here, root, call)
    if not path.is_file():
        raise ConfigError(str(path), "there is no such file", f"Correct {key}; it is relative to the YAML file")
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
        # The loader would reopen the path, which may have changed, and run bytecode from beside the file.
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
        raise ConfigError(place_of(path, error), f"running the file failed: {tell(error)}", "Fix the file") from error
    return module


def _admit(here: Path, root: Path, call: str) -> Check | None:
    """Check that this silo's owner, if any, allows a file of code and the call of a name in it. Return the check of
    files' content, if the owner confirms content. Raises `OwnerRefusal`, also for imports from a foreign folder.
    """
    policy, approval = allowed_here(), os.environ.get(CONFIRMED)
    files, reviewers = policy.get("code_files"), policy.get("reviewers")
    if files is None:
        return None
    if reviewers is None and not any(here == Path(each.rpartition(":")[0] if ":" in each else each) for each in files):
        remedy = "Have the owner read it, then name it below code_files in silo.yaml"
        raise OwnerRefusal("task", f"this silo's owner named no code {here}", remedy)
    if call and f"{here}:{call}" not in files:
        remedy = f"Have the owner read it, then name {here}:{call} below code_files in silo.yaml"
        raise OwnerRefusal("task", f"this silo's owner did not name {call} in {here}", remedy)
    packages = [folder for folder in here.parents if folder.is_relative_to(root) and folder != root]
    if not all((folder / "__init__.py").is_file() for folder in packages):
        problem = f"{here} is named as a module of {root}, and there is no such package"
        raise OwnerRefusal("task", problem, "Name it by its path, or give each package an __init__.py")
    if reviewers is None and not approval:
        return None
    from fedsync.common.sandbox.confirmed_code import confirmed_by_approval, confirmed_by_review

    checks = [] if reviewers is None else [confirmed_by_review(root, reviewers)]
    checks += [confirmed_by_approval(Path(approval))] if approval else []

    def check(file: Path, data: bytes) -> None:
        for each in checks:
            each(file, data)

    return check


class _Neighbours:
    """Import path of the modules beside a task's file, for one folder at a time: the bare names of modules in two
    folders could be confused.
    """

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._unconfirmed: Callable[[], None] | None = None
        self._before: frozenset[str] = frozenset()

    def go_to(self, folder: Path, check: Check | None) -> None:
        """Search this absolute folder without links first, and forget the imports from the previous folder."""
        if folder != self._folder:
            self._leave()
            self._folder, self._before = folder, frozenset(sys.modules)
        self._look_elsewhere()
        sys.path.insert(0, str(folder))
        if check is not None:
            from fedsync.common.sandbox.confirmed_code import confirm_imports

            self._unconfirmed = confirm_imports(folder, check)
        # Files may have been added since the last search.
        importlib.invalidate_caches()

    def _leave(self) -> None:
        if self._folder is None:
            return
        self._look_elsewhere()
        gone = {name for name in sys.modules.keys() - self._before if self._is_beside(name)}
        for name in [name for name in sys.modules if name.partition(".")[0] in gone]:
            sys.modules.pop(name, None)

    def _look_elsewhere(self) -> None:
        if str(self._folder) in sys.path:
            sys.path.remove(str(self._folder))
        if self._unconfirmed is not None:
            self._unconfirmed()
        self._unconfirmed = None

    def _is_beside(self, name: str) -> bool:
        if "." in name or name.startswith(_NAME):
            return False
        module = sys.modules[name]
        places = getattr(module, "__path__", None) or [getattr(module, "__file__", None)]
        return any(place is not None and Path(place).parent == self._folder for place in places)


_neighbours = _Neighbours()


def place_of(path: Path, error: BaseException) -> str:
    if isinstance(error, SyntaxError) and error.filename == str(path):
        return f"{path}, line {error.lineno}"
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}, line {lines[-1]}" if lines else str(path)


def tell(error: BaseException) -> str:
    return f"{type(error).__name__}: {told(str(error))}"


def told(text: str) -> str:
    """Return a text from a user's file; hide it where the silo has an owner, because others see errors too."""
    return text if fence_here() is None else "(not told)"
