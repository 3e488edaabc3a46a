"""Kaplan-Meier curves, log-rank test and Cox regression from pooled sums.

With d events and n persons at risk at a time, in pooled counts:

- Kaplan-Meier: S(t) is the product of 1 - d/n up to t. The interval is that of log(-log S), with Greenwood's variance.
- Log-rank: observed minus expected events of each group, over their hypergeometric covariance; chi-squared with one
  degree of freedom less than there are groups.
- Cox: Newton's method on the partial likelihood, with Efron's treatment of ties. Let D0, D1, D2 be the sums of exp(bz),
  z exp(bz) and zz' exp(bz) over the d events of a cell, and R0, R1, R2 those over the persons at risk. Then the cell
  contributes, for l = 0 .. d - 1 and S = R - (l / d) D: -log S0 to the likelihood, -S1/S0 to its gradient, and
  S2/S0 - S1 S1'/S0^2 to the information.

Counts for all times stay within the silos' software. Users see only the result of `told`, which has fewer times.

Sources: Kaplan and Meier 1958; Mantel 1966; Cox 1972; Efron 1977.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any

import numpy as np

from fedsync.common.errors import ConfigError
from fedsync.evaluation.survey.findings import hide_small
from fedsync.extras.survival.survival_sums import (
    MOST_RISK,
    Cells,
    Counts,
    CoxSums,
    Floats,
    SurvivalForm,
    SurvivalSums,
    cells_of_sums,
)

_Z = NormalDist().inv_cdf(0.975)
_CONVERGED = 1e-6
_SEPARATED = 1.3
"""Least growth of a standard error in each of two steps that shows a coefficient without bound; it tends to 1.65."""
_SINGULAR = 1e-9
"""Smallest eigenvalue of the information's correlations up to which only rounding tells covariates apart."""


@dataclass(frozen=True, slots=True)
class SurvivalCurve:
    """Kaplan-Meier curve at the times of the grid, float64 [times] each; ``at_risk`` is int64."""

    survival: Floats
    low: Floats
    high: Floats
    at_risk: Counts


@dataclass(frozen=True, slots=True)
class LogRank:
    """Log-rank test of all groups."""

    statistic: float
    degrees: int
    p: float


@dataclass(frozen=True, slots=True)
class CoxFit:
    """Cox model: coefficients and their standard errors, float64 [covariates], in the units of the columns.

    ``likelihood`` is the logarithm of the partial likelihood before the last of the ``steps``. Without convergence,
    ``separated`` tells for which covariates the likelihood grows with the coefficient without bound.
    """

    coefficients: Floats
    errors: Floats
    likelihood: float
    steps: int
    converged: bool
    separated: tuple[bool, ...] = ()


def kaplan_meier(counts: Counts) -> SurvivalCurve:
    """Return the curve of counts [times, 2]: events and censored."""
    happened, at_risk = counts[:, 0], _at_risk(counts)
    with np.errstate(divide="ignore", invalid="ignore"):
        kept = np.where(at_risk > 0, 1 - happened / np.maximum(at_risk, 1), 1.0)
        survival = np.asarray(np.cumprod(kept), dtype=np.float64)
        left = at_risk - happened
        variance = np.cumsum(np.where(left > 0, happened / np.maximum(at_risk * left, 1), 0.0))
        logs = np.log(survival)
        half = _Z * np.sqrt(variance) / np.abs(logs)
        low, high = survival ** np.exp(half), survival ** np.exp(-half)
    inside = (survival > 0) & (survival < 1)
    return SurvivalCurve(survival, np.where(inside, low, survival), np.where(inside, high, survival), at_risk)


def log_rank(counts: Counts) -> LogRank:
    """Return the test of counts [groups, times, 2]; raises `ConfigError` if groups cannot be compared."""
    at_risk = np.array([_at_risk(each) for each in counts], dtype=np.float64)
    happened, persons = counts[:, :, 0].sum(axis=0).astype(np.float64), at_risk.sum(axis=0)
    used = persons > 1
    share = at_risk[:, used] / persons[used]
    difference = (counts[:, used, 0] - happened[used] * share).sum(axis=1)
    factor = happened[used] * (persons[used] - happened[used]) / (persons[used] - 1)
    covariance = np.diag((factor * share).sum(axis=1)) - (factor * share) @ share.T
    degrees = len(counts) - 1
    if np.linalg.matrix_rank(covariance) < degrees:
        raise ConfigError("task.survival.group", "a group has no person at risk at any event", "Leave it out")
    statistic = float(difference[:-1] @ np.linalg.solve(covariance[:-1, :-1], difference[:-1]))
    return LogRank(statistic, degrees, chi_squared_tail(statistic, degrees))


