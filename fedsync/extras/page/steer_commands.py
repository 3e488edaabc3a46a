"""Command ``fedsync steer``: pause, continuation and other changes of a running run."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsync.core.operator.operator_commands import (
    ChangeStop,
    ContinueRun,
    DropSilo,
    OperatorQuestion,
    PauseRun,
    ReadmitSilo,
    said,
)
from fedsync.observe.terminal import say

app = typer.Typer(help="Steer a run: pause it, leave a silo out, change when it ends.", no_args_is_help=True)

Folder = Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run's files, on the server's machine.")]
Silo = Annotated[str, typer.Argument(help="Name of the silo.")]


@app.command()
def pause(folder: Folder) -> None:
    """Pause a run: no new orders and no new versions; silos finish their work, and it is kept."""
    _ask(folder, PauseRun())


@app.command("continue")
def continue_(folder: Folder) -> None:
    """Continue a paused run."""
    _ask(folder, ContinueRun())


@app.command()
def drop(folder: Folder, silo: Silo) -> None:
    """Continue without a silo until it is readmitted; the silo's current work is discarded."""
    _ask(folder, DropSilo(silo))


@app.command()
def readmit(folder: Folder, silo: Silo) -> None:
    """Readmit a silo that was dropped."""
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
    """Change the stop rules; a rule that is already met ends the run now, after a last evaluation."""
    _ask(folder, ChangeStop(rounds, seconds, target_accuracy))


def _ask(folder: Path, question: OperatorQuestion) -> None:
    from fedsync.server.operator_requests import ask

    ask(folder, question)
    say(f"Done: {said(question)}")
