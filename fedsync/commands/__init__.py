"""Commands other than ``run`` and ``compare``, one file each, without heavy imports."""

from __future__ import annotations

import typer

from fedsync.commands import certs, code, keys, server, silo, steer, trace
from fedsync.commands.doctor import doctor
from fedsync.commands.evaluate import evaluate
from fedsync.commands.export import export
from fedsync.commands.new import new
from fedsync.commands.page import page, watch
from fedsync.commands.report import report
from fedsync.commands.statistics import statistics, survival
from fedsync.commands.tune import tune
from fedsync.commands.validate import schema, validate

COMMANDS = (doctor, evaluate, export, new, page, report, schema, statistics, survival, tune, validate, watch)
GROUPS = {"certs": certs, "code": code, "keys": keys, "server": server, "silo": silo, "steer": steer}


def register(app: typer.Typer) -> None:
    for command in COMMANDS:
        app.command()(command)
    keys.app.command()(trace.consent)
    keys.app.command()(trace.trace)
    server.app.command()(trace.disclose)
    for name, group in GROUPS.items():
        app.add_typer(group.app, name=name)
