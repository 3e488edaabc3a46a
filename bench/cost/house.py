"""Size of the source: lines, code, docstrings, largest folder, files of one name, and modules in circular imports.

*Code* excludes docstrings, comments, blank lines and imports. `tests/test_house.py` fails if a number grows.
"""

from __future__ import annotations

import argparse
import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.common import print_table, write_json

ROOT = Path(__file__).resolve().parents[2]
_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


@dataclass(frozen=True)
class Size:
    """Size of a folder of Python files; all counts are lines but the last two, which are files."""

    lines: int
    code: int
    docstrings: int
    largest_folder: int
    names_twice: int


def measure(files: Iterable[Path]) -> Size:
    """Count lines of files, files of a folder, and names of several files."""
    lines = code = docstrings = 0
    files = list(files)
    for path in files:
        text = path.read_text(encoding="utf-8")
        words, imports = _docstrings_and_imports(ast.parse(text))
        lines += text.count("\n")
        docstrings += len(words)
        code += len(_written(text) - words - imports)
    return Size(lines, code, docstrings, max(folder_sizes(files).values()), len(names_twice(files)))


def folder_sizes(files: Iterable[Path]) -> Counter[Path]:
    """Number of files in each folder."""
    return Counter(path.parent for path in files)


def names_twice(files: Iterable[Path]) -> set[str]:
    """Names of several files; ``__init__.py`` and project templates do not count."""
    counts = Counter(path.name for path in files if path.name != "__init__.py" and "templates" not in path.parts)
    return {name for name, count in counts.items() if count > 1}


def _docstrings_and_imports(tree: ast.AST) -> tuple[set[int], set[int]]:
    words, imports = set[int](), set[int]()
    for node in ast.walk(tree):
        match node:
            case ast.Expr(value=ast.Constant(value=str())):
                words.update(range(node.lineno, (node.end_lineno or 0) + 1))
            case ast.Import() | ast.ImportFrom():
                imports.update(range(node.lineno, (node.end_lineno or 0) + 1))
    return words, imports


def _written(text: str) -> set[int]:
    """Numbers of lines that have more than blanks and comments."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    return {line for each in tokens if each.type not in _NO_CODE for line in range(each.start[0], each.end[0] + 1)}


def house() -> dict[str, Size]:
    """Sizes of ``fedsync`` without extras, of its extras, of the tests and of the benchmarks."""
    own = sorted((ROOT / "fedsync").rglob("*.py"))
    extras = [path for path in own if "extras" in path.parts]
    parts = {"fedsync": [path for path in own if path not in set(extras)], "fedsync/extras": extras}
    parts |= {name: sorted((ROOT / name).rglob("*.py")) for name in ("tests", "bench")}
    return {name: measure(files) for name, files in parts.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, help="JSON file")
    options = parser.parse_args()
    found = house()
    columns = ["part", "lines", "code", "docstrings", "share", "largest folder", "names twice"]
    rows = [
        [name, size.lines, size.code, size.docstrings, f"{size.docstrings / size.lines:.0%}", size.largest_folder,
         size.names_twice]
        for name, size in found.items()
    ]  # fmt: skip
    print_table("size of the house", columns, rows)
    if options.out is not None:
        write_json(options.out, {name: asdict(size) for name, size in found.items()})


if __name__ == "__main__":
    main()
