"""Imports point one way, heavy modules load where they are used, and files stay small. Read from the source."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "fedsync").rglob("*.py"))
MAX_LINES = 420

# What each part may import of FedSync, apart from itself. None: anything.
ALLOWED: dict[str, set[str] | None] = {
    "core": set(),
    "predict": {"core"},
    "balance": {"core"},
    "barrier": {"core"},
    "aggregate": {"core"},
    "cipher": {"core"},
    "identity": {"core"},
    "tasks": {"core"},
    "train": {"core", "tasks.protocol"},
    "config": {"core", "predict", "balance", "barrier", "aggregate"},
    "observe": {"core", "config", "__init__"},
    "sim": {"core", "predict", "balance", "barrier", "aggregate", "config", "observe", "tasks", "train", "cipher"},
    "runtime": {"core", "predict", "balance", "barrier", "aggregate", "config", "observe", "tasks", "train", "cipher"}
    | {"identity", "__init__"},
    "cli": None,
    "commands": None,
    "templates": None,  # of projects of users, never imported
    "__main__": None,
    "__init__": None,
}
# What it may import besides, inside functions only.
LAZILY = {"config": {"tasks", "train", "cipher"}}

# Who may import a heavy library at all, and who may do so at the top of a file.
HEAVY: dict[str, tuple[set[str], set[str]]] = {
    "torch": ({"train", "tasks", "predict", "templates"}, {"train", "tasks", "templates"}),
    "flwr": ({"runtime"}, {"runtime"}),
    "flwr_datasets": ({"tasks"}, set()),
    "sklearn": ({"tasks"}, set()),
    "scipy": ({"tasks"}, set()),
    "pyarrow": ({"tasks"}, set()),
    "ray": ({"runtime"}, set()),
    "tenseal": ({"cipher"}, {"cipher"}),
    "matplotlib": ({"observe", "commands"}, set()),
    "statsmodels": ({"predict"}, set()),
    "tensorboardX": ({"observe"}, set()),
    "mlflow": ({"observe"}, set()),
    "prometheus_client": ({"observe"}, set()),
}


@dataclass(frozen=True)
class Import:
    """One module that a file imports; ``lazy`` inside a function, ``typing`` under TYPE_CHECKING."""

    module: str
    line: int
    lazy: bool
    typing: bool


def part_of(path: Path) -> str:
    """``core``, ``sim``... or the name of a file at the top."""
    inside = path.relative_to(ROOT / "fedsync").parts
    return inside[0] if len(inside) > 1 else inside[0].removesuffix(".py")


def imports(path: Path) -> list[Import]:
    return list(_imports(ast.parse(path.read_text(encoding="utf-8")), lazy=False, typing=False))


def _imports(node: ast.AST, *, lazy: bool, typing: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        match child:
            case ast.Import(names=names):
                for name in names:
                    yield Import(name.name, child.lineno, lazy, typing)
            case ast.ImportFrom(module=module, names=names, level=level):
                assert level == 0, f"line {child.lineno}: write imports in full"
                for name in names:
                    # `from fedsync import x` and `from fedsync.core import x` may name modules.
                    full = f"{module}.{name.name}"
                    yield Import(full if _is_module(full) else str(module), child.lineno, lazy, typing)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                for inner in child.body:
                    yield from _imports(ast.Module([inner], []), lazy=lazy, typing=True)
                for inner in child.orelse:
                    yield from _imports(ast.Module([inner], []), lazy=lazy, typing=typing)
            case _:
                function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
                yield from _imports(child, lazy=lazy or function, typing=typing)


def _is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


def own(module: str) -> str | None:
    """``core.errors`` of ``fedsync.core.errors``; ``__init__`` of ``fedsync``; None of anything else."""
    if module == "fedsync":
        return "__init__"
    return module.removeprefix("fedsync.") if module.startswith("fedsync.") else None


def permitted(inside: str, part: str, allowed: set[str]) -> bool:
    return any(inside == name or inside.startswith(f"{name}.") for name in {part, *allowed})


every_file = pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))


def test_the_rules_cover_every_part_and_the_reader_sees_imports() -> None:
    assert {part_of(path) for path in FILES} <= ALLOWED.keys()
    seen = {(i.module, i.lazy) for i in imports(ROOT / "fedsync" / "config" / "tasks.py") if not i.typing}
    assert ("fedsync.tasks.digits", True) in seen
    assert ("fedsync.config.section", False) in seen
    assert ("fedsync.tasks.protocol", False) not in seen, "that one is for type checkers"


@every_file
def test_imports_of_fedsync_point_one_way(path: Path) -> None:
    part = part_of(path)
    allowed = ALLOWED[part]
    if allowed is None:
        return
    for found in imports(path):
        inside = own(found.module)
        if inside is None or found.typing:
            continue
        more = LAZILY.get(part, set()) if found.lazy else set()
        assert permitted(inside, part, allowed | more), f"line {found.line}: {part} must not import {found.module}"


@every_file
def test_heavy_modules_are_imported_where_they_belong(path: Path) -> None:
    part = part_of(path)
    for found in imports(path):
        library = found.module.split(".")[0]
        if library not in HEAVY or found.typing:
            continue
        anywhere, at_the_top = HEAVY[library]
        assert part in anywhere, f"line {found.line}: {part} must not import {library}"
        assert found.lazy or part in at_the_top, f"line {found.line}: import {library} inside the function"


@pytest.mark.parametrize(
    "path", [path for path in FILES if part_of(path) == "core"], ids=lambda path: str(path.relative_to(ROOT))
)
def test_core_needs_numpy_and_nothing_else(path: Path) -> None:
    for found in imports(path):
        library = found.module.split(".")[0]
        assert library in {"fedsync", "numpy", *sys.stdlib_module_names}, f"line {found.line}: {library}"


@every_file
def test_files_stay_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= MAX_LINES


@pytest.mark.parametrize("path", sorted(ROOT.glob("strategies/**/*.yaml")), ids=lambda path: path.name)
def test_no_file_names_an_import_path(path: Path) -> None:
    """A configuration chooses among registered kinds; it never names code."""
    assert "fedsync." not in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "statement",
    [
        "import fedsync",
        "from fedsync import StrategyConfig, ClusterConfig, ConfigError, replay",
        "from fedsync.config.strategy import StrategyConfig; StrategyConfig.load('lb-bsp').policies()",
        "import fedsync.sim.engine",
        "import fedsync.cli",
        "import fedsync.runtime.supervise",
    ],
)
def test_light_things_load_no_heavy_module(statement: str) -> None:
    if "cli" in statement and importlib.util.find_spec("fedsync.cli") is None:
        pytest.skip("there is no command line yet")
    heavy = [*HEAVY, "pandas", "grpc"]
    code = f"{statement}\nimport sys\nprint(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == []
