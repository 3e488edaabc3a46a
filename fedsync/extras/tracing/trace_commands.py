"""Commands that find the silo whose update corrupted an encrypted model version, with the owners' consent.

The commands are ``fedsync keys consent``, ``fedsync keys trace`` and ``fedsync server disclose``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedsync.common.files import check_result, read_input, write_result
from fedsync.common.run_claim import EVIDENCE
from fedsync.config.silo_start import SiloStartConfig
from fedsync.observe.tables import new_table
from fedsync.observe.terminal import Terminal, say

if TYPE_CHECKING:
    from fedsync.extras.tracing.update_trace import Finding

_MAX_FILE_BYTES = 2**24
_WIDTH = 120

Silo = Annotated[Path, typer.Option("--silo", metavar="FILE", help="The silo's file.")]


def consent(
    notice: Annotated[Path, typer.Argument(help="The server's list of the version's updates: VERSION.notice.")],
    silo: Silo,
    examiner: Annotated[
        list[str], typer.Option("--examiner", metavar="NAME", help="Silo that may examine the update; repeatable.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File for the consent.")],
) -> None:
    """Consent, at a silo, to an examination of the single updates of one version."""
    from fedsync.extras.tracing.trace_at_silo import consent_to

    check_result(out, "--out")
    done = consent_to(SiloStartConfig.load(silo), read_input(notice, _MAX_FILE_BYTES), examiner)
    write_result(out, done.consent.canonical() + b"\n")
    about = done.consent
    say(f"{out}: {about.silo} consents that {', '.join(about.examiners)} examine version {about.version}")
    ids = ", ".join(one.head.members[0].update_id for one in done.notice.updates)
    say(f"of run {about.run}, key epoch {about.epoch}: {ids}")
    if done.known is None:
        say("this silo keeps nothing of the run: what went into the version is the server's word")
    elif not done.known:
        say("this silo has not come to that version: what went into it is the server's word")
    if done.unmasks is False:
        say("the masks of this silo's update are not known here any more: it cannot be examined")


def trace(
    file: Annotated[Path, typer.Argument(help="File that `fedsync server disclose` wrote.")],
    silo: Silo,
) -> None:
    """Examine, at a silo, the single updates of one version. The exit status is 1 if an update has a fault."""
    from fedsync.extras.tracing.trace_at_silo import trace as examine

    done = examine(SiloStartConfig.load(silo), file)
    for reason in done.consents.refused:
        say(f"does not count: {reason}", err=True)
    if not done.known:
        say("this silo has not come to that version: what went into it is the server's word", err=True)
    consenting = ", ".join(sorted(done.consents.by_silo))
    title = f"run {done.notice.run}, version {done.notice.version}; with the consent of {consenting}"
    Terminal(width=_WIDTH).print(_table(done.findings, title))
    if any(one.faults for one in done.findings):
        raise typer.Exit(1)
    unseen = [one.silo for one in done.findings if one.unexamined]
    if unseen:
        say(f"What was examined is in order. What is wrong, if anything is, came from {', '.join(unseen)}.")


def disclose(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of the run's files.")],
    version: Annotated[int, typer.Option("--version", help="Version of the model whose updates are disclosed.")],
    examiner: Annotated[str, typer.Option("--examiner", metavar="NAME", help="Silo that examines the updates.")],
    consents: Annotated[
        list[Path], typer.Option("--consent", metavar="FILE", help="An owner's consent; give one of each.")
    ],
    key_file: Annotated[Path, typer.Option("--keys", metavar="FILE", help="The server's key file, server.json.")],
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="File for the examiner.")],
) -> None:
    """Give a silo the single sealed updates of one version, if more than half of all owners consent."""
    from fedsync.cipher.keys.keywrap import read_server_file
    from fedsync.extras.tracing.evidence import give_out

    check_result(out, "--out")
    known = read_server_file(read_input(key_file, _MAX_FILE_BYTES), str(key_file))
    given = [(f"the file {path}", read_input(path, _MAX_FILE_BYTES)) for path in consents]
    found = give_out(folder / EVIDENCE, version, examiner, given, known, out)
    for reason in found.refused:
        say(f"does not count: {reason}", err=True)
    say(f"{out}: for {examiner}, with the consent of {', '.join(sorted(found.by_silo))}")


def _table(findings: Sequence[Finding], title: str) -> Table:
    names = ("silo", "update", "what is wrong")
    table = new_table(title, *names, "largest / limit", left=names, wraps="what is wrong")
    for one in findings:
        wrong = ", ".join(one.faults) or ("" if one.unexamined else "nothing")
        wrong += f"{'; ' if one.faults else ''}not examined: {one.unexamined}" if one.unexamined else ""
        table.add_row(one.silo, one.update_id, wrong, "-" if one.largest is None else f"{one.largest:.3f}")
    return table
