"""Terminal output that is safe for foreign text: no markup, no terminal commands, no embedded line breaks."""

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
    """Rich console that prints every string as one line of plain text; `words` makes styled text."""

    def __init__(self, *, stderr: bool = False, width: int | None = None, **options: Any) -> None:
        stream = sys.stderr if stderr else sys.stdout  # None where the stream is closed
        piped = (stream is None or not stream.isatty()) and "file" not in options
        width = _PIPE_WIDTH if width is None and piped else width
        super().__init__(stderr=stderr, width=width, markup=False, highlight=False, emoji=False, **options)

    def render_str(self, text: str, **options: Any) -> Text:
        """Escape a string; Rich renders all strings through this method, also strings in tables."""
        return super().render_str(shown(text), **{**options, "markup": False, "emoji": False})


def words(text: object, style: str = "", **options: Any) -> Text:
    return Text(shown(text), style=style, **options)


class WordsColumn(TextColumn):
    """Column of a progress bar with escaped text, from a format such as ``{task.description}``."""

    def render(self, task: Task) -> Text:
        return words(self.text_format.format(task=task), str(self.style))


def say(*lines: object, err: bool = False, most: int | None = MOST_CHARACTERS) -> None:
    for line in lines:
        typer.echo(shown(line, most), err=err)
