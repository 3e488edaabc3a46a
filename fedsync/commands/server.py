"""Command ``fedsync server``: start of the server, registration of silos, and runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.common.log_times import log_with_times
from fedsync.common.output import output_may_be_lost
from fedsync.config.server_start import ServerStartConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.observe.terminal import say

app = typer.Typer(help="A real server: its processes, kept running, and its runs.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--server", metavar="FILE", help="The server's file.")]


@app.command()
def start(file: File) -> None:
    """Run the server until it is told to end; restart failed processes."""
    config = ServerStartConfig.load(file)
    from fedsync.ops.start import start_server

    log_with_times()
    output_may_be_lost()
    say(f"server on {config.host}:{config.port}; files in {config.state}")
    start_server(config)


@app.command()
def register(file: File) -> None:
    """Register the silos of the file at the running server, for example after a silo was added or got a new key.

    The server then rejects the silo's previous key.
    """
    config = ServerStartConfig.load(file)
    from fedsync.ops.registration_loop import tell_what_else
    from fedsync.ops.start import register_silos

    found = register_silos(config)
    say(f"registered: {', '.join(name for name in config.node_keys if name not in found.problems) or 'none'}")
    tell_what_else(found)
    found.check()


@app.command()
def revoke(
    name: Annotated[str, typer.Argument(help="Name of the silo, which is no longer in the file.")], file: File
) -> None:
    """Make the running server reject a silo from now on."""
    config = ServerStartConfig.load(file)
    from fedsync.ops.start import revoke_silo

    revoke_silo(config, name)
    say(f"revoked: {name}")


@app.command()
def run(
    file: File,
    strategy: Annotated[
        str | None, typer.Argument(help="Strategy file: a path, or the name of a shipped one.", show_default=False)
    ] = None,
    assignments: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, as a.b=c.")
    ] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Folder for the run's files.")] = None,
    target_accuracy: Annotated[
        float | None, typer.Option("--target-accuracy", help="Report the seconds to this accuracy.")
    ] = None,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Replace what an earlier run left in the folder.")
    ] = False,
    resume: Annotated[
        Path | None, typer.Option("--resume", metavar="DIR", help="Go on with the run in this folder instead.")
    ] = None,
) -> None:
    """Start a run on the running server, or continue a run that failed or was stopped."""
    config = ServerStartConfig.load(file)
    if resume is not None and not (strategy or assignments or out or overwrite or target_accuracy is not None):
        from fedsync.ops.runs import resume_run

        resume_run(config, resume)
        say(f"Resumed. Files: {resume}")
        return
    if strategy is None or resume is not None:
        remedy = "Name a strategy, or a folder with --resume and nothing else"
        raise ConfigError("fedsync server run", "it is not clear what to run", remedy)
    wanted = StrategyConfig.load(strategy, assignments or [])
    wanted.check_target(target_accuracy)
    from fedsync.ops.runs import submit_run

    folder = submit_run(config, wanted, out=out, target_accuracy=target_accuracy, overwrite=overwrite)
    say(f"Started. Files: {folder}")


@app.command()
def stop(folder: Annotated[Path, typer.Argument(help="Folder of the run's files.")]) -> None:
    """End a run early, in any state; `fedsync server run --resume` continues it."""
    from fedsync.ops.runs import stop_run

    stop_run(folder)
    say(f"Stopped: {folder}")
