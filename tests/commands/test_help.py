"""What ``--help`` says."""

from collections.abc import Iterator

import pytest
from typer.main import get_command
from typer.testing import CliRunner

from fedsync.cli import app


def commands() -> Iterator[list[str]]:
    waiting: list[tuple[list[str], object]] = [([], get_command(app))]
    while waiting:
        words, command = waiting.pop()
        below = getattr(command, "commands", {})
        waiting += [([*words, name], each) for name, each in below.items()]
        if not below:
            yield words


def plain(words: list[str]) -> str:
    """The help of a command, without boxes and line breaks."""
    shown = CliRunner().invoke(app, [*words, "--help"], terminal_width=200)
    assert shown.exit_code == 0
    return " ".join(shown.stdout.replace("│", " ").split())


def test_an_argument_is_described() -> None:
    assert "Strategy or silo file: a path, or a shipped name." in plain(["validate"])


@pytest.mark.slow
@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_every_argument_and_option_is_described(words: list[str]) -> None:
    command = get_command(app)
    for word in words:
        command = command.commands[word]  # type: ignore[attr-defined]  # groups have them
    assert command.help and command.help.splitlines()[0] in plain(words)
    for parameter in command.params:
        assert getattr(parameter, "help", None), parameter.name
