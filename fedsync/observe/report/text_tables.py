"""Tables as Markdown, LaTeX and CSV. Names come from silos, so each format escapes its special characters."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence

from fedsync.common.foreign import escape
from fedsync.observe.exporters.csv_exporter import without_formulas

_LATEX = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
}


def plain(text: str) -> str:
    """Escape a text for Markdown on one line, without HTML or markup."""
    return re.sub(r"([\\`*_{}\[\]|#~!])", r"\\\1", escape(" ".join(text.split())).replace("&#x27;", "'"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table; the first column has names, the other columns are right-aligned."""
    lines = [_row(head), f"|---|{'---:|' * (len(head) - 1)}", *(_row(row) for row in rows)]
    return "\n".join(lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(map(plain, cells))} |"


def latex(head: Sequence[str], rows: Iterable[Sequence[str]], caption: str) -> str:
    """Format a table for a paper that has ``\\usepackage{booktabs}``."""
    lines = [
        r"\begin{table}",
        r"  \centering",
        rf"  \caption{{{_latex(caption)}}}",
        rf"  \begin{{tabular}}{{l{'r' * (len(head) - 1)}}}",
        r"    \toprule",
        _line(head),
        r"    \midrule",
        *(_line(row) for row in rows),
        r"    \bottomrule",
        r"  \end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def _line(cells: Iterable[str]) -> str:
    # Braces: LaTeX reads a bracket after the end of a row as the optional vertical space.
    return "    " + " & ".join(f"{{{_latex(cell)}}}" for cell in cells) + r" \\"


def _latex(text: str) -> str:
    return "".join(_LATEX.get(letter, letter) for letter in " ".join(text.split()))


def comma_separated(head: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Format as CSV; None is an empty cell, and texts that a spreadsheet would read as formulas are escaped."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(without_formulas(row) for row in rows)
    return file.getvalue()
