"""Model card in Markdown, from the template ``card.md``: model, data, training, privacy, results and limits.

Source: Mitchell et al., Model Cards for Model Reporting, FAT* 2019. The card has the sections that a run can fill.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from fedsync import __version__
from fedsync.common.foreign import escape
from fedsync.extras.report.data import RunData
from fedsync.extras.report.results import HEAD, Findings, distinct, fairness, number

CARD = "model-card.md"

_SETTINGS = (
    *("task", "local", "predictor", "balancer", "barrier", "aggregation", "server_optimizer"),
    *("stop", "wire", "model", "evaluation"),
)
_PATH = "(a path)"
_ABSOLUTE = re.compile(r"""(?<![\w/.:])(?:~|[A-Za-z]:)?[/\\][^\s,;:'"()]+""")


def model_card(run: RunData) -> str:
    templates = Environment(
        loader=PackageLoader("fedsync.extras", "report"),
        finalize=lambda value: value if isinstance(value, Markup) else plain(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    templates.filters.update(number=number, as_is=Markup, limit=lambda text: _ABSOLUTE.sub(_PATH, text))
    scores = {"score": run.summary["accuracy"], "loss": run.summary["loss"]}
    return templates.get_template("card.md").render(
        run=run,
        s=run.summary,
        settings=[(name, _words(run.settings.get(name))) for name in _SETTINGS],
        sizes=[[silo, f"{examples:,}"] for silo, examples in run.examples.items()],
        scores=[f"{name} {value:.4f}" for name, value in scores.items() if value is not None],
        failed=sum(silo["failures"] for silo in run.summary["silos"]),
        inestimable=_inestimable,
        fairness=fairness,
        fairness_head=HEAD,
        result_rows=result_rows,
        markdown=lambda head, rows: Markup(markdown(head, rows)),
        version=Markup(__version__),
        python=platform.python_version(),
        installed=list(_installed()),
    )


def _words(value: object) -> str:
    if isinstance(value, Mapping):
        parts = [(key, _words(item), isinstance(item, Mapping)) for key, item in value.items()]
        return ", ".join(f"{key} ({words})" if deeper else f"{key} {words}" for key, words, deeper in parts if words)
    if isinstance(value, list):
        return " and ".join(map(_words, value))
    # Paths on a machine are private.
    return "" if value is None else _PATH if isinstance(value, str) and re.search(r"[/\\]", value) else str(value)


def _inestimable(found: Findings) -> Iterator[tuple[str, list[str]]]:
    for silo, numbers in found.silos.items():
        unknown = [metric for metric, each in numbers.items() if each.value is None or each.low is None]
        if unknown:
            yield silo, unknown


def _installed() -> Iterator[str]:
    for name in ("torch", "flwr", "numpy", "tenseal"):
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue


def result_rows(found: Findings) -> tuple[list[str], list[list[str]]]:
    metrics = distinct([found.pooled, *found.silos.values()])
    of = {"all silos, one shared split": found.pooled} if found.shared else {"all silos": found.pooled, **found.silos}
    rows = [
        [name, *(numbers[each].words if each in numbers else "-" for each in metrics)] for name, numbers in of.items()
    ]
    return ["silo", *metrics], rows


def plain(text: str) -> str:
    """Escape a text for Markdown on one line, without HTML or markup."""
    return re.sub(r"([\\`*_{}\[\]|#~!])", r"\\\1", escape(" ".join(text.split())).replace("&#x27;", "'"))


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Format a table; the first column has names, the other columns are right-aligned."""
    first, *others = (f"| {' | '.join(map(plain, cells))} |" for cells in (head, *rows))
    return "\n".join([first, f"|---|{'---:|' * (len(head) - 1)}", *others])