def chi_squared_tail(value: float, degrees: int) -> float:
    """Probability that chi-squared exceeds ``value``; the gamma function of halves of integers has a finite sum."""
    half, odd = value / 2, degrees % 2
    terms = (math.pow(half, at - odd / 2) / math.gamma(at + 1 - odd / 2) for at in range(odd, (degrees + odd) // 2))
    return (math.erfc(math.sqrt(half)) if odd else 0.0) + math.exp(-half) * sum(terms)


def cox_fit(form: SurvivalForm, sums: SurvivalSums) -> CoxFit:
    """Return the model after all steps so far; raises `ConfigError` if a covariate depends on others."""
    beta = kept = np.zeros(len(form.covariates))
    best, change = -np.inf, np.inf
    errors, used = np.full(len(beta), np.nan), 0
    grown = np.zeros(len(beta), dtype=np.int64)
    if sums.steps:
        cells = cells_of_sums(sums.complete, form.least)
        first = _events_of(cells[0], sums)
        linear = sums.steps[0].events[:, 1 : 1 + len(beta)].sum(axis=0)
    for step in sums.steps:
        value, gradient, information = _likelihood(cells, first, linear, step, beta)
        used += 1
        cut_off = step.events[:, 0].sum() + step.censored[:, 0].sum() >= math.exp(MOST_RISK)
        if cut_off or value < best - 1e-9 * abs(value):  # too far: go back half of the way
            beta = (beta + kept) / 2
            continue
        best, kept = value, beta
        before, (move, errors) = errors, _step(gradient, information)
        grown = np.where(errors > _SEPARATED * before, grown + 1, 0)  # as if the best coefficient were infinite
        beta, change = beta + move, float(np.abs(move).max())
    scale = sums.scales[:, 1]
    converged = change < _CONVERGED
    separated = tuple((grown >= 2).tolist()) if not converged else ()
    return CoxFit(beta / scale, errors / scale, best, used, converged, separated)


def _step(gradient: Floats, information: Floats) -> tuple[Floats, Floats]:
    """Newton step and standard errors."""
    with np.errstate(all="ignore"):
        scale = np.sqrt(np.diag(information))
        correlations = information / np.outer(scale, scale)
    try:
        if np.linalg.eigvalsh(correlations)[0] > _SINGULAR:
            inverse = np.linalg.inv(information)
            return inverse @ gradient, np.sqrt(np.diag(inverse))
    except np.linalg.LinAlgError:
        pass
    problem = "a covariate follows from the others, or there are too few events for so many covariates"
    raise ConfigError("task.survival.covariates", problem, "Leave one out")


def next_beta(form: SurvivalForm, sums: SurvivalSums) -> Floats:
    """Return the coefficients at which the next step's sums are needed, in pooled deviations, float64 [covariates]."""
    return cox_fit(form, sums).coefficients * sums.scales[:, 1]


def _events_of(cells: Cells, sums: SurvivalSums) -> Counts:
    """Number of events in each cell, int64 [cells]."""
    found = np.zeros(len(cells.ends), dtype=np.int64)
    if len(found):
        np.add.at(found, cells.of, sums.complete[:, 0])
    return found


def _likelihood(
    cells: tuple[Cells, Cells], events: Counts, linear: Floats, sums: CoxSums, beta: Floats
) -> tuple[float, Floats, Floats]:
    """Logarithm of the partial likelihood at ``beta``, its gradient and information.

    Args:
        events: events of each cell, int64 [cells].
        linear: sum of z over all events, float64 [covariates].
    """
    count = len(beta)
    died, lived = sums.events[: len(cells[0].ends)], sums.censored[: len(cells[1].ends)]
    upper = np.triu_indices(count)
    value, gradient, information = float(linear @ beta), linear.copy(), np.zeros((count, count))
    for cell, end in enumerate(cells[0].ends):
        at_risk = died[cell:].sum(axis=0) + lived[cells[1].ends >= end].sum(axis=0)
        for tie in range(int(events[cell])):
            left = at_risk - tie / events[cell] * died[cell]
            if left[0] <= 0:
                raise ConfigError("task.survival", "the sums are not of persons at risk", "Begin another run")
            mean, second = left[1 : 1 + count] / left[0], np.zeros((count, count))
            second[upper] = left[1 + count :] / left[0]
            second.T[upper] = second[upper]
            value -= float(np.log(left[0]))
            gradient -= mean
            information += second - np.outer(mean, mean)
    return value, gradient, information


def _at_risk(counts: Counts) -> Counts:
    leaving = counts.sum(axis=1)
    return np.asarray(leaving[::-1].cumsum()[::-1])


def told(form: SurvivalForm, sums: SurvivalSums) -> dict[str, Any]:
    """Return the publishable result, in which no difference of two lines describes fewer than ``least`` persons.

    Raises `ConfigError` as `cox_fit`.
    """
    at, whole = _far_apart(sums.counts, form.least), sums.counts.sum(axis=0)
    sizes = [_count(int(whole.sum()), form.least), *hide_small(sums.counts.sum(axis=(1, 2)).tolist(), form.least)]
    shown = zip(("all", *form.groups), (whole, *sums.counts), sizes, strict=False)
    curves = [{"group": name, "persons": size, **_lines(form, counts, at)} for name, counts, size in shown]
    document: dict[str, Any] = {"silos": sums.silos, "least": form.least, "curves": curves}
    if form.groups and (why := _incomparable(form, sums.counts)):
        document["no_log_rank"] = why
    elif form.groups:
        try:
            test = log_rank(sums.counts[sums.counts.any(axis=(1, 2))])
        except ConfigError as error:
            document["no_log_rank"] = f"{error.problem}. {error.remedy}"
        else:
            document["log_rank"] = {"statistic": _short(test.statistic), "degrees": test.degrees, "p": _short(test.p)}
    if sums.steps:
        fit = cox_fit(form, sums)
        rows = zip(form.covariates, fit.coefficients, fit.errors, strict=True)
        # A few persons with gaps would follow from the persons of the curves.
        gaps = np.abs(sums.counts.sum(axis=(0, 1)) - sums.complete.sum(axis=0))
        implied = bool(((gaps > 0) & (gaps < form.least)).any())
        document["cox"] = {
            "persons": None if implied else _count(int(sums.complete.sum()), form.least),
            "events": None if implied else _count(int(sums.complete[:, 0].sum()), form.least),
            "steps": fit.steps,
            "converged": fit.converged,
            "separated": [name for name, one in zip(form.covariates, fit.separated, strict=False) if one],
            "log_likelihood": _short(fit.likelihood),
            "covariates": [_hazard(name, float(b), float(error), converged=fit.converged) for name, b, error in rows],
        }
    return document


def _incomparable(form: SurvivalForm, counts: Counts) -> str:
    """Return why these groups have no log-rank test, and the remedy; "" if they have one. Empty groups do not count."""
    sizes = dict(zip(form.groups, counts.sum(axis=(1, 2)).tolist(), strict=True))
    if few := [name for name, size in sizes.items() if 0 < size < form.least]:
        return f"fewer than {form.least} persons are in {', '.join(few)}. Join groups, or add silos"
    return "" if sum(size > 0 for size in sizes.values()) > 1 else "only one group has persons. Correct the categories"


def _far_apart(counts: Counts, least: int) -> list[int]:
    """Times between which, in each group, no or at least ``least`` persons have events, are censored, or are left."""
    at: list[int] = []
    since, left = np.zeros_like(counts[:, 0]), counts.sum(axis=(1, 2))
    for time in range(counts.shape[1]):
        since, left = since + counts[:, time], left - counts[:, time].sum(axis=1)
        figures = np.concatenate([since.ravel(), left])
        if since.any() and not ((figures > 0) & (figures < least)).any():
            at, since = [*at, time], np.zeros_like(since)
    return at


def _lines(form: SurvivalForm, counts: Counts, at: list[int]) -> dict[str, Any]:
    curve = kaplan_meier(counts)
    after = curve.at_risk - counts.sum(axis=1)
    columns = {"survival": curve.survival, "low": curve.low, "high": curve.high}
    return {
        "times": [form.grid[time] for time in at],
        "left": [int(after[time]) for time in at],
        **{name: [_short(float(values[time]), 4) for time in at] for name, values in columns.items()},
    }


def _hazard(name: str, coefficient: float, error: float, *, converged: bool) -> dict[str, Any]:
    low = ratio = high = p = math.nan
    if converged:
        with np.errstate(over="ignore"):  # per unit of a column of tiny numbers, a ratio may be beyond all floats
            low, ratio, high = (float(np.exp(coefficient + side * _Z * error)) for side in (-1, 0, 1))
        p = 2 * NormalDist().cdf(-abs(coefficient / error)) if error > 0 else p
    numbers = {"coefficient": coefficient, "error": error, "ratio": ratio, "low": low, "high": high, "p": p}
    known = {key: _short(value) if math.isfinite(value) else None for key, value in numbers.items()}
    return {"covariate": name, **known}


def _count(count: int, least: int) -> int | str:
    return f"<{least}" if 0 < count < least else count


def _short(value: float, digits: int = 6) -> float:
    return float(f"{value:.{digits - 1}e}")
