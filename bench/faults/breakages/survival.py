"""Mutants of survival analysis: wrong estimates, and sums of too few persons."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/evaluation/survey/test_survival_sums.py",
    "tests/attacks/test_survival.py",
    "tests/tasks/test_cox.py",
    "tests/simulation/test_survival.py",
)

_CHANGES: Changes = {
    "extras/survival/survival_sums.py": (
        ("a-cell-of-one-person-is-summed", "if persons >= least:", "if persons >= 1:"),
        ("persons-beyond-the-grid-die-at-its-end", "rows.events & (at < len(form.grid))", "rows.events"),
        ("times-are-rounded-down", 'side="left")', 'side="right")'),
        ("sums-of-different-silos-are-mixed", "((each > 0) != (marks[0] > 0)).any()", "False"),
        ("persons-with-gaps-are-in-the-regression", "~np.isnan(rows.covariates).any(axis=1)", "rows.times > 0"),
    ),
    "extras/survival/survival_estimates.py": (
        ("ties-count-as-breslow-s", "at_risk - tie / events[cell] * died[cell]", "at_risk - 0 * died[cell]"),
        ("censored-persons-leave-too-early", "lived[cells[1].ends >= end]", "lived[cells[1].ends > end]"),
        ("a-line-tells-of-four-persons", "((figures > 0) & (figures < least)).any()", "False"),
        ("few-persons-are-left-behind-a-line", "np.concatenate([since.ravel(), left])", "since.ravel()"),
    ),
    "silo/owner/owner_policy.py": (
        ("any-grid-is-fine-enough-for-the-owner", "len(survival.times) > self.limits.times", "False"),
    ),
    "extras/survival/cox.py": (
        ("the-loss-takes-ties-as-breslow-s", "at_risk[cell] - tie * died[cell]", "at_risk[cell]"),
        ("censored-rows-are-events-in-the-loss", "risk[happened].sum()", "risk.sum()"),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
