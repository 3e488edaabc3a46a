"""Command ``fedsync watch``: a running run as a table."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsync.observe.terminal import Terminal


def watch(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")]) -> None:
    """Show the busy and waiting silos of a run until it ends; Ctrl-C ends only the display."""
    from fedsync.observe.live import watch as show

    show(folder, Terminal())
