"""Every call in FedSync's own files, for rules that no call may break."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FILES = [path for path in sorted((ROOT / "fedsync").rglob("*.py")) if "templates" not in path.parts]


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def where(path: Path, node: ast.AST) -> str:
    return f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"


def calls() -> Iterator[tuple[Path, str, ast.Call]]:
    """File, name of what is called, and the call."""
    for path in FILES:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.Call):
                yield path, ast.unparse(node.func), node
