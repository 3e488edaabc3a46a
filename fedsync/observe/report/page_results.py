"""Sections of the report page on model quality."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from fedsync.common.foreign import escape
from fedsync.observe.report import fairness, seeds
from fedsync.observe.report.data import RunData
from fedsync.observe.report.drawing import draw_results
from fedsync.observe.report.drawing.heat_map import gains, heat_map, signed
from fedsync.observe.report.first_section import MEANINGS
from fedsync.observe.report.html import FigureIds, table
from fedsync.observe.report.results import SUBJECTS, CrossSiteTable, Estimates, Findings, KeptVersion
from fedsync.observe.report.style import thin

MOST_CHARTS = 8
MOST_SILOS = 200

INTERVALS = (
    "In brackets: the 95 % interval, in which the number would lie for most other samples of these silos. It comes "
    "from drawing the samples again and again, by the bootstrap within classes, of means by the jackknife; there is "
    "none of fewer than five samples of a class, nor of a loss."
)


def results(runs: Sequence[RunData]) -> str:
    """Return scores with intervals, pooled and by silo, the saved models, and fairness between silos."""
    if len(runs) > 1:
        return _side_by_side(runs)
    run = runs[0]
    noisy = f"<p>{escape(run.noisy)}. A silo may be the worst by noise alone.</p>" if run.noisy else ""
    parts = [_kept(run.results.kept), _pooled(run.results.findings), noisy]
    if run.results.main is not None:
        parts += [_silos(run.results.main), _fairness(run.results.main, run.results.lower), _meanings(run.results.main)]
    return "\n".join(part for part in parts if part)


def over_seeds(runs: Sequence[RunData]) -> str:
    """Return means over seeds and paired tests; "" unless runs differ in their seed alone."""
    found = seeds.groups(runs)
    parts = []
    for figure in seeds.figures(found) if found else ():
        parts.append(table(f"{figure} over seeds", seeds.HEAD_MEANS, seeds.means(found, figure)))
        if len(found) > 1:
            rows = [seeds.test_row(*test) for test in seeds.tests(found, figure)]
            parts.append(table(f"{figure}: difference to {found[0].label}, seed by seed", seeds.HEAD_TESTS, rows))
    if not parts:
        return ""
    of = f"<p>Metrics: {seeds.judged(found)}, all samples pooled. Intervals of means: Student's t over seeds.</p>"
    return of + "\n".join(parts) + (f"<p>{_TESTS}</p>" if len(found) > 1 else "")


_TESTS = (
    "Each strategy is compared with the first, by runs of the same seed. A p-value says how often differences as large "
    "would come by chance if there were none. It does not say how likely or how important a difference is. Holm's "
    "correction is for the comparisons of one table, and not for the number of tables: decide beforehand which counts. "
    "Of n pairs Wilcoxon's test cannot come below 2 to the power of 1 - n."
)


def curves(runs: Sequence[RunData], ids: FigureIds) -> str:
    return ids.figures([draw_results.roc(runs), draw_results.calibration(runs)])


def over_rounds(runs: Sequence[RunData], ids: FigureIds) -> str:
    names, groups = metric_names(run.results.rounds for run in runs), seeds.groups(runs)
    if not groups and any(point.accuracy is not None for run in runs for point in run.points):
        names = [name for name in names if name != "accuracy"]  # section "Accuracy" shows it
    pictures = [
        draw_results.over_seeds(groups, name) if groups else draw_results.over_rounds(runs, name)
        for name in names[:MOST_CHARTS]
    ]
    charts = ids.figures(pictures)
    left = names[MOST_CHARTS:]
    return charts + (f"<p>Without a chart: {escape(', '.join(left))}.</p>" if left else "")


def cross_site(run: RunData, *, named: bool) -> str:
    """Return the cross-site matrix of each metric; only the first is expanded."""
    matrix = run.results.cross_site
    if matrix is None:
        return ""
    parts = [f"<h3>{escape(run.label)}</h3>"] if named else []
    for index, metric in enumerate(matrix.matrix):
        body = heat_map(matrix, metric, lower=metric in run.results.lower) + _gains(run, metric)
        if body:
            opened = "" if index else " open"
            parts.append(f"<details{opened}><summary>{escape(metric)}</summary>{body}</details>")
    if not matrix.silos:
        parts.append("<p>Numbers of single silos are sealed, so there is no matrix.</p>")
    parts.append(_cross_pooled(run))
    if matrix.missing:
        parts.append("<p>Missing:</p><ul>" + "".join(f"<li>{escape(each)}</li>" for each in matrix.missing) + "</ul>")
    return "\n".join(part for part in parts if part)


def metric_names(of: Iterable[Iterable[str]]) -> list[str]:
    """Return the distinct names in order of first occurrence."""
    return list(dict.fromkeys(name for names in of for name in names))


def words(numbers: Estimates, metrics: Sequence[str]) -> list[str]:
    """Format estimates; a no-break space keeps an interval's ends together on narrow screens."""
    return [numbers[metric].words.replace(", ", ",\u00a0") if metric in numbers else "-" for metric in metrics]


