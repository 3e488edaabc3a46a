"""Model card in Markdown: model, data, training, privacy, results and limits.

Source: Mitchell et al., Model Cards for Model Reporting, FAT* 2019. The card has the sections that a run can fill.
"""

from __future__ import annotations

import platform
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from fedsync import __version__
from fedsync.observe.report import fairness
from fedsync.observe.report.data import RunData
from fedsync.observe.report.paper import result_rows
from fedsync.observe.report.results import Findings
from fedsync.observe.report.text_tables import markdown, plain

CARD = "model-card.md"

_SETTINGS = (
    *("task", "local", "predictor", "balancer", "barrier", "aggregation", "server_optimizer"),
    *("stop", "wire", "model", "evaluation"),
)
_PATH = "(a path)"
_ABSOLUTE = re.compile(r"""(?<![\w/.:])(?:~|[A-Za-z]:)?[/\\][^\s,;:'"()]+""")
_LIBRARIES = ("torch", "flwr", "numpy", "tenseal")


def model_card(run: RunData) -> str:
    sections = {
        "Model": _model(run),
        "Data": _data(run),
        "Training": _training(run),
        "Privacy": _privacy(run),
        "Results": _results(run),
        "Limits": (f"- {plain(_ABSOLUTE.sub(_PATH, limit))}" for limit in _limits(run)),
        "Software": _software(run),
    }
    title = f"# Model card: {plain(run.label)}"
    return "\n\n".join([title, *("\n".join([f"## {name}", "", *lines]) for name, lines in sections.items())]) + "\n"


def _model(run: RunData) -> Iterator[str]:
    for kept in run.results.kept:
        digest = f", SHA-256 {plain(kept.digest)}" if kept.digest else ""
        yield f"- {kept.subject.capitalize()} version: {kept.version} ({plain(kept.why)})."
        yield f"  File: {plain(kept.file)}{digest}."
    if not run.results.kept:
        yield f"The last version, {run.summary['rounds']}. The run does not say which one was the best."
    yield "\nA run does not know what its model is meant for, and what it must not be used for. Say so in a page of"
    yield "your own: `fedsync report` writes this one anew each time."


def _data(run: RunData) -> Iterator[str]:
    yield f"{len(run.silos or run.summary['silos'])} silos. Their data stayed with them."
    if run.examples:
        sizes = [[silo, f"{examples:,}"] for silo, examples in run.examples.items()]
        yield f"\n{markdown(['silo', 'training samples'], sizes)}"
    else:
        yield "How many training samples each has is sealed, or not known."
    told = run.results.statistics
    if told is not None:
        yield f"\nColumns over all silos together, without counts below {told.least}. Rows: {plain(told.rows)}."
        if told.classes:
            yield f"Samples by class: {plain(', '.join(told.classes))}."
        yield f"\n{markdown(['column', 'kind', 'known', 'missing', 'mean', 'deviation'], told.columns)}"


def _training(run: RunData) -> Iterator[str]:
    summary = run.summary
    strategy, runtime = plain(str(summary["strategy"])), plain(str(summary["runtime"]))
    yield f"- Strategy: {strategy}, seed {summary['seed']}, runtime {runtime}."
    yield f"- {summary['rounds']} versions in {summary['seconds']:.1f} {run.clock}."
    yield f"- {summary['samples']:,} samples processed; one that is seen again counts again."
    yield f"- Ended: {plain(str(summary['stopped_by'] or 'it has not ended'))}."
    for section in _SETTINGS:
        words = _words(run.settings.get(section))
        if words:
            yield f"- {section}: {plain(words)}"


def _words(value: object) -> str:
    """Format a section of the strategy on one line, without unset values."""
    if isinstance(value, Mapping):
        parts = [(key, _words(item), isinstance(item, Mapping)) for key, item in value.items()]
        return ", ".join(f"{key} ({words})" if deeper else f"{key} {words}" for key, words, deeper in parts if words)
    if isinstance(value, list):
        return " and ".join(map(_words, value))
    # Paths on a machine are private.
    return "" if value is None else _PATH if isinstance(value, str) and re.search(r"[/\\]", value) else str(value)


