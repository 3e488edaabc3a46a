"""Commands other than ``run`` and ``compare``, one file each, without heavy imports."""

from __future__ import annotations

import typer

from fedsync.commands import certs, code, keys, server, silo, steer, trace
from fedsync.commands.doctor import doctor
from fedsync.commands.evaluate import evaluate
from fedsync.commands.export import export
from fedsync.commands.new import new
from fedsync.commands.page import page, watch
from fedsync.commands.probe import probe
from fedsync.commands.report import report
from fedsync.commands.statistics import statistics, survival
from fedsync.commands.tune import tune
from fedsync.commands.validate import schema, validate


def register(app: typer.Typer) -> None:
    app.command()(doctor)
    app.command()(evaluate)
    app.command()(export)
    app.command()(new)
    app.command()(page)
    app.command()(probe)
    app.command()(report)
    app.command()(schema)
    app.command()(statistics)
    app.command()(survival)
    app.command()(tune)
    app.command()(validate)
    app.command()(watch)
    keys.app.command()(trace.consent)
    keys.app.command()(trace.trace)
    server.app.command()(trace.disclose)
    app.add_typer(certs.app, name="certs")
    app.add_typer(code.app, name="code")
    app.add_typer(keys.app, name="keys")
    app.add_typer(server.app, name="server")
    app.add_typer(silo.app, name="silo")
    app.add_typer(steer.app, name="steer")
