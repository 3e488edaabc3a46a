"""Imports point one way and never in a circle, heavy modules load where they are used, and names are given once.

All of it is read from the source. One test looks at every file: what it finds is a list, shown whole.
"""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from bench.cost.house import folder_sizes, names_twice

ROOT = Path(__file__).resolve().parents[1]
FILES = sorted((ROOT / "fedsync").rglob("*.py"))
MAX_LINES = 420
MOST_FILES = 20

# From below: a part may import what lies in the rows under its own.
LAYERS = (
    {"common"},
    {"core"},
    {"model"},
    {"evaluation"},
    {"policies", "cipher", "identity", "privacy"},
    {"tasks", "client", "train", "transport"},
    {"config"},
    {"observe"},
    {"silo"},
    {"server"},
    {"flower", "simulation"},
    {"ops"},
    {"extras"},
    {"commands"},
    {"cli"},
)
# What parts of one row may import of each other.
BESIDE = {
    # The coordinator keeps scores of versions and asks for the last evaluations itself: no extensions yet.
    "core": {
        *("evaluation.final_evaluation", "evaluation.local_baselines"),
        *("evaluation.metric_votes", "evaluation.metrics.metric_types", "evaluation.version_scores"),
    },
    "train": {"tasks.task_protocol", "tasks.metrics", "client"},
}
# Rooms of `extras`, and who may load them, on demand; `policies.schema` and `zipline` name the others in tables.
DOORS = {
    "code_review": {"commands/__init__.py"},
    "cross_site": {"observe/recorder.py", "silo/session/session.py", "commands/__init__.py"},
    "doctor": {"commands/__init__.py"},
    "exporters": {"observe/run_builder.py", "commands/__init__.py"},
    "new_project": {"commands/__init__.py"},
    "page": {"commands/__init__.py"},
    "papers": {"cli.py"},
    "privacy_plan": {"cli.py", "commands/validate.py"},
    "report": {"commands/__init__.py"},
    "surveys": {"config/tasks/survival_task.py", "silo/session/session.py", "cli.py"},
    "survival": {"config/tasks/task_kinds.py", "config/tasks/survival_task.py", "commands/__init__.py"},
    "tracing": {"observe/run_builder.py", "cipher/server/sealed_aggregator.py", "commands/__init__.py"},
    "tuning": {"commands/__init__.py"},
    "watch": {"commands/__init__.py"},
    "relays": {
        *("server/nodes.py", "server/outbox.py", "cipher/server/inbox.py", "cipher/server/sealed_aggregator.py"),
        *("flower/server_app.py", "silo/agent/answers.py", "ops/start.py"),
    },
}
# These are for users, who may import anything.
OPEN = {"__init__", "__main__"}

# Who may import a heavy library at all, and who may do so at the top of a file.
HEAVY: dict[str, tuple[set[str], set[str]]] = {
    "torch": ({"client", "train", "tasks", "policies", "extras"}, {"client", "train", "tasks", "extras"}),
    "flwr": ({"flower"}, {"flower"}),
    "flwr_datasets": ({"tasks"}, set()),
    # Files of `client` that wear a library's name are imported by those who have it.
    "sklearn": ({"tasks", "client", "extras"}, {"client"}),
    "lightning": ({"client"}, {"client"}),
    "transformers": ({"client"}, {"client"}),
    "keras": ({"client"}, {"client"}),
    "scipy": ({"tasks", "extras"}, set()),
    "pyarrow": ({"extras"}, set()),
    "ray": ({"flower"}, set()),
    "tenseal": ({"cipher"}, {"cipher"}),
    "starlette": ({"transport", "extras"}, {"transport", "extras"}),
    "uvicorn": ({"transport", "silo", "extras"}, {"transport", "silo", "extras"}),
    "httpx": ({"transport", "silo"}, {"transport", "silo"}),
    "matplotlib": ({"extras"}, set()),
    "pandas": ({"tasks", "extras"}, {"tasks", "extras"}),
    "statsmodels": ({"extras"}, set()),
    "dp_accounting": ({"privacy"}, set()),
    "opacus": ({"train"}, {"train"}),
    "tensorboardX": ({"extras"}, set()),
    "mlflow": ({"extras"}, set()),
    "prometheus_client": ({"extras"}, set()),
}

# The one other file that may: it hosts a user's Flower app, and is imported where there is one.
FLOWER_GUEST = "fedsync/train/guests/guest_clientapp.py"

