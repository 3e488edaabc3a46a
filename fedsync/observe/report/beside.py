"""Additional files of a report."""

from __future__ import annotations

from collections.abc import Sequence

from fedsync.observe.report.card import CARD, model_card
from fedsync.observe.report.data import RunData
from fedsync.observe.report.paper import result_files, seed_files


def files_beside(runs: Sequence[RunData]) -> dict[str, str]:
    """Return file contents by name: model card and result tables of one run, or else tables over several seeds."""
    return {CARD: model_card(runs[0]), **result_files(runs[0])} if len(runs) == 1 else seed_files(runs)
