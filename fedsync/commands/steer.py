"""``fedsync steer``: change a run while it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedsync.observe.terminal import say

if TYPE_CHECKING:
    from fedsync.core.operator.operator_commands import OperatorQuestion

app = typer.Typer(help="A run that goes on: pause it, do without a silo, end otherwise.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run's files, on the server's machine.")]
Silo = Annotated[str, typer.Argument(help="Name of the silo.")]


@app.command()
def pause(folder: Folder) -> None:
    """Give no more orders and make no more versions; what silos have in work ends, and is kept."""
    from fedsync.core.operator.operator_commands import PauseRun

    _ask(folder, PauseRun())


@app.command("continue")
def continue_(folder: Folder) -> None:
    """Go on with a paused run."""
    from fedsync.core.operator.operator_commands import ContinueRun

    _ask(folder, ContinueRun())


@app.command()
def drop(folder: Folder, silo: Silo) -> None:
    """Go on without a silo, until it is readmitted; what it has in work is discarded."""
    from fedsync.core.operator.operator_commands import DropSilo

    _ask(folder, DropSilo(silo))


@app.command()
def readmit(folder: Folder, silo: Silo) -> None:
    """Take a silo that was dropped in again."""
    from fedsync.core.operator.operator_commands import ReadmitSilo

    _ask(folder, ReadmitSilo(silo))


@app.command("stop-rule")
def stop_rule(
    folder: Folder,
    rounds: Annotated[int | None, typer.Option("--rounds", min=1, help="Commits after which the run ends.")] = None,
    seconds: Annotated[
        float | None, typer.Option("--seconds", help="Seconds since its beginning after which the run ends.")
    ] = None,
    target_accuracy: Annotated[
        float | None, typer.Option("--target-accuracy", help="Accuracy at which the run ends.")
    ] = None,
) -> None:
    """Change when the run ends; a rule that is reached already ends it now, with its last evaluation."""
    from fedsync.core.operator.operator_commands import ChangeStop

    _ask(folder, ChangeStop(rounds, seconds, target_accuracy))


def _ask(folder: Path, question: OperatorQuestion) -> None:
    from fedsync.core.operator.operator_commands import said
    from fedsync.server.operator_requests import ask

    ask(folder, question)
    say(f"Done: {said(question)}")
