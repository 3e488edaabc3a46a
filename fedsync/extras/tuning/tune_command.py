"""Command ``fedsync tune``: ranking of strategies on a simulation that is fitted to a real run's journal."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.common.files import check_result, write_result
from fedsync.common.names import near_miss
from fedsync.observe.tables import new_table
from fedsync.observe.terminal import Terminal

if TYPE_CHECKING:
    from fedsync.extras.tuning.fit import SiloFit
    from fedsync.extras.tuning.search import Candidate, Ranked
    from fedsync.extras.tuning.twin import Predicted, Twin


def tune(
    folder: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="Folder of a run's files.")],
    task: Annotated[
        str | None, typer.Option("--task", metavar="FILE", help="Strategy file with the task; the run's by default.")
    ] = None,
    target: Annotated[
        float | None, typer.Option("--target", help="Train candidates here, and rank by time to this accuracy.")
    ] = None,
    strategies: Annotated[
        str | None, typer.Option("--strategies", metavar="A,B", help="Candidates; by default all without encryption.")
    ] = None,
    steps: Annotated[
        str | None, typer.Option("--steps", metavar="N,M", help="Local steps to try; by default those of the task.")
    ] = None,
    optimizers: Annotated[
        str, typer.Option("--optimizers", metavar="A,B", help="Server optimizers to try; none is one.")
    ] = "none",
    apply: Annotated[
        Path | None, typer.Option("--apply", metavar="FILE", help="Strategy file to write: the best candidate.")
    ] = None,
    silos: Annotated[
        Path | None, typer.Option("--silos", metavar="FILE", help="Silo file to write: the machines as fitted.")
    ] = None,
) -> None:
    """Fit simulated machines to a run's journal, report how well they reproduce the run, and rank strategies on them.

    Without --target, nothing is trained: candidates are ranked by samples per second.
    """
    from fedsync.config.strategy import StrategyConfig
    from fedsync.extras.tuning import search
    from fedsync.extras.tuning.records import read_record
    from fedsync.extras.tuning.twin import MapPlace, Twin

    for path, option in ((apply, "--apply"), (silos, "--silos")):
        if path is not None:
            check_result(path, option)
    record = read_record(folder)
    base = record.config if task is None else StrategyConfig.load(task)
    base.check_target(target)
    taus = [base.local.steps] if steps is None else _whole(steps)
    names = search.shipped() if strategies is None else strategies.split(",")
    console = Terminal()
    with console.status("replaying the run's strategy on its twin") as status:
        twin, replayed = Twin.of(record).checked()
        console.print(_machines(twin.fits))
        place = MapPlace.of(twin.fits, record.config.local.batch_size, record.config.local.steps)
        console.print(str(place))
        console.print(_said(twin, replayed))
        field, left = search.candidates(twin, base, names, taus, _kinds(optimizers))
        watch = status.update if console.is_terminal else console.print  # in place, or as lines
        ranked, note = _rank(twin, field, target, watch)
    for why in left:
        console.print(f"Left out: {why}")
    console.print(_ranking(ranked, target if not note else None))
    for one in ranked:
        if one.problem:
            console.print(f"Fails: {one.candidate}: {one.problem}")
    said = note or (f"ranked by time to {target:g}" if target is not None else "ranked by samples a second")
    console.print(said)
    if silos is not None:
        files = twin.write(silos)
        console.print(f"Silo file: {', '.join(map(str, files))}")
    if apply is not None:
        if not ranked or ranked[0].problem:
            raise ConfigError("--apply", "no candidate can be run", "Name others by --strategies")
        text = search.strategy_file(ranked[0], _why(ranked[0], said))
        write_result(apply, text.encode())
        console.print(f"Strategy file: {apply}")


def _rank(
    twin: Twin, field: Sequence[Candidate], target: float | None, watch: Callable[[str], None]
) -> tuple[list[Ranked], str]:
    """Return the candidates, the best first, and the reason if the ranking differs from the requested ranking."""
    from fedsync.extras.tuning.search import by_throughput, by_time_to

    if target is None:
        return by_throughput(twin, field, watch), ""
    from fedsync.simulation.run import run_virtual

    if not field:
        return [], ""
    try:
        return by_time_to(target, twin, field, run_virtual, watch), ""
    except FedSyncError as error:
        note = f"ranked by samples a second, as nothing can be trained here: {error}"
        return by_throughput(twin, field, watch), note


def _whole(text: str) -> list[int]:
    try:
        numbers = [int(part) for part in text.split(",")]
    except ValueError:
        numbers = [0]
    if min(numbers) < 1:
        raise ConfigError("--steps", f"{text!r} is no list of whole numbers from 1 on", "Write --steps 5,10,20")
    return list(dict.fromkeys(numbers))


def _kinds(text: str) -> list[str]:
    from fedsync.policies.schema import kinds

    known = kinds("server_optimizer")
    for kind in text.split(","):
        if kind != "none" and kind not in known:
            raise ConfigError("--optimizers", f"no server optimizer {kind!r}", near_miss(kind, ["none", *known]))
    return ["" if kind == "none" else kind for kind in dict.fromkeys(text.split(","))]


def _ranking(ranked: Sequence[Ranked], target: float | None) -> Table:
    title = f"Candidates, the best first{'' if target is None else f'; target {target:g}'}"
    times = ("s to target (90 %)", "s a round (90 %)", "samples/s")
    names = ("strategy", "optimizer")
    table = new_table(title, "strategy", "steps", "interval s", "optimizer", *times, left=names)
    for one in ranked:
        candidate, predicted = one.candidate, one.predicted
        reached = "-" if one.accuracy is None else f"not in time, at {one.accuracy:.3f}"
        reached = reached if one.once_s is None else f"{one.once_s:.3g}, played once"
        table.add_row(
            candidate.strategy,
            str(candidate.steps),
            "-" if candidate.interval_s is None else f"{candidate.interval_s:g}",
            candidate.optimizer or "-",
            "fails" if one.problem else reached if one.seconds is None else str(one.seconds),
            "-" if predicted is None else str(predicted.round_s),
            "-" if predicted is None else f"{predicted.samples_a_second:.0f}",
        )
    return table


def _why(best: Ranked, said: str) -> str:
    figures = ""
    if best.seconds is not None:
        figures = f": {best.seconds} s to the target on the twin, with 90 %"
    elif best.predicted is not None:
        figures = f": {best.predicted.samples_a_second:.0f} samples a second, {best.predicted.round_s} s a round"
    return f"first of those that fedsync tune played, {said}{figures}"


def _machines(fits: tuple[SiloFit, ...]) -> Table:
    columns = ("silo", "orders", "samples/s", "ms a step", "jitter", "overhead s", "Mbit/s", "load", "away")
    table = new_table("Machines as the journal shows them", *columns, left=("silo", "load"), wraps="load")
    for fit in fits:
        config = fit.config
        launch_s = getattr(config.curve, "launch_s", 0.0)
        table.add_row(
            config.name,
            str(fit.orders),
            f"{config.speed:.4g}",
            f"{1e3 * launch_s:.3g}" if launch_s else "-",
            f"{config.jitter:.2f}" if config.jitter else "-",
            f"{config.overhead_s:.3g}" if config.overhead_s else "-",
            f"{config.bandwidth_mbps:.4g}" if config.bandwidth_mbps else "-",
            fit.load,
            str(fit.crashes) if fit.crashes else "-",
        )
    return table


def _said(twin: Twin, replayed: Predicted) -> str:
    actual = "one round only" if twin.actual_s is None else f"{twin.actual_s:.3g}"
    said = f"{twin.config.name}, seconds a round: {replayed.round_s} predicted with 90 %, {actual} actual"
    if twin.wider:
        said += f"; intervals of others are {100 * twin.wider:.0f} % wider each way, as the run lies outside its own"
    return said
