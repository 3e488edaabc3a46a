"""``fedsync silo``: run this machine's silo."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="A real silo: its processes, kept running.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--silo", metavar="FILE", help="The silo's file.")]


@app.command()
def start(file: File) -> None:
    """Run the silo until it is told to end; restart what fails."""
    from fedsync.config.silo import SiloStartConfig

    config = SiloStartConfig.load(file)
    from fedsync.runtime.supervise import start_silo
    from fedsync.runtime.supervisor_plans import way

    logging.getLogger("fedsync").setLevel(logging.INFO)
    typer.echo(f"silo {config.name}, server {config.server}, {way()} way; files in {config.state}")
    start_silo(config)


@app.command()
def serve(file: File) -> None:
    """Have the trainer of the silo's newest run ready before a message asks for it, for example after a restart."""
    from fedsync.config.silo import SiloStartConfig

    config = SiloStartConfig.load(file)
    from fedsync.runtime.serve import serve_silo

    logging.getLogger("fedsync").setLevel(logging.INFO)
    serve_silo(config)
