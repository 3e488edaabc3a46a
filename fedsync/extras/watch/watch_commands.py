"""Commands that show a run in the terminal: ``fedsync watch`` while it works, then ``fedsync statistics``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.observe.terminal import Terminal


def watch(folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run.")]) -> None:
    """Show the busy and waiting silos of a run until it ends; Ctrl-C ends only the display."""
    from fedsync.extras.watch.live import watch as show

    show(folder, Terminal())


def statistics(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="Folder of a run, or of a silo's trainer in an encrypted run.")
    ],
) -> None:
    """Show the column statistics of all silos, if the run's task asked for them."""
    from fedsync.evaluation.survey.findings import STATISTICS
    from fedsync.extras.surveys.statistics_table import statistics_table

    path = folder / STATISTICS
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        table = statistics_table(found)
    except FileNotFoundError:
        remedy = "Ask for them: task.standardise: federated. In an encrypted run the silos have them: name a trainer's "
        remedy += "folder, or after a survey without training the folder that `fedsync silo export` wrote"
        raise ConfigError(str(path), "there are no statistics of this run", remedy) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(str(path), "this is no file of statistics", "Name the folder of a run") from error
    Terminal().print(table)