# Modules that Flower documents for users, who may import what `__all__` lists there, and nothing beside.
DOCUMENTED = {
    "flwr.app",
    "flwr.clientapp",
    "flwr.common",
    "flwr.serverapp",
    "flwr.serverapp.strategy",
    "flwr.simulation",
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


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports(path: Path) -> tuple[Import, ...]:
    return tuple(_imports(parsed(path), lazy=False, typing=False))


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
    """``core.errors`` of ``fedsync.common.errors``; ``__init__`` of ``fedsync``; None of anything else."""
    if module == "fedsync":
        return "__init__"
    return module.removeprefix("fedsync.") if module.startswith("fedsync.") else None


def permitted(path: Path, found: Import, inside: str) -> bool:
    """Whether a file may import the module ``inside``."""
    part = part_of(path)
    if inside.startswith("extras.") and part != "extras":
        hosts = DOORS.get(inside.split(".")[1], set())
        return (found.lazy or found.typing) and str(path.relative_to(ROOT / "fedsync")) in hosts
    rows = {name: row for row, names in enumerate(LAYERS) for name in names}
    wanted = inside.partition(".")[0]
    if wanted in (part, "__init__"):  # `fedsync` itself has the version and little else
        return True
    beside = any(inside == one or inside.startswith(f"{one}.") for one in BESIDE.get(part, ()))
    return beside or (wanted in rows and rows[wanted] < rows[part])


def circles(graph: Mapping[str, Iterable[str]]) -> list[set[str]]:
    """Strongly connected components of more than one node, by Tarjan's algorithm."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[set[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for following in graph.get(node, ()):
            if following not in index:
                visit(following)
                low[node] = min(low[node], low[following])
            elif following in stack:
                low[node] = min(low[node], index[following])
        if low[node] == index[node]:
            place = stack.index(node)
            component = set(stack[place:])
            del stack[place:]
            if len(component) > 1:
                found.append(component)

    for node in graph:
        if node not in index:
            visit(node)
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def test_the_rules_cover_every_part_and_the_reader_sees_imports() -> None:
    assert {part_of(path) for path in FILES} <= set.union(*LAYERS) | OPEN
    seen = {
        (i.module, i.lazy) for i in imports(ROOT / "fedsync" / "config" / "tasks" / "task_kinds.py") if not i.typing
    }
    assert ("fedsync.tasks.custom", True) in seen
    assert ("fedsync.config.sections.section", False) in seen
    assert ("fedsync.tasks.task_protocol", False) not in seen, "that one is for type checkers"


@pytest.mark.slow
def test_imports_of_fedsync_point_one_way() -> None:
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line}: {part_of(path)} must not import {found.module}"
        for path in FILES
        if part_of(path) not in OPEN
        for found in imports(path)
        if (inside := own(found.module)) is not None and not permitted(path, found, inside)
    ]
    assert not wrong, "\n".join(wrong)


def test_no_imports_go_in_a_circle() -> None:
    """Those inside functions and those for type checkers count too: who reads a file reads them."""
    graph = {name_of(path): {found.module for found in imports(path)} - {"fedsync"} for path in FILES}
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}) == [{"a", "b", "c"}]
    assert circles(graph) == []


def test_heavy_modules_are_imported_where_they_belong() -> None:
    wrong = []
    for path in FILES:
        for found in imports(path):
            library, part = found.module.split(".")[0], part_of(path)
            guest = library == "flwr" and path == ROOT / FLOWER_GUEST
            if library in HEAVY and not found.typing and not guest:
                anywhere, at_the_top = HEAVY[library]
                if part not in anywhere or not (found.lazy or part in at_the_top):
                    wrong.append(f"{path.relative_to(ROOT)}:{found.line}: {library}")
    assert not wrong, "\n".join(wrong)
    guest = FLOWER_GUEST.removesuffix(".py").replace("/", ".")
    hosts = {(path.name, found.lazy) for path in FILES for found in imports(path) if found.module == guest}
    assert hosts == {("clientapp_task.py", True), ("site_evaluation.py", True)}, "loaded on demand"


def undocumented(program: ast.Module) -> list[str]:
    """What a program uses of Flower that is not documented: ``line: name``, by imports and by names in strings."""
    found = []
    for node in ast.walk(program):
        match node:
            case ast.Import(names=names):
                wrong = [name.name for name in names if of_flower(name.name) and name.name not in DOCUMENTED]
            case ast.ImportFrom(module=str(module), names=names) if of_flower(module):
                there = set(importlib.import_module(module).__all__) if module in DOCUMENTED else set()
                wrong = [f"{module}.{name.name}" for name in names if name.name not in there]
            # For `import_module`, `find_spec`, patches and the like; a logger below Flower's is a name and no module.
            case ast.Constant(value=str(value)) if re.fullmatch(r"flwr(\.\w+)+([:.]\w+)?", value):
                wrong = [] if value in {*DOCUMENTED, "flwr.fedsync"} else [value]
            case _:
                continue
        found += [f"{node.lineno}: {name}" for name in wrong]
    return found


def of_flower(module: str) -> bool:
    return module.partition(".")[0] == "flwr"


@pytest.mark.slow
def test_only_what_flower_documents_is_used_of_it() -> None:
    """A stock release, and the next one, may change all else."""
    files = [path for folder in ("fedsync", "server", "client") for path in sorted((ROOT / folder).rglob("*.py"))]
    wrong = {str(path.relative_to(ROOT)): undocumented(parsed(path)) for path in files}
    assert wrong.pop(FLOWER_GUEST) == ["26: flwr.app.message.make_message"], "the one exception, and no more of it"
    assert {name: found for name, found in wrong.items() if found} == {}


@pytest.mark.parametrize(
    "statement",
    [
        "import flwr",
        "import flwr.proto.control_pb2",
        "from flwr.app import user_config",
        "from flwr.supercore.auth import x",
        "from flwr.common import logger",
        "importlib.import_module('flwr.server.superlink')",
        "patch('flwr.app.Message', None)",
    ],
)
def test_what_flower_does_not_document_is_found(statement: str) -> None:
    assert len(undocumented(ast.parse(f"def late():\n    {statement}"))) == 1


def test_core_and_common_need_little() -> None:
    known = {"core": {"fedsync", "numpy"}, "common": {"fedsync", "numpy", "psutil", "cryptography"}}
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line}: {found.module}"
        for path in FILES
        for found in imports(path)
        if part_of(path) in known
        and found.module.split(".")[0] not in {*known[part_of(path)], *sys.stdlib_module_names}
    ]
    assert not wrong, "\n".join(wrong)


def test_files_stay_small() -> None:
    lengths = {str(path.relative_to(ROOT)): len(path.read_text(encoding="utf-8").splitlines()) for path in FILES}
    assert {name: lines for name, lines in lengths.items() if lines > MAX_LINES} == {}


def test_folders_stay_small_and_no_file_has_the_name_of_another() -> None:
    assert {folder: count for folder, count in folder_sizes(FILES).items() if count > MOST_FILES} == {}
    assert names_twice(FILES) == set()


@pytest.mark.slow
def test_no_class_has_the_name_of_another() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in FILES:
        if "templates" not in path.parts:  # files of users' projects
            for node in ast.walk(parsed(path)):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(str(path.relative_to(ROOT)))
    assert {name: found for name, found in places.items() if len(found) > 1} == {}


def test_no_strategy_names_an_import_path() -> None:
    """A configuration chooses among registered kinds; it never names code."""
    named = [path.name for path in ROOT.glob("strategies/**/*.yaml") if "fedsync." in path.read_text(encoding="utf-8")]
    assert named == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "statement",
    [
        "import fedsync",
        "from fedsync import StrategyConfig, ClusterConfig, ConfigError, replay",
        "from fedsync.config.strategy import StrategyConfig; StrategyConfig.load('lb-bsp').policies()",
        "import fedsync.simulation.engine",
        "import fedsync.cli",
        "import fedsync.ops.start",
        "import fedsync.ops.local",
        "import numpy; from fedsync.tasks.partition import Iid; Iid().split(numpy.zeros(9, int), 2, seed=1)",
    ],
)
def test_light_things_load_no_heavy_module(statement: str) -> None:
    assert loaded(statement) == set()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "more"), [("fedsync.flower.server_app", {"uvicorn", "starlette"}), ("fedsync.flower.client_app", set())]
)
def test_flowers_processes_answer_before_torch_is_there(module: str, more: set[str]) -> None:
    """The client's comes for every message, and has no server; flwr itself brings httpx."""
    assert loaded(f"import {module}") == {"flwr", "grpc", "httpx", *more}


def loaded(statement: str) -> set[str]:
    """Heavy modules that it loads."""
    heavy = [*HEAVY, "pandas", "grpc"]
    code = f"{statement}\nimport sys\nprint(*[name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.slow
def test_extras_are_loaded_where_they_are_chosen_and_nowhere_else() -> None:
    found = {
        (room, str(path.relative_to(ROOT / "fedsync")))
        for path in FILES
        if part_of(path) != "extras"
        for found in imports(path)
        for room in re.findall(r"^fedsync\.extras\.(\w+)", found.module)
    }
    assert found == {(room, host) for room, hosts in DOORS.items() for host in hosts}, "no door that nobody uses"
    code = (
        "import sys\nfrom fedsync.config.strategy import StrategyConfig\n"
        "for name, more in (('lb-bsp', []), ('elastic', []), ('lb-bsp', ['predictor={kind: arima}'])):\n"
        "    StrategyConfig.load(name, more).policies()\n"
        "    print(sorted(each for each in sys.modules if each.startswith('fedsync.extras.')))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    nothing, still, chosen = done.stdout.splitlines()
    assert (nothing, still) == ("[]", "[]") and "fedsync.extras.predictors.arima" in chosen and "rnn" not in chosen
