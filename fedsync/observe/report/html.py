"""Tables and figures as HTML, with all text from a run escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsync.common.foreign import escape
from fedsync.observe.report.style import Picture, inline, to_svg


class FigureIds:
    """Factory of HTML figures with unique SVG ids."""

    def __init__(self) -> None:
        self._count = 0

    def figures(self, pictures: Iterable[Picture | None]) -> str:
        """Return the figures that are not None, side by side if there is room; "" without figures."""
        made = [self._figure(picture) for picture in pictures if picture is not None]
        if not made:
            return ""
        return (
            "\n".join(made)
            if made[0].startswith('<figure class="wide"')
            else f'<div class="figures">{"".join(made)}</div>'
        )

    def _figure(self, picture: Picture) -> str:
        self._count += 1
        svg = inline(to_svg(picture.figure), f"f{self._count}", escape(picture.alt))
        if picture.wide:
            # `tabindex` makes the scrolling region reachable by keyboard.
            svg = f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(picture.title)}">{svg}</div>'
        caption = f"<figcaption>{escape(picture.caption)}</figcaption>" if picture.caption else ""
        kind = ' class="wide"' if picture.wide else ""
        return f"<figure{kind}><h3>{escape(picture.title)}</h3>{svg}{caption}</figure>"


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table; the first column has the row headers."""
    top = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in head)
    body = "\n".join(
        f'<tr><th scope="row">{escape(row[0])}</th>{"".join(f"<td>{escape(cell)}</td>" for cell in row[1:])}</tr>'
        for row in rows
    )
    return (
        f'<div class="scroll" tabindex="0" role="group" aria-label="{escape(caption)}"><table>'
        f"<caption>{escape(caption)}</caption><thead><tr>{top}</tr></thead><tbody>\n{body}\n</tbody></table></div>"
    )


def number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def amount(name: str, value: float | None) -> str:
    """Format a figure that silos report; bytes of at least 1 MB are converted to MB."""
    if value is not None and name.endswith("_bytes") and value >= 1e6:
        return f"{value / 1e6:.2f} MB"
    return number(value, ".6g")
