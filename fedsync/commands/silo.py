"""``fedsync silo``: run this machine's silo, and get its model."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="A real silo: its processes, kept running.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--silo", metavar="FILE", help="The silo's file.")]


@app.command()
def start(file: File) -> None:
    """Run the silo until it is told to end; restart what fails."""
    from fedsync.config.silo_start import SiloStartConfig

    config = SiloStartConfig.load(file)
    from fedsync.ops.programs import way
    from fedsync.ops.start import start_silo

    logging.getLogger("fedsync").setLevel(logging.INFO)
    typer.echo(f"silo {config.name}, server {config.server}, {way(config.code)} way; files in {config.state}")
    start_silo(config)


@app.command()
def serve(file: File) -> None:
    """Have the trainer of the silo's newest run ready before a message asks for it, for example after a restart."""
    from fedsync.config.silo_start import SiloStartConfig

    config = SiloStartConfig.load(file)
    from fedsync.ops.start import serve_silo

    logging.getLogger("fedsync").setLevel(logging.INFO)
    serve_silo(config)


@app.command()
def export(
    file: File,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for model.pt, which is replaced.")],
    run: Annotated[
        str | None, typer.Option("--run", help="Which run's; left out, the one whose model came last.")
    ] = None,
) -> None:
    """Write the model of an encrypted run, of which the server has none, as this silo keeps it."""
    from fedsync.config.silo_start import SiloStartConfig

    config = SiloStartConfig.load(file)
    from fedsync.trainer.model_export import export_kept

    done = export_kept(config, out, run)
    typer.echo(f"{done.file}: version {done.version} of run {done.run}")
    if done.best is not None:
        typer.echo(f"{out / 'best.pt'}: version {done.best}; best.json says how good it is")
    for other in done.others:
        typer.echo(f"not written: run {other}; for its model add --run {other.name}")


@app.command()
def digest(model: Annotated[Path, typer.Argument(help="A model.pt, as runs and `export` write it.")]) -> None:
    """Print what to write as first_model, so that encrypted runs may begin with this model."""
    from fedsync.train.weights import model_digest

    typer.echo(model_digest(model))


@app.command()
def unlock(file: File) -> None:
    """Let a silo that met failures of integrity take part again, and show what happened."""
    from fedsync.config.silo_start import SiloStartConfig
    from fedsync.core.errors import ConfigError

    config = SiloStartConfig.load(file)
    if config.keys is None:
        raise ConfigError(f"{file}, keys", "a silo without keys is never locked", "There is nothing to do")
    from fedsync.cipher.keys.keyring import open_ring
    from fedsync.cipher.keys.passphrase import NAMED_BY
    from fedsync.trainer.lockout import Lockout

    os.environ[NAMED_BY] = config.passphrase_env

    happened = Lockout(open_ring(Path(config.keys))).unlock()
    if happened is None:
        typer.echo("the count of failures was missing or damaged")
    for failure in happened or ():
        typer.echo(f"{failure.at} {failure.reason}")
    typer.echo(f"silo {config.name} is open; failures of integrity are counted from zero")
