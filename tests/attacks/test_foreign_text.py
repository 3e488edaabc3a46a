"""Text of other parties in logs, on terminals and on pages: it commands nothing, forges no line and is no markup.

The last tests walk all call sites: whatever writes takes its means from `fedsync.common.foreign` and
`fedsync.observe.terminal`.
"""

from __future__ import annotations

import ast
import importlib
import io
import logging
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.table import Table

from fedsync.cli import _say
from fedsync.common import foreign
from fedsync.common.errors import ConfigError, ProtocolError, RunError
from fedsync.config.silo_start import LogsConfig
from fedsync.extras.report.card import plain
from fedsync.extras.report.report_page import templates
from fedsync.flower import hub_transport
from fedsync.observe.progress import RunProgress
from fedsync.observe.terminal import Terminal, WordsColumn, say, words
from fedsync.ops.supervisor import LoggedProcess, Program
from tests.attacks.call_sites import FILES, ROOT, calls, tree, where

MEANS = {ROOT / "fedsync/common/foreign.py", ROOT / "fedsync/observe/terminal.py"}

HOSTILE = "x\x1b]0;owned\x07\x1b[2J\r\nERROR all is well\u2028\u202egnp.exe\u2066\u200f\x9b31m[bold red]a[/][link=file:///]<script>&"


def harmless(text: str, lines: int = 1) -> None:
    """It has so many lines, and nothing in it that a terminal obeys."""
    assert len(text.rstrip("\n").split("\n")) == lines, text
    assert text.replace("\n", "").isprintable(), ascii(text)


@pytest.fixture
def log() -> Iterator[io.StringIO]:
    """What FedSync's loggers write, as `fedsync silo start` formats it."""
    written, top = io.StringIO(), logging.getLogger("fedsync")
    handler = logging.StreamHandler(written)
    top.addHandler(handler)
    yield written
    top.removeHandler(handler)


def every_logger() -> list[logging.Logger]:
    found = []
    for path in FILES:
        if path.name != "__main__.py" and "logger(__name__)" in path.read_text(encoding="utf-8"):
            name = ".".join(path.relative_to(ROOT).with_suffix("").parts)
            found.append(importlib.import_module(name).logger)
    return found


def test_no_logger_writes_what_a_terminal_obeys(log: io.StringIO) -> None:
    """A silo's name, a path of a request, a peer's error: whichever logger it comes to, and as whatever argument."""
    loggers = every_logger()
    assert len(loggers) > 40
    assert hub_transport.logger in loggers
    for logger in loggers:
        log.seek(0), log.truncate()
        logger.error("[%s] refused: %s", HOSTILE, ProtocolError(HOSTILE, HOSTILE, HOSTILE))
        harmless(log.getvalue())


def test_a_peers_error_forges_no_line_in_a_stack_trace(log: io.StringIO) -> None:
    try:
        raise ValueError(HOSTILE)
    except ValueError:
        hub_transport.logger.exception("failed")
    lines = log.getvalue().splitlines()
    assert lines[0] == "failed"
    assert all(line.startswith("  | ") and line.isprintable() for line in lines[1:])
    assert "Traceback" in lines[1]


def test_flowers_own_loggers_are_no_way_round() -> None:
    importlib.import_module("fedsync.server.outbox")
    record = logging.LogRecord("flwr", logging.ERROR, "", 1, "%s", (HOSTILE,), None)
    assert logging.getLogger("flwr").filter(record)
    harmless(record.getMessage())


def test_a_long_text_is_cut_in_its_middle() -> None:
    cut = foreign.shown("a" * 10**6 + "end")
    assert len(cut) < 2100
    assert cut.endswith("aend")
    assert foreign.shown("a" * 5000, None) == "a" * 5000


@pytest.mark.parametrize("error", [ConfigError(HOSTILE, HOSTILE, HOSTILE), RunError(HOSTILE)])
def test_errors_on_a_terminal(error: ConfigError | RunError, capsys: pytest.CaptureFixture[str]) -> None:
    _say(error)
    said = capsys.readouterr().err
    harmless(said)
    assert "[bold red]a[/]" in said


def test_tables_and_lines_on_a_terminal() -> None:
    written = io.StringIO()
    terminal = Terminal(file=written, width=2000)
    table = Table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(words(HOSTILE, "bold"))
    terminal.print(table)
    terminal.print(HOSTILE, style="red")
    text = written.getvalue()
    assert text.replace("\n", "").isprintable()
    assert text.count("[bold red]a[/]") == 5
    assert not any(line.startswith("ERROR") for line in text.splitlines())