def _kept(kept: Sequence[KeptVersion]) -> str:
    rows = [(each.file, str(each.version), each.why, each.digest or "-") for each in kept]
    return table("Models that are kept", ["file", "version", "why", "SHA-256"], rows) if rows else ""


def _pooled(findings: Sequence[Findings]) -> str:
    if not findings:
        return ""
    metrics = metric_names(found.pooled for found in findings)
    rows = [(metric, *(words(found.pooled, [metric])[0] for found in findings)) for metric in metrics]
    rows.insert(0, ("samples", *(_samples(found.pooled) for found in findings)))
    caption = f"All silos' samples together. {INTERVALS}"
    notes = "" if any(found.split == "test" for found in findings) else _ONLY_VALIDATION
    return table(caption, ["", *(found.title for found in findings)], rows) + notes


_ONLY_VALIDATION = "<p>No test split was evaluated: these numbers chose the version, so they flatter it.</p>"


def _silos(found: Findings) -> str:
    if not found.silos:
        return "<p>Numbers of single silos are sealed, or nobody told them.</p>" if found.pooled else ""
    if found.shared:
        return f"<p>All {len(found.silos)} silos were tested on one shared split: each has these numbers.</p>"
    metrics = metric_names(found.silos.values())
    names = thin(list(found.silos), MOST_SILOS)
    rows = [(silo, _samples(found.silos[silo]), *words(found.silos[silo], metrics)) for silo in names]
    return table(f"Each silo: {found.title}. In brackets: the 95 % interval.", ["silo", "samples", *metrics], rows)


def _samples(numbers: Estimates) -> str:
    most = max((each.support for each in numbers.values()), key=len, default={})
    if len(most) < 2:
        return str(sum(most.values())) if most else "-"
    by_class = ", ".join(f"{label}:\u00a0{count}" for label, count in list(most.items())[:10])
    return f"{sum(most.values())} ({by_class})"


def _fairness(found: Findings, lower: frozenset[str]) -> str:
    rows = [fairness.cells(row) for row in fairness.fairness(found, lower)]
    caption = (
        f"How evenly silos are served: {found.title}. The gap is from the worst silo to the best. Mean and variance "
        "(the mean squared distance from the mean) count each silo once, however many samples it has."
    )
    return table(caption, fairness.HEAD, rows) if rows else ""


def _meanings(found: Findings) -> str:
    known = [name for name in found.pooled if name in MEANINGS]
    rows = "".join(f"<dt>{name}</dt><dd>{escape(MEANINGS[name])}</dd>" for name in known)
    return f"<dl>{rows}</dl>" if rows else ""


def _side_by_side(runs: Sequence[RunData]) -> str:
    mains = [(run, run.results.main) for run in runs]
    metrics = metric_names(main.pooled for _, main in mains if main is not None)
    rows = [
        (metric, *("-" if main is None else words(main.pooled, [metric])[0] for _, main in mains)) for metric in metrics
    ]
    if not rows:
        return ""
    what = ("of", *("-" if main is None else main.title for _, main in mains))
    return table(f"All silos' samples together. {INTERVALS}", ["", *(run.label for run in runs)], [what, *rows])


def _gains(run: RunData, metric: str) -> str:
    matrix = run.results.cross_site
    head, rows = ([], []) if matrix is None else gains(matrix, metric)
    caption = (
        f"{metric}: gain over the model that the silo trained alone, on its own test samples; positive is better. In "
        "brackets: 95 % intervals of the difference, both models judged by the same samples."
    )
    return table(caption, head, thin(rows, MOST_SILOS)) if rows else ""


def _cross_pooled(run: RunData) -> str:
    matrix = run.results.cross_site
    pooled = {} if matrix is None else matrix.pooled
    subjects = metric_names(pooled.values())
    rows = [
        (SUBJECTS.get(subject, subject), *(words(pooled[name], [subject])[0] for name in pooled))
        for subject in subjects
    ]
    caption = f"All silos' test samples together; a silo's own model on its own samples. {INTERVALS}"
    return (table(caption, ["model", *pooled], rows) if rows else "") + _pooled_gain(matrix)


def _pooled_gain(matrix: CrossSiteTable | None) -> str:
    gain = {} if matrix is None else matrix.pooled_gain
    subjects = metric_names(gain.values())
    rows = [(SUBJECTS.get(each, each), *(signed(gain[name].get(each)) for name in gain)) for each in subjects]
    caption = "Gain over the models that silos trained alone, all test samples together; positive is better"
    return table(caption, ["model", *gain], rows) if rows else ""
