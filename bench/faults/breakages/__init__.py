"""Lists of small breakages, by what they break; `bench/faults/mutants.py` makes them and sees which tests notice.

A list is a module of this package, the *suite* of its name: `MUTANTS`, and `TESTS`, the arguments of pytest for the
tests that are to notice.
"""

from __future__ import annotations

import importlib
import pkgutil
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One small change of the code that somebody would suffer from.

    Args:
        name: says what a user would suffer; unique in all lists.
        file: from the repository's folder.
        before: text that occurs exactly once in the file.
        after: what it becomes.
        equivalent: if no test can see it: why. It counts as a survivor nevertheless.
    """

    name: str
    file: str
    before: str
    after: str
    equivalent: str = ""

    def source(self, root: Path = ROOT) -> str:
        """The file's text with the change.

        Raises:
            ValueError: the list has grown old: the text is not there, or more than once, or is no Python afterwards.
        """
        text = (root / self.file).read_text(encoding="utf-8")
        if text.count(self.before) != 1:
            raise ValueError(f"{self.name}: {self.before!r} occurs {text.count(self.before)} times in {self.file}")
        changed = text.replace(self.before, self.after)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise ValueError(f"{self.name}: {self.file} is no Python any more: {error}") from error
        return changed

    def lines(self, root: Path = ROOT) -> range:
        """Numbers of the lines that it changes, from 1, in the file as it is."""
        text = (root / self.file).read_text(encoding="utf-8")
        first = text[: text.index(self.before)].count("\n") + 1
        return range(first, first + self.before.rstrip("\n").count("\n") + 1)


@dataclass(frozen=True, slots=True)
class Suite:
    """What a module of this package holds."""

    mutants: tuple[Mutant, ...]
    tests: tuple[str, ...]


def suites() -> dict[str, Suite]:
    """Every list, by the name of its module."""
    found = {}
    for module in pkgutil.iter_modules(__path__):
        if module.name.startswith("_"):
            continue  # a part of a list
        loaded = importlib.import_module(f"{__name__}.{module.name}")
        found[module.name] = Suite(loaded.MUTANTS, loaded.TESTS)
    return found
