"""Command ``fedsync silo``: start, approval, audit and model export of this machine's silo, and more."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from fedsync.common.errors import ConfigError
from fedsync.common.log_times import log_with_times
from fedsync.common.output import output_may_be_lost
from fedsync.config.silo_start import SiloStartConfig
from fedsync.observe.terminal import Terminal, say

app = typer.Typer(help="A real silo: its processes, kept running.", no_args_is_help=True)

File = Annotated[Path, typer.Option("--silo", metavar="FILE", help="The silo's file.")]


@app.command()
def start(file: File) -> None:
    """Run the silo until it is told to end; restart failed processes."""
    config = SiloStartConfig.load(file)
    from fedsync.ops.start import start_silo

    log_with_times()
    output_may_be_lost()
    say(f"silo {config.name}, server {config.server}; files in {config.state}")
    start_silo(config)


@app.command()
def export(
    file: File,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Folder for model.pt, which is replaced.")],
    run: Annotated[
        str | None, typer.Option("--run", help="Run whose model is exported; left out, the one with the newest model.")
    ] = None,
) -> None:
    """Write this silo's copy of the model of an encrypted run; the server has no such copy."""
    config = SiloStartConfig.load(file)
    from fedsync.silo.owner.model_export import export_kept

    done = export_kept(config, out, run)
    say(f"{done.file}: version {done.version} of run {done.run}")
    if done.best is not None:
        say(f"{out / 'best.pt'}: version {done.best}; best.json says how good it is")
    for other in done.others:
        say(f"not written: run {other}; for its model add --run {other.name}")


@app.command()
def digest(model: Annotated[Path, typer.Argument(help="A model.pt, as runs and `export` write it.")]) -> None:
    """Print the digest for first_model, which lets encrypted runs begin with this model."""
    from fedsync.train.weights import model_digest

    say(model_digest(model))


@app.command()
def rotate(file: File) -> None:
    """Replace the silo's node key by a new key; the audit log records this, signed by the old key."""
    config = SiloStartConfig.load(file)
    from fedsync.ops.audit_heads import rotate_node_key

    key = rotate_node_key(config)
    say(f"{key.name} {key.fingerprint}")
    say(f"{key.public}: to the server's operator, who puts it in place of the old one and registers it")
    say("then restart `fedsync silo start`; from its registration on the server turns the old key away")


@app.command()
def unlock(file: File) -> None:
    """Let a silo take part again after integrity failures, and show what happened."""
    config = SiloStartConfig.load(file)
    if config.keys is None:
        raise ConfigError(f"{file}, keys", "a silo without keys is never locked", "No action is needed")
    from fedsync.cipher.keys.keyring import open_ring
    from fedsync.cipher.keys.passphrase import NAMED_BY
    from fedsync.silo.owner.lockout import Lockout

    os.environ[NAMED_BY] = config.passphrase_env

    happened = Lockout(open_ring(Path(config.keys))).unlock()
    if happened is None:
        say("the count of failures was missing or damaged")
    for failure in happened or ():
        say(f"{failure.at} {failure.reason}")
    say(f"silo {config.name} is open; failures of integrity are counted from zero")


@app.command()
def approve(
    file: File,
    digest: Annotated[
        str | None, typer.Argument(help="Digest of the run to decide on; left out, waiting runs are listed.")
    ] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Refuse the run.")] = False,
) -> None:
    """List the runs that wait for approval by this silo's owner (``approve: ask``), and approve or refuse one."""
    config = SiloStartConfig.load(file)
    from fedsync.ops.approval_summary import code_of, code_or_problem, summary
    from fedsync.silo.owner.approvals import APPROVALS, Approvals, with_code
    from fedsync.silo.owner.audit import AuditLog, run_name
    from fedsync.silo.owner.owner_policy import audit_place

    approvals = Approvals(Path(config.state) / APPROVALS)
    if digest is None:
        if refuse:
            raise ConfigError("--refuse", "no run is named", "Name the digest of a waiting run")
        for run in approvals.waiting():
            say(*summary(run, config), most=None)
        for known, yes in approvals.decided():
            say(f"{'approved' if yes else 'refused'} {known}")
            approved = approvals.asked(known) if yes else None
            code, problem = ({}, "") if approved is None else code_or_problem(approved, config)
            if problem:
                say(f"  its code cannot run any more: {problem}")
            elif approved is not None and not approvals.covers(known, code):
                say(f"  its code has changed since; to approve it as it is now, name {with_code(known, code)}")
        if not (approvals.waiting() or approvals.decided()):
            say("no run waits" if config.approve == "ask" else "no run waits: approve is not ask in silo.yaml")
        return
    asked = approvals.asked(digest.partition("+")[0])
    shown = None if asked is None or refuse else code_of(asked, config)
    decided = approvals.decide(digest, approve=not refuse, code=shown)
    say(*summary(decided, config, shown), most=None)
    said = "refused" if refuse else "approved"
    fields = {"run": run_name(decided.spec), "who": "owner", "spec": decided.digest, "said": said}
    AuditLog(audit_place(config)).add("decided", fields | ({"code": digest.partition("+")[2]} if shown else {}))
    say(f"{said} {digest}")


@app.command()
def privacy(file: File) -> None:
    """Show the privacy budgets of this silo's data: what each run has spent, and what is left."""
    config = SiloStartConfig.load(file, connects=False)
    from fedsync.ops.privacy_table import spending

    tables, notes = spending(config)
    for each in tables:
        Terminal().print(each)
    for note in notes:
        say(f"note: {note}")


@app.command()
def audit(
    file: File,
    heads: Annotated[
        Path | None, typer.Option("--heads", metavar="DIR", help="Signed heads of the log that were kept elsewhere.")
    ] = None,
) -> None:
    """Verify the log of requests to this silo and of data that left it, and show it by run."""
    config = SiloStartConfig.load(file)
    from fedsync.ops.audit_check import check_audit, table

    found = check_audit(config, heads)
    say(*table(found))
    for note in found.notes:
        say(f"note: {note}")
    say(f"FAIL {found.broken}" if found.broken else f"ok   {found.lines} lines, each as it was written")
    if found.broken:
        raise typer.Exit(1)
