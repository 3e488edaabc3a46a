"""Commands other than ``run`` and ``compare``, one file each, without heavy imports."""

from __future__ import annotations

import typer

from fedsync.commands import certs, keys, server, silo
from fedsync.commands.validate import schema, validate

GROUPS = {"certs": certs, "keys": keys, "server": server, "silo": silo}


def register(app: typer.Typer) -> None:
    """Add all commands; those of an extra are in its folder."""
    from fedsync.extras.code_review import code_commands
    from fedsync.extras.cross_site.evaluate_command import evaluate
    from fedsync.extras.doctor.doctor_command import doctor
    from fedsync.extras.exporters.export_command import export
    from fedsync.extras.new_project.new_command import new
    from fedsync.extras.page import steer_commands
    from fedsync.extras.page.page_command import page
    from fedsync.extras.report.report_command import report
    from fedsync.extras.survival.survival_command import survival
    from fedsync.extras.tracing.trace_commands import consent, disclose, trace
    from fedsync.extras.tuning.tune_command import tune
    from fedsync.extras.watch.watch_commands import statistics, watch

    for command in (doctor, evaluate, export, new, page, report, schema, statistics, survival, tune, validate, watch):
        app.command()(command)
    keys.app.command()(consent)
    keys.app.command()(trace)
    server.app.command()(disclose)
    for name, group in {**GROUPS, "code": code_commands, "steer": steer_commands}.items():
        app.add_typer(group.app, name=name)
