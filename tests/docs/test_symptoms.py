"""The messages that the pages docs/when-*.md quote are messages of the code."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").glob("when-*.md"))


def texts() -> str:
    """The pieces of text in fedsync/, with what differs from case to case cut out."""
    nodes = (node for path in (ROOT / "fedsync").rglob("*.py") for node in ast.walk(ast.parse(path.read_bytes())))
    pieces = (node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))
    return "\0".join(re.sub(r"%[\w.]+", "\0", piece) for piece in pieces)


def quoted() -> Iterator[str]:
    """The messages in the first column of each table of symptoms."""
    text = "\n".join(page.read_text(encoding="utf-8") for page in PAGES)
    for table in re.findall(r"^\| you see \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.M):
        for row in table.splitlines():
            yield from re.findall(r"`([^`]+)`", row.split(" | ")[0])


@pytest.mark.slow
def test_quoted_messages_are_in_the_code() -> None:
    whole, missing = texts(), list[str]()
    for message in quoted():
        parts = [part.strip() for part in message.split("...") if part.strip(" ,:")]
        if not parts or not all(part in whole for part in parts):
            missing.append(message)
    assert not missing
