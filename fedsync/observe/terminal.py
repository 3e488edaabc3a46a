"""Terminals on which foreign text is text: no markup, no terminal commands, no line breaks of its own."""

from __future__ import annotations

import sys
from typing import Any

import typer
from rich.console import Console
from rich.progress import Task, TextColumn
from rich.text import Text

from fedsync.common.foreign import MOST_CHARACTERS, shown

_PIPE_WIDTH = 120


class Terminal(Console):
    """Rich's console, on which every string is one line of plain text; `words` makes those that have a style.

    Args:
        stderr: write there.
        width: in characters; by default a terminal's own, and 120 in a pipe.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout  # None where it is closed
        piped = (stream is None or not stream.isatty()) and "file" not in options
        width = _PIPE_WIDTH if width is None and piped else width
        super().__init__(stderr=stderr, width=width, markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """All strings come through here, those in tables too."""
        return super().render_str(shown(text), **{**options, "markup": False, "emoji": False})


def words(text: object, style: str = "") -> Text:
    """A styled line."""
    return Text(shown(text), style=style)


class WordsColumn(TextColumn):
    """A column of a progress bar, as ``{task.description}``."""

    def render(self, task: Task) -> Text:
        return words(self.text_format.format(task=task), str(self.style))


def say(*lines: object, err: bool = False, most: int | None = MOST_CHARACTERS) -> None:
    """Print lines, each of at most ``most`` characters of text."""
    for line in lines:
        typer.echo(shown(line, most), err=err)