def test_lines_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    say(f"run {HOSTILE}", HOSTILE)
    harmless(capsys.readouterr().out, lines=2)


def test_the_bar_of_a_run() -> None:
    written = io.StringIO()
    with RunProgress(Terminal(file=written, width=2000), HOSTILE, rounds=1) as progress:
        assert progress
    column = WordsColumn("{task.description}", style="bold")
    task = type("Task", (), {"description": HOSTILE})()
    harmless(column.render(task).plain)
    assert written.getvalue().replace("\n", "").isprintable()


def test_pages_and_markdown() -> None:
    page = templates().get_template("sections.html").module.table(HOSTILE, [HOSTILE], [[HOSTILE]])
    assert "<script>" not in page
    assert page.replace("\n", "").isprintable()
    harmless(plain(HOSTILE))
    assert "<script>" not in plain(HOSTILE)


def test_the_logs_of_processes(tmp_path: Path) -> None:
    """Whatever a library writes there by itself."""
    program = Program("silo", [sys.executable, "-c", f"print({HOSTILE!r})"])
    process = LoggedProcess(program, {"PYTHONIOENCODING": "utf-8"}, tmp_path, LogsConfig())
    process._process.wait()
    harmless(process.last_words())
    assert (tmp_path / "silo.log").read_text().replace("\n", "").isprintable()


# Call sites.

# Own text for machines: JSON, a silo file, keys in hex.
WRITES_OWN_TEXT = {"fedsync/commands/validate.py": 1, "fedsync/commands/keys.py": 2}
PRINTS = {
    "fedsync/common/fork_server.py": "why a program ends, as Python does",
    "fedsync/flower/flwr_calls.py": "JSON for its parent, and an error into a file that becomes a part of that",
}
OTHER_LOGGERS = ("'fedsync'", "'flwr'", "'httpx'")


BANNED = {
    "rich.console": {"Console"},
    "rich.text": {"Text"},
    "rich.markup": {"escape"},
    "rich.progress": {"TextColumn", "track"},
    "rich": {"print", "print_json", "inspect"},
    "html": {"escape"},
    "typer": {"echo", "secho"},
    "logging": {"getLogger"},
    "flwr.common.logger": {"log", "logger"},
}


@pytest.mark.slow
def test_all_loggers_and_consoles_are_made_in_one_place() -> None:
    wrong = []
    for path in set(FILES) - MEANS:
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom):
                names = {name.name for name in node.names} & BANNED.get(node.module or "", set())
                wrong += [f"{where(path, node)}: {node.module}.{name}" for name in names]
            if isinstance(node, ast.Import):
                wrong += [f"{where(path, node)}: {name.name}" for name in node.names if name.name in ("html", "click")]
    for path, called, call in calls():
        prints = called == "print" and path.relative_to(ROOT).as_posix() not in PRINTS
        # To set a level, or to have FedSync's own output: nothing is written with it.
        known = path.name == "__init__.py" or not call.args or ast.unparse(call.args[0]) in OTHER_LOGGERS
        other = called in ("typer.echo", "typer.secho", "warnings.warn", "traceback.print_exc")
        if path not in MEANS and (prints or other or (called == "logging.getLogger" and not known)):
            wrong.append(f"{where(path, call)}: {called}")
    assert not wrong, "\n".join(sorted(wrong))


@pytest.mark.slow
def test_nothing_writes_to_the_standard_streams_past_them() -> None:
    streams = ("sys.stdout.write", "sys.stderr.write", "sys.__stdout__.write", "sys.__stderr__.write")
    found = Counter(
        str(path.relative_to(ROOT)) for path, called, _ in calls() if called in streams and path not in MEANS
    )
    assert found == WRITES_OWN_TEXT


@pytest.mark.slow
def test_messages_of_logs_are_constants() -> None:
    """What is foreign is an argument, so no ``%`` in it is a place for another."""
    wrong = []
    for path, called, call in calls():
        owner, _, method = called.rpartition(".")
        logs = owner == "logger" and method in ("debug", "info", "warning", "error", "exception", "critical")
        if logs and isinstance(call.args[0], ast.JoinedStr | ast.BinOp | ast.Call):
            wrong.append(where(path, call))
    assert not wrong, "\n".join(wrong)
