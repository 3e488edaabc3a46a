"""Runs with results, and what a page says."""

import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from fedsync.extras.report.data import RunData, read_run
from tests.observe.evaluations import add_results
from tests.observe.runs import two_silos

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Fails on tags that do not nest; keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.attributes.append((tag, named))
        if "id" in named:
            self.ids.append(named["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [named for name, named in self.attributes if name == tag]


def said(text: str) -> str:
    """The words of a page, in one line."""
    return " ".join(" ".join(Reader(text).words).replace("\u00a0", " ").split())


def told(folder: Path, silos: list[str], metrics: dict[str, bool] | None = None) -> RunData:
    """A run whose results are those of made-up silos."""
    two_silos(folder)
    add_results(folder, silos, metrics)
    return read_run(folder)


def change_json(path: Path, change: Callable[[Any], object]) -> None:
    """Change the value of a JSON file in place."""
    value = json.loads(path.read_text())
    change(value)
    path.write_text(json.dumps(value))


def change_header(folder: Path, change: Callable[[Any], object]) -> None:
    """Change the header of a run's journal in place."""
    header, *lines = (folder / "journal.jsonl").read_text().splitlines()
    changed = json.loads(header)
    change(changed)
    (folder / "journal.jsonl").write_text("\n".join([json.dumps(changed), *lines]) + "\n")
