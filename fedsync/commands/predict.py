"""Command ``fedsync predict``: the errors of each speed predictor on a recorded series of speeds."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.progress import BarColumn, Progress, TimeElapsedColumn
from rich.table import Table

from fedsync.common.errors import ConfigError
from fedsync.common.files import check_result, write_result
from fedsync.common.names import near_miss
from fedsync.observe.tables import new_table
from fedsync.observe.terminal import Terminal, WordsColumn
from fedsync.policies.predict.predictor_base import predictors as all_predictors

if TYPE_CHECKING:
    from fedsync.extras.predictors.backtest import BacktestErrors


def predict(
    trace: Annotated[Path, typer.Argument(help="CSV file with the columns step, speed, cpu, memory.")],
    predictors: Annotated[
        str, typer.Option("--predictors", metavar="A,B,...", help="Predictors to compare; all by default.")
    ] = ",".join(all_predictors()),
    out: Annotated[Path | None, typer.Option("--out", help="JSON file to write.")] = None,
    warmup: Annotated[int, typer.Option("--warmup", min=1, help="Number of first steps that do not count.")] = 500,
) -> None:
    """Forecast a recorded speed one step ahead with each predictor, and print the errors.

    A forecast knows the cpu and memory of its row, but not the speed.
    """
    from fedsync.extras.predictors.backtest import backtest, read_trace

    known = all_predictors()
    kinds = _kinds(predictors, known)
    if out is not None:
        check_result(out, "--out")
    steps = read_trace(trace)
    if len(steps) <= warmup:
        raise ConfigError(
            str(trace), f"{len(steps)} steps, of which {warmup} are warm-up", "Record more, or lower --warmup"
        )
    # The other predictors are compared with the moving average.
    asked = kinds if "ema" in kinds else ["ema", *kinds]
    scores: dict[str, BacktestErrors] = {}
    columns = (WordsColumn("{task.description}", "bold"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Terminal(stderr=True), transient=True) as bar:
        line = bar.add_task("", total=len(asked) * len(steps))
        for kind in asked:
            bar.update(line, description=kind)
            scores[kind] = backtest(known[kind], steps, warmup, lambda: bar.advance(line))
    table = _table(scores, kinds, len(steps), warmup)
    Terminal().print(table)
    if out is not None:
        errors = {kind: {"rmse": scores[kind].rmse, "mae": scores[kind].mae} for kind in kinds}
        content = {"predictors": errors, "steps": len(steps), "warmup": warmup}
        write_result(out, f"{json.dumps(content, indent=2)}\n".encode())


def _kinds(text: str, known: Collection[str]) -> list[str]:
    kinds = list(dict.fromkeys(kind.strip() for kind in text.split(",") if kind.strip()))
    if not kinds:
        raise ConfigError("--predictors", "names none", near_miss("", known))
    for kind in kinds:
        if kind not in known:
            raise ConfigError("--predictors", f"unknown predictor {kind!r}", near_miss(kind, known))
    return kinds


def _table(scores: dict[str, BacktestErrors], kinds: Sequence[str], steps: int, warmup: int) -> Table:
    title = f"One step ahead over steps {warmup + 1} to {steps} [samples/s]"
    table = new_table(title, "predictor", "RMSE", "MAE", "RMSE / EMA's")
    ema = scores["ema"].rmse
    for kind in kinds:
        score = scores[kind]
        ratio = f"{score.rmse / ema:.3f}" if ema > 0 else "-"
        table.add_row(kind, f"{score.rmse:.4g}", f"{score.mae:.4g}", ratio)
    return table
