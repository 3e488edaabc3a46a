"""Reader of `Results` from the files of a run's folder.

Files may come from another machine. A malformed file is refused with its name. Non-finite numbers count as missing.

| file | content used |
|---|---|
| ``summary.json`` | ``evaluation``, by split and subject; ``best`` and ``last``, the saved models |
| ``evaluation.json`` | ``curves``, by split and subject |
| ``rounds.jsonl`` | ``evaluation`` of each version, pooled and by silo |
| ``statistics.json`` | everything except histograms, see `fedsync.evaluation.survey.findings` |
| ``cross_site.json`` | everything, see `fedsync.extras.cross_site.cross_site_matrix` |
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from fedsync.common.errors import ConfigError
from fedsync.evaluation.survey.findings import STATISTICS
from fedsync.extras.report.results import (
    SUBJECTS,
    CrossSiteTable,
    Estimate,
    Findings,
    KeptVersion,
    Results,
    RoundNumbers,
    numbers_of,
)
from fedsync.observe.quality.evaluations import CROSS_SITE
from fedsync.observe.run_state import read_object


def read_results(folder: Path, summary: Mapping[str, Any] | None, config: Mapping[str, Any]) -> Results:
    """Read the results of a run.

    ``summary``: content of ``summary.json``; None if the run has not ended. Raises `ConfigError` if a file is
    malformed; the message names the file.
    """
    summary, lower = summary or {}, {"loss"}
    cross_site = _read_cross_site(folder / CROSS_SITE, lower)
    with _shape(folder / "summary.json"):
        evaluation = summary.get("evaluation") or {}
        lower.update(name for name, better in (evaluation.get("higher_is_better") or {}).items() if not better)
        kept = tuple(_kept(summary, config))
    curves = read_object(folder / "evaluation.json") or {}
    with _shape(folder / "evaluation.json"):
        findings = sorted(_findings(evaluation, curves), key=_importance) or list(_of_kept(kept))
    rounds, statistics = _read_rounds(folder / "rounds.jsonl"), _read_statistics(folder / STATISTICS)
    return Results(tuple(findings), rounds, cross_site, kept, frozenset(lower), statistics)


def _read_cross_site(path: Path, lower: set[str]) -> CrossSiteTable | None:
    """Read a ``cross_site.json``; None if the file is missing.

    ``lower``: metrics of which lower is better; the metrics of the file are added to this set. Raises `ConfigError` if
    the file is malformed.
    """
    document = read_object(path)
    if document is None:
        return None
    with _shape(path):
        metrics = document["metrics"]
        lower.update(name for name, metric in metrics.items() if not metric["higher_is_better"])
        models = tuple(_model(row) for row in document["models"])
        missing = tuple(f"{_model(row)}: {row['reason']}" for row in document["missing"])
        parts: dict[str, Any] = {
            key: {name: metric[key] for name, metric in metrics.items() if metric.get(key)}
            for key in ("matrix", "gain", "pooled", "pooled_gain")
        }
        return CrossSiteTable(silos=document["silos"], models=models, missing=missing, **parts)


def _model(row: Mapping[str, Any]) -> str:
    subject, silo, version = str(row["subject"]), row.get("silo"), row.get("version")
    if silo is not None:
        return f"{silo}, {subject}"
    return f"{subject} version" + ("" if version is None else f" ({version})") if subject in SUBJECTS else subject


@contextmanager
def _shape(path: Path) -> Iterator[None]:
    """Turn Python errors from a malformed file into a `ConfigError`."""
    try:
        yield
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError) as error:
        why = f"{type(error).__name__} {error}"
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            why = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise ConfigError(str(path), f"not of the shape that a run writes: {why}", "Run it again") from error


def _rule(config: Mapping[str, Any]) -> str:
    section = config.get("evaluation")
    rule = section.get("best") if isinstance(section, dict) else None
    metric, by = (rule.get("metric"), rule.get("by")) if isinstance(rule, dict) else (None, None)
    how = {"pooled": "over all silos", "worst": "of the worst silo"}.get(by or "pooled", f"by {by}")
    return f"best {metric or 'accuracy'} {how}"


def _findings(evaluation: Mapping[str, Any], curves: Mapping[str, Any]) -> Iterator[Findings]:
    for split in ("test", "validation"):
        for subject, found in (evaluation.get(split) or {}).items():
            drawn = ((curves.get(split) or {}).get(subject) or {}).get("curves") or {}
            yield Findings(subject=subject, split=split, **found, **drawn)


def _of_kept(kept: Iterable[KeptVersion]) -> Iterator[Findings]:
    for split in ("test", "validation"):
        for each in kept:
            numbers = each.test if split == "test" else each.metrics
            if numbers:
                pooled = {name: Estimate(value) for name, value in numbers.items()}
                yield Findings(each.subject, split, each.version, pooled)


def _importance(found: Findings) -> tuple[bool, int]:
    order = [*SUBJECTS, found.subject]
    return found.split != "test", order.index(found.subject)


def _kept(summary: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[KeptVersion]:
    for subject, why in (("best", _rule(config)), ("last", "newest version with a score")):
        model = summary.get(subject)
        if model and model.get("version") is not None:
            digest, metrics, test = model.get("digest") or "", model.get("metrics"), model.get("test")
            if subject == "last" and model["version"] < (newest := summary.get("commits", 0)):
                why += f"; the file has version {newest}, without a score"
            yield KeptVersion(subject, model["version"], why, digest, metrics, test)


def _read_rounds(path: Path) -> dict[str, list[RoundNumbers]]:
    rounds: dict[str, list[RoundNumbers]] = {}
    if not path.is_file():
        return rounds
    with path.open(encoding="utf-8", errors="replace") as file, _shape(path):
        for line in file:
            if not line.endswith("\n"):
                break
            row = json.loads(line)
            found = row.get("evaluation") or {}
            silos = {silo: numbers_of(told) for silo, told in (found.get("silos") or {}).items()}
            for name, value in numbers_of(found.get("pooled")).items():
                own = {silo: told[name] for silo, told in silos.items() if name in told}
                rounds.setdefault(name, []).append(RoundNumbers(int(row["round"]), value, own))
    return rounds


def _read_statistics(path: Path) -> dict[str, Any] | None:
    document = read_object(path)
    if document is None:
        return None
    names = ("column", "kind", "known", "missing", "mean", "deviation")
    with _shape(path):
        return {
            "rows": _told(document["rows"]),
            "classes": [f"{label}: {_told(count)}" for label, count in enumerate(document.get("classes") or ())],
            "least": int(document["least"]),
            "columns": [[_told(column.get(name)) for name in names] for column in document["columns"]],
        }


def _told(value: object) -> str:
    return "not told" if value is None else str(value)