def _privacy(run: RunData) -> Iterator[str]:
    cipher: Mapping[str, Any] = run.settings.get("cipher") or {}
    kind, share = cipher.get("kind"), run.summary.get("sealed_share")
    if kind is None:
        yield "- What was encrypted is not known."
    elif kind == "plain":
        yield "- Updates were not encrypted: who ran the server could read each silo's updates, losses and scores."
    else:
        yield f"- Silos encrypted their updates ({plain(str(kind))}) with keys that the server does not have."
        if share is not None:
            yield f"- {share:.1%} of the model's values travelled so."
        yield f"- Silos open a version only if {cipher.get('members', 1)} updates at least are in it."
        if cipher.get("metrics") == "sealed":
            yield "- Losses, scores and numbers of samples of single silos were sealed from the server, too."
        else:
            yield "- Each silo told the server its own losses and scores."
    privacy: Mapping[str, Any] | None = run.settings.get("privacy")
    if privacy is None:
        told = "It may tell of the samples it was trained on: nothing is differentially private."
        yield f"- All silos have the model. {told}"
        return
    noise, target = privacy.get("noise_multiplier"), privacy.get("target_epsilon")
    told = f"noise {noise:g}" if noise is not None else f"target epsilon {target:g} at delta {privacy['delta']:g}"
    yield f"- Silos trained by DP-SGD (clip {privacy['clip']:g}, {told}). Each silo's ledger has what was spent."
    if run.summary.get("runtime") == "virtual":
        yield "- The noise came from the run's seed, as always in virtual time: this model is not private."
    if privacy.get("score_noise") is not None:
        yield f"- Scores have noise of {privacy['score_noise']:g} right predictions a silo, also the best and the last."


def _results(run: RunData) -> Iterator[str]:
    main = run.results.main
    if main is None:
        known = {"score": run.summary["accuracy"], "loss": run.summary["loss"]}
        told = [f"{name} {value:.4f}" for name, value in known.items() if value is not None]
        yield f"Of the last version that was scored, without intervals: {', '.join(told) or 'nothing'}."
        if run.noisy and told:
            yield f"{run.noisy}."
        return
    yield f"{plain(main.title[:1].upper() + main.title[1:])}. Value, in brackets its 95 % interval.\n"
    yield markdown(*result_rows(main))
    rows = [fairness.cells(row) for row in fairness.fairness(main, run.results.lower)]
    if rows:
        yield f"\nHow evenly silos are served:\n\n{markdown(fairness.HEAD, rows)}"
    if run.noisy:
        yield f"\n{run.noisy}. A silo may be the worst by noise alone."


def _limits(run: RunData) -> Iterator[str]:
    main = run.results.main
    if not run.ended:
        yield "The run has not ended; all of this is as far as it went."
    if main is not None:
        yield from _limits_of(main, run)
    if run.unvalidated:
        yield (
            f"{len(run.unvalidated)} silos hold out no validation split. In the rounds, and where a version was chosen "
            "by scores, theirs are of the test split. So results there flatter the best version."
        )
    yield from run.results.cross_site.missing if run.results.cross_site is not None else ()
    failed = sum(silo["failures"] for silo in run.summary["silos"])
    if failed:
        yield f"{failed} orders failed."
    yield from (str(note) for note in run.summary["notes"])
    yield "Intervals are of other samples from the same silos. They say nothing of other silos, nor of other seeds."


def _limits_of(main: Findings, run: RunData) -> Iterator[str]:
    if main.split != "test":
        yield "No test split was evaluated. The validation split chose the version, so results flatter it."
    if not main.silos:
        yield "Results of single silos are sealed or were not told."
        return
    absent = [silo for silo in run.silos if silo not in main.silos]
    if absent:
        yield f"No result of {', '.join(absent)}."
    for silo, numbers in main.silos.items():
        unknown = [metric for metric, each in numbers.items() if each.value is None or each.low is None]
        if unknown:
            yield f"{silo}: the number or its interval is not estimable for {', '.join(unknown)}."


def _software(run: RunData) -> Iterator[str]:
    yield f"- The run: FedSync {plain(run.version or 'of an unknown version')}."
    yield f"- This card: FedSync {__version__}, Python {platform.python_version()}, {', '.join(_installed())}."


def _installed() -> Iterator[str]:
    for name in _LIBRARIES:
        try:
            yield f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
