"""Commands called in this process."""

from typer import Typer
from typer.testing import CliRunner

from fedsync import cli


def call(*arguments: object, app: Typer = cli.app) -> str:
    """What a command prints; its error, or the `SystemExit` of its status, comes through."""
    done = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if done.exception is not None:
        raise done.exception
    return done.stdout
