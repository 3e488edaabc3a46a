"""Text of other parties: file names, run names, silos' reasons, peers' errors.

Such a text may hold terminal commands (ESC), line breaks that forge log lines, marks that reverse the reading
direction, and markup. So it passes `shown` before it reaches a log or a terminal, and `escape` before it reaches a
page. Loggers come from `logger`, which applies `shown` to every record; consoles and printed lines from
`fedsync.observe.terminal`.
"""

from __future__ import annotations

import logging
from html import escape as without_markup

MOST_CHARACTERS = 2000


def shown(text: object, most: int | None = MOST_CHARACTERS) -> str:
    """One line of printable characters; any other character becomes its escape, for example ``\\x1b`` or ``\\n``.

    Args:
        text: foreign text.
        most: characters of it that are kept, half of them from its end; None keeps all.
    """
    line = str(text)
    if most is not None and len(line) > most:
        half = most // 2
        line = f"{line[:half]} [{len(line) - 2 * half} characters left out] {line[len(line) - half :]}"
    # Tabs separate words in Flower's messages. All characters that reorder text count as not printable.
    line = line.replace("\t", " ")
    return line if line.isprintable() else "".join(map(_escaped, line))


def escape(text: object) -> str:
    """A foreign text for a page or an attribute of one: `shown`, whole, without markup; spaces may be unbreakable."""
    return "\u00a0".join(without_markup(shown(part, None)) for part in str(text).split("\u00a0"))


def logger(name: str) -> logging.Logger:
    """The logger of a module; nothing that it writes breaks a line or commands a terminal."""
    made = logging.getLogger(name)
    made.addFilter(SHOWN)
    return made


class _Shown(logging.Filter):
    """Applies `shown` to a record; the lines of its stack trace are indented, so none can pass as a record."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = shown(record.getMessage()), None
        if record.exc_info and not record.exc_text:
            record.exc_text = logging.Formatter().formatException(record.exc_info)
        record.exc_text = _indented(record.exc_text)
        record.stack_info = _indented(record.stack_info)
        return True


SHOWN = _Shown()
"""For handlers and for loggers of libraries."""


def _indented(trace: str | None) -> str | None:
    return trace and "\n".join(f"  | {shown(line.removeprefix('  | '))}" for line in trace.split("\n"))


def _escaped(letter: str) -> str:
    return letter if letter.isprintable() else letter.encode("unicode_escape").decode()
