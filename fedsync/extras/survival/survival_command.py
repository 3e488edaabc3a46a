"""Command ``fedsync survival``: survival curves, log-rank test and Cox regression over all silos."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from fedsync.common.errors import ConfigError
from fedsync.common.files import check_result, write_result
from fedsync.observe.tables import new_table
from fedsync.observe.terminal import Terminal


def survival(
    folder: Annotated[Path | None, typer.Argument(metavar="DIR", help="Folder of a run of survival analysis.")] = None,
    silo: Annotated[
        Path | None, typer.Option("--silo", metavar="FILE", help="At a real silo: its silo.yaml, in the place of DIR.")
    ] = None,
    run: Annotated[str | None, typer.Option("--run", help="At a real silo: the run; the newest by default.")] = None,
    out: Annotated[Path | None, typer.Option("--out", metavar="FILE", help="JSON to write.")] = None,
) -> None:
    """Show survival curves, log-rank test and Cox regression over all silos' persons."""
    from fedsync.extras.survival.survival_results import result_here, result_of_run

    if (folder is None) == (silo is None):
        raise ConfigError("fedsync survival", "either a run or a silo's file is needed", "Add DIR, or --silo FILE")
    if run is not None and folder is not None:
        raise ConfigError("--run", "DIR already names the run", "Leave --run out")
    if out is not None:
        check_result(out, "--out")
    found = result_of_run(folder) if folder is not None else result_here(Path(str(silo)), run)
    console = Terminal()
    for table in _tables(found):
        console.print(table)
    if out is not None:
        write_result(out, (json.dumps(found, indent=2) + "\n").encode())
        console.print(f"File: {out}", soft_wrap=True)


def _tables(found: dict[str, Any]) -> list[Table]:
    tables = []
    for curve in found["curves"]:
        many = "" if curve["persons"] is None else f"{curve['persons']} "
        title = f"Survival, {curve['group']}: {many}persons of {found['silos']} silos"
        table = new_table(title, "time", "survival", "95 % interval", "left")
        lines = zip(*(curve[name] for name in ("times", "survival", "low", "high", "left")), strict=True)
        for time, share, low, high, left in lines:
            table.add_row(f"{time:g}", f"{share:.4f}", f"{low:.4f} .. {high:.4f}", str(left))
        tables.append(table)
    if "log_rank" in found:
        test = found["log_rank"]
        tables.append(table := new_table("Log-rank test of the groups", "chi-squared", "degrees", "p"))
        table.add_row(f"{test['statistic']:.4f}", str(test["degrees"]), f"{test['p']:.3g}")
    elif "no_log_rank" in found:
        tables.append(table := new_table("Log-rank test of the groups", "none, because"))
        table.add_row(found["no_log_rank"])
    if "cox" in found:
        cox = found["cox"]
        state = "" if cox["converged"] else "; not converged: raise survival.steps"
        if apart := ", ".join(cox["separated"]):
            state = f"; not converged: {apart} (nearly) separates events from others. Leave it out"
        counted = "" if cox["persons"] is None else f", {cox['persons']} persons, {cox['events']} events"
        title = f"Cox regression{counted}{state}"
        table = new_table(title, "covariate", "coefficient", "error", "hazard ratio", "95 % interval", "p")
        for each in cox["covariates"]:
            names = ("coefficient", "error", "ratio", "low", "high", "p")
            *numbers, low, high, p = ("-" if each[name] is None else f"{each[name]:.4g}" for name in names)
            table.add_row(each["covariate"], *numbers, f"{low} .. {high}" if cox["converged"] else "-", p)
        tables.append(table)
    return tables
