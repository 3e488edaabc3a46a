"""A lying server's runs: whose code a silo imports and calls. The gain is a file that this code writes.

No value from the wire names code: a silo runs what is installed, and the files that its owner named.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Any

import pytest

from fedsync.silo.protocol import Describe
from tests.attacks.adversary import Federation
from tests.attacks.call_sites import ROOT, calls, where
from tests.attacks.conftest import Make


def planted(folder: Path, name: str) -> Path:
    """A Python file that lies there for other reasons, and does something when it is run, and more when called."""
    file = folder / f"{name}.py"
    file.write_text(
        "from pathlib import Path\n"
        "from fedsync.client.app import SiloApp\n"
        f"done = Path({str(folder / 'done')!r})\n"
        "done.touch()\n"
        "app = SiloApp()\n"
        "def wipe(*any):\n"
        "    done.with_name('called').touch()\n"
    )
    return file


def gained(federation: Federation, folder: Path, task: dict[str, Any] | None = None, **changes: Any) -> set[str]:
    """What the code did at a silo that is asked to begin such a run."""
    owner = changes.pop("owner", {"data": [str(folder), str(federation.root / "data")]})
    spec = federation.spec("code", **({} if task is None else {"task": task}), **changes)
    federation.silo("silo-a", spec, **owner).ask(Describe())
    return {path.name for path in folder.glob("done")} | {path.name for path in folder.glob("called")}


def test_a_rule_for_the_best_is_no_module(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any installed module was imported, and any name in it was what a silo called at each version."""
    planted(tmp_path, "fedsync_planted")
    monkeypatch.syspath_prepend(str(tmp_path))
    best = {"best": {"by": "fedsync_planted:wipe"}}
    assert not gained(make(), tmp_path, evaluation=best)
    assert "fedsync_planted" not in sys.modules


def test_a_file_among_the_data_is_no_task(make: Make, tmp_path: Path) -> None:
    file = planted(tmp_path, "backup")
    for task in (
        {"kind": "custom", "file": str(file)},
        {"kind": "silo-app", "file": str(file)},
        {"kind": "clientapp", "app": f"{file}:app", "model": f"{file}:wipe"},
        {"kind": "clientapp", "app": "backup:app", "model": "backup:wipe", "folder": str(tmp_path)},
    ):
        assert not gained(make(), tmp_path, task), task


def test_in_a_file_that_the_owner_named_nothing_else_is_called(
    make: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A ClientApp's file has other functions; what makes its model is named by the owner, too."""
    file = planted(tmp_path, "client")
    owner = {"data": [str(tmp_path)], "code_files": [str(file), f"{file}:app"]}
    task = {"kind": "clientapp", "app": f"{file}:app", "model": f"{file}:wipe"}
    assert not gained(make(), tmp_path, task, owner=owner)
    assert "did not name wipe" in caplog.text


def test_an_owners_file_is_looked_up_in_no_other_folder(make: Make, tmp_path: Path) -> None:
    """As a module of a package that is none, it would import what lies among the data above it."""
    (tmp_path / "apps").mkdir()
    (tmp_path / "apps" / "client.py").write_text("import fedsync_planted\n")
    planted(tmp_path, "fedsync_planted")
    owner = {"data": [str(tmp_path)], "code_files": [str(tmp_path / "apps" / "client.py")]}
    task = {"kind": "clientapp", "app": "apps.client:app", "folder": str(tmp_path)}
    assert not gained(make(), tmp_path, task, owner=owner)


def test_what_the_owner_named_runs(make: Make, tmp_path: Path) -> None:
    file = planted(tmp_path, "mine")
    owner = {"data": [str(tmp_path)], "code_files": [str(file)]}
    assert gained(make(), tmp_path, {"kind": "silo-app", "file": str(file)}, owner=owner) == {"done"}


# Who may import by a name that is no constant, and why.
IMPORTERS = {
    "fedsync/__init__.py": "names of a table of its own",
    "fedsync/common/sandbox/named_code.py": "the resolver, which asks the owner",
    "fedsync/common/sandbox/confirmed_code.py": "modules of the resolver's folder, as source that was confirmed",
    "fedsync/common/fork_server.py": "the modules of its own command line",
    "fedsync/core/extension.py": "features of a table of its own",
    "fedsync/flower/flwr_calls.py": "Flower's own command",
    "fedsync/flower/launch.py": "Flower's own programs, as the supervisor names them",
    "fedsync/policies/schema.py": "packages of a table of its own",
}
IMPORTS = {
    "import_module", "__import__", "resolve_name", "spec_from_file_location", "module_from_spec", "exec_module",
    "load_module", "run_module", "run_path", "exec", "eval", "compile", "SourceFileLoader", "walk_packages",
    "entry_points", "import_string", "locate_class",
}  # fmt: skip


@pytest.mark.slow
def test_nothing_else_imports_by_a_name() -> None:
    found = set()
    for path, called, call in calls():
        constant = bool(call.args) and isinstance(call.args[0], ast.Constant)
        elsewhere = called in ("re.compile", "torch.compile") or called.endswith(".eval")
        if called.rpartition(".")[2] in IMPORTS and not constant and not elsewhere:
            found.add(str(path.relative_to(ROOT)))
        # As a value, for somebody else to call.
        if any(ast.unparse(each) in ("import_module", "importlib.import_module") for each in call.args):
            args = next((key.value for key in call.keywords if key.arg == "args"), None)
            assert isinstance(args, ast.List) and all(isinstance(each, ast.Constant) for each in args.elts), path
    assert found == IMPORTERS.keys()


@pytest.mark.slow
def test_nothing_is_unpickled_but_by_those_that_look_at_each_name() -> None:
    wrong = []
    for path, called, call in calls():
        given = {key.arg: ast.unparse(key.value) for key in call.keywords}
        unsafe = called == "torch.load" and given.get("weights_only") != "True"
        unsafe |= called in ("np.load", "numpy.load") and given.get("allow_pickle", "False") != "False"
        unsafe |= called in ("pickle.load", "pickle.loads", "pickle.Unpickler", "marshal.loads", "shelve.open")
        unsafe |= called.startswith(("joblib.", "cloudpickle.", "dill."))
        unsafe |= called == "yaml.load" and given.get("Loader") != "_Loader"
        if unsafe:
            wrong.append(f"{where(path, call)}: {called}")
    assert not wrong, "\n".join(wrong)
