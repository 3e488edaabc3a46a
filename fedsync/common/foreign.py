"""Escaping of untrusted text: file names, run names, peers' errors, and the reasons that silos give for a refusal.

Untrusted text may hold terminal commands (ESC), line breaks that forge log lines, marks that reverse the reading
direction, and markup. So `shown` is applied to it before it reaches a log or a terminal, and `escape` before it reaches
a page. `logger` returns loggers that apply `shown` to every record.
"""

from __future__ import annotations

import logging
import time
from html import escape as without_markup

MOST_CHARACTERS = 2000

BURST, LASTING = 2000, 2.0
"""Records that a line of code may log at once, and per second after that. A peer may cause a record by each message."""


def shown(text: object, most: int | None = MOST_CHARACTERS) -> str:
    """Return one line of printable characters; others are escaped, for example as ``\\x1b`` or ``\\n``.

    At most ``most`` characters of the text are kept, half of them from the end; None keeps all.
    """
    line = str(text)
    if most is not None and len(line) > most:
        half = most // 2
        line = f"{line[:half]} [{len(line) - 2 * half} characters left out] {line[len(line) - half :]}"
    # Tabs separate words in Flower's messages. All characters that reorder text count as not printable.
    line = line.replace("\t", " ")
    if line.isprintable():
        return line
    return "".join(letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in line)


def escape(text: object) -> str:
    """Return a foreign text for HTML: `shown` in full, markup escaped, no-break spaces kept."""
    return "\u00a0".join(without_markup(shown(part, None)) for part in str(text).split("\u00a0"))


def logger(name: str) -> logging.Logger:
    made = logging.getLogger(name)
    made.addFilter(SHOWN)
    return made


class _Shown(logging.Filter):
    """Filter that applies `shown` to a record, and indents stack traces, so that no line of a trace passes as a record.
    A line of code may log `BURST` records at once, and `LASTING` per second after: peers' messages cause records.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left: dict[tuple[str, int], tuple[float, float]] = {}

    def _allows(self, record: logging.LogRecord) -> bool:
        place, now_s = (record.pathname, record.lineno), time.monotonic()
        left, at_s = self._left.get(place, (BURST, now_s))
        left = min(BURST, left + LASTING * (now_s - at_s))
        self._left[place] = (left - 1 if left >= 1 else left), now_s
        if 1 <= left < 2:
            record.msg, record.args = f"{record.getMessage()} (more of these are left out)", None
        return left >= 1

    def filter(self, record: logging.LogRecord) -> bool:
        known = vars(record)  # loggers and handlers have this filter
        if not known.setdefault("allowed", "allowed" in known or self._allows(record)):
            return False
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
