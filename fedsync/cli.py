"""Command line with ``fedsync run`` and ``fedsync compare``; the other commands are in `fedsync.commands`."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from click.core import ParameterSource
from rich.logging import RichHandler

from fedsync.commands import register
from fedsync.common.errors import ConfigError, FedSyncError, PolicyError, RunError
from fedsync.common.files import write_result
from fedsync.common.foreign import SHOWN
from fedsync.common.output import guard_output, output_may_be_lost
from fedsync.common.processes import safe_paths
from fedsync.common.run_claim import Claim, Existing, claim
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.evaluation.survey.findings import STATISTICS
from fedsync.observe.progress import RunProgress
from fedsync.observe.tables import Comparison, comparison_table, silo_table
from fedsync.observe.terminal import Terminal, words

app = typer.Typer(
    help="Federated learning for silos of unequal speed, on Flower.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
console = Terminal()

Runner = Callable[..., dict[str, Any]]

EXIT_FAILED, EXIT_USER, EXIT_INTERRUPTED = 1, 2, 130


class Runtime(StrEnum):
    """Environment in which a strategy runs."""

    VIRTUAL = "virtual"
    FLOWER = "flower"
    LOCAL = "local"


Silos = Annotated[str, typer.Option("--silos", help="Silo file: a path, or the name of a shipped one.")]
Set = Annotated[list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Override one value, as a.b=c.")]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="Override the seed.")]
Target = Annotated[
    float | None,
    typer.Option("--target-accuracy", help="Report the seconds to this accuracy; does not stop."),
]
TimingOnly = Annotated[
    bool, typer.Option("--timing-only", help="Virtual runtime: simulate the time and all decisions, train nothing.")
]
ModelBytes = Annotated[
    int | None,
    typer.Option("--model-bytes", min=4, help="With --timing-only: size of the model to transfer; 1000000 by default."),
]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace what an earlier run left in the folder.")]
Journal = Annotated[
    bool,
    typer.Option(
        "--journal/--no-journal", help="With --timing-only: write no journal and no rounds, for very many silos."
    ),
]


@app.command()
def run(
    context: typer.Context,
    strategy: Annotated[
        str | None, typer.Argument(help="Strategy file: a path, or the name of a shipped one.", show_default=False)
    ] = None,
    silos: Silos = "hetero",
    runtime: Annotated[Runtime, typer.Option("--runtime", help="Where to run.")] = Runtime.LOCAL,
    assignments: Set = None,
    seed: Seed = None,
    target_accuracy: Target = None,
    timing_only: TimingOnly = False,
    model_bytes: ModelBytes = None,
    journal: Journal = True,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the run's files; left out, a new one below runs.")
    ] = None,
    overwrite: Overwrite = False,
    resume: Annotated[
        Path | None,
        typer.Option("--resume", metavar="DIR", help="Local runtime: go on with the run in this folder; no STRATEGY."),
    ] = None,
) -> None:
    """Run one strategy, or continue an interrupted run."""
    start = _starter(runtime, target_accuracy, timing_only, model_bytes, journal)
    if resume is not None:
        named = context.get_parameter_source("silos") is not ParameterSource.DEFAULT
        start = _resuming(start, runtime, strategy or named or out or overwrite or _overrides(assignments, seed))
        strategy, silos, out = str(resume / "config.yaml"), str(resume / "silos.yaml"), resume
        if not Path(silos).is_file():
            remedy = "Name a folder of `fedsync run`; runs of a server continue with `fedsync server run --resume`"
            raise ConfigError("--resume", f"{silos} is missing: no local run to continue", remedy)
    if strategy is None:
        raise ConfigError("STRATEGY", "no strategy is named", "Name a file or a shipped strategy, or give --resume DIR")
    config, cluster = StrategyConfig.load(strategy, _overrides(assignments, seed)), ClusterConfig.load(silos)
    _check(config, cluster, target_accuracy)
    for line in [] if timing_only else config.task.look({one.name: one.data for one in cluster.silos}, config.seed):
        console.print(line, highlight=False, markup=False)
    if config.privacy is not None and not timing_only:
        from fedsync.extras.privacy_plan.private_plan import plan_table, planned_spending

        if planned := planned_spending(config, cluster):
            console.print(plan_table(config, cluster, planned))
    default = Path("runs") / f"{config.name}-{runtime}-{config.seed}"
    mine = _claim(out, default, [config.initial_model], overwrite=overwrite, resume=resume is not None)
    folder = mine.path
    summary = _run(start, config, cluster, mine, target_accuracy, timing_only=timing_only)
    if (folder / STATISTICS).exists():
        from fedsync.extras.surveys.statistics_table import statistics_table

        console.print(statistics_table(json.loads((folder / STATISTICS).read_text(encoding="utf-8"))))
    console.print(silo_table(summary))
    if "privacy" in summary:
        from fedsync.ops.privacy_table import spent_table

        console.print(spent_table(summary))
    accuracy = "-" if summary["accuracy"] is None else f"{summary['accuracy']:.4f}"
    if config.privacy is not None and config.privacy.score_noise is not None:
        accuracy += " (with noise)"
    console.print(
        f"{summary['rounds']} rounds in {summary['seconds']:.1f} s, accuracy {accuracy}, "
        f"utilisation {summary['utilisation']:.1%}, waiting {summary['wait_fraction']:.1%}; "
        f"stopped by: {summary['stopped_by']}",
    )
    for note in summary["notes"]:
        console.print(f"Note: {note}")
    console.print(f"Files: {folder}", soft_wrap=True)


@app.command()
def compare(
    strategies: Annotated[list[str], typer.Argument(help="Strategy files; ratios are to the first.")],
    silos: Silos = "hetero",
    runtime: Annotated[Runtime, typer.Option("--runtime", help="Where to run.")] = Runtime.VIRTUAL,
    seeds: Annotated[int, typer.Option("--seeds", min=1, help="Runs a strategy, with consecutive seeds.")] = 1,
    assignments: Set = None,
    seed: Seed = None,
    target_accuracy: Target = None,
    timing_only: TimingOnly = False,
    model_bytes: ModelBytes = None,
    journal: Journal = True,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the runs' files; left out, a new one below runs.")
    ] = None,
    overwrite: Overwrite = False,
) -> None:
    """Run several strategies and compare them.

    Without --target-accuracy, the target of each seed is the final accuracy of the first strategy.
    With several seeds, the folder has tables over them: seeds.tex, seeds.md and seeds.csv.
    A strategy with a failed run is not in the tables; the other strategies run, and the exit status is 1.
    Ratios and targets are then of the first strategy without a failed run.
    """
    start = _starter(runtime, target_accuracy, timing_only, model_bytes, journal)
    cluster = ClusterConfig.load(silos)
    first_seeds = [StrategyConfig.load(name, _overrides(assignments, seed)) for name in strategies]
    for config in first_seeds:
        if [each.name for each in first_seeds].count(config.name) > 1:
            problem = f"two of the strategies are named {config.name!r}"
            raise ConfigError("compare", problem, "Give each file a name of its own")
        _check(config, cluster, target_accuracy)
    planned = [f"{each.name}-{number}" for each in first_seeds for number in range(each.seed, each.seed + seeds)]
    models = [each.initial_model for each in first_seeds]
    whole = _claim(out, Path("runs/compare"), models, *planned, overwrite=overwrite)
    try:
        summaries: list[list[dict[str, Any]]] = []
        failed: dict[str, dict[int, str]] = {}
        for name, first in zip(strategies, first_seeds, strict=True):
            summaries.append([])
            for number in range(first.seed, first.seed + seeds):
                config = StrategyConfig.load(name, [*(assignments or []), f"seed={number}"])
                mine = _claim(whole.path / f"{config.name}-{number}", whole.path, (), overwrite=overwrite)
                try:
                    summaries[-1].append(_run(start, config, cluster, mine, target_accuracy, timing_only=timing_only))
                except FedSyncError as error:
                    console.print(f"{config.name} {number} failed:", style="red")
                    _say(error)
                    failed.setdefault(config.name, {})[number] = str(error)
        complete = [runs for runs in summaries if len(runs) == seeds]
        if complete:
            _show_comparison(complete, whole.path, runtime, target_accuracy, timing_only=timing_only, failed=failed)
        for name, seeds_failed in failed.items():
            console.print(f"Note: {name} is not compared: {len(seeds_failed)} of {seeds} runs failed")
    finally:
        whole.release()
    console.print(f"Files: {whole.path}", soft_wrap=True)
    if failed:
        raise typer.Exit(EXIT_FAILED)


def _show_comparison(
    summaries: list[list[dict[str, Any]]],
    out: Path,
    runtime: Runtime,
    target_accuracy: float | None,
    *,
    timing_only: bool,
    failed: Mapping[str, Mapping[int, str]],
) -> None:
    """Print the tables of complete strategies, and write their files; ``failed`` has errors by strategy and seed."""
    seeds = len(summaries[0])
    folders = [[out / f"{each['strategy']}-{each['seed']}" for each in runs] for runs in summaries]
    comparisons = _compare(summaries, folders, target_accuracy)
    if timing_only:
        target = "no training"
    elif target_accuracy is not None:
        target = f"target accuracy: {target_accuracy:g}"
    else:
        target = f"target accuracy: what {comparisons[0].strategy} ends with"
    for comparison in comparisons:
        console.print(silo_table(comparison.summaries[0]))
    title = f"{runtime} runtime, {seeds} seed(s), {target}"
    console.print(comparison_table(comparisons, title, trained=not timing_only))
    rows = [comparison.row(comparisons[0]) for comparison in comparisons]
    rows += [{"strategy": name, "failed": dict(errors)} for name, errors in failed.items()]
    if seeds > 1 and not timing_only:
        from fedsync.extras.papers.paper import over_seeds

        times = [seconds for each in comparisons for seconds in each.seconds_to_target]
        tests, files = over_seeds([folder for runs in folders for folder in runs], times)
        if len(comparisons) > 1:
            console.print(tests)
        for file, text in files.items():
            write_result(out / file, text.encode())
    write_result(out / "compare.json", (json.dumps(rows, indent=2) + "\n").encode())


def _overrides(assignments: list[str] | None, seed: int | None) -> list[str]:
    return [*(assignments or []), *([] if seed is None else [f"seed={seed}"])]


def _claim(
    out: Path | None, default: Path, models: Sequence[str | None], *runs: str, overwrite: bool, resume: bool = False
) -> Claim:
    output_may_be_lost()
    other = Existing.NUMBER if out is None else Existing.RESUME if resume else Existing.REFUSE
    found = claim(out or default, Existing.OVERWRITE if overwrite else other, runs, models)
    if found.path not in (out, default):
        console.print(f"{default} has a run: this one goes to {found.path}")
    return found


def _starter(
    runtime: Runtime,
    target_accuracy: float | None,
    timing_only: bool,
    model_bytes: int | None,
    journal: bool,
) -> Runner:
    """Return the function that runs a strategy with these options; `ConfigError` for contradictory options."""
    if not timing_only:
        if model_bytes is not None or not journal:
            option = "--no-journal" if model_bytes is None else "--model-bytes"
            raise ConfigError(option, "only for runs without training", "Add --timing-only, or leave it out")
        return runner(runtime)
    if runtime is not Runtime.VIRTUAL:
        raise ConfigError("--timing-only", f"the {runtime} runtime takes real time", "Add --runtime virtual")
    if target_accuracy is not None:
        raise ConfigError("--target-accuracy", "there is no accuracy without training", "Leave out --timing-only")
    from fedsync.simulation.timing_only import MODEL_BYTES, run_timing

    return partial(run_timing, model_bytes=model_bytes or MODEL_BYTES, journal=journal)


def _resuming(start: Runner, runtime: Runtime, given: object) -> Runner:
    if runtime is not Runtime.LOCAL:
        problem = f"a run in the {runtime} runtime leaves nothing behind to go on from"
        remedy = "Run it again, it comes to the same" if runtime is Runtime.VIRTUAL else "Run it again"
        raise ConfigError("--resume", problem, remedy)
    if given:
        remedy = "Leave out STRATEGY, --silos, --set, --seed, --out and --overwrite"
        raise ConfigError("--resume", "the folder says what is run and where", remedy)
    return partial(start, resume=True)


def _run(
    start: Runner,
    config: StrategyConfig,
    cluster: ClusterConfig,
    folder: Claim,
    target_accuracy: float | None,
    *,
    timing_only: bool,
) -> dict[str, Any]:
    # Without training, rounds may pass faster than a user can read.
    every_s = 0.5 if timing_only else 0.0
    label = f"{config.name} {config.seed}"
    try:
        with RunProgress(console, label, config.stop.rounds, every_s, trained=not timing_only) as progress:
            return start(config, cluster, folder, target_accuracy=target_accuracy, listeners=[progress])
    finally:
        folder.release()


def _check(config: StrategyConfig, cluster: ClusterConfig, target_accuracy: float | None) -> None:
    config.check_silos([silo.name for silo in cluster.silos])
    config.check_target(target_accuracy)


def runner(runtime: Runtime) -> Runner:
    # Late imports: torch, Ray and Flower take seconds, which `fedsync --help` should not.
    match runtime:
        case Runtime.VIRTUAL:
            from fedsync.simulation.run import run_virtual

            return run_virtual
        case Runtime.FLOWER:
            from fedsync.flower.flower_simulation import run_simulation

            return run_simulation
        case Runtime.LOCAL:
            from fedsync.ops.local import run_local

            return run_local


def _compare(
    summaries: list[list[dict[str, Any]]], folders: list[list[Path]], target_accuracy: float | None
) -> list[Comparison]:
    from fedsync.observe.replay import read_ledger

    targets = [target_accuracy if target_accuracy is not None else first["accuracy"] for first in summaries[0]]
    comparisons = []
    for runs, places in zip(summaries, folders, strict=True):
        seconds = []
        for place, target in zip(places, targets, strict=True):
            seconds.append(None if target is None else read_ledger(place / "journal.jsonl").seconds_to(target))
        comparisons.append(Comparison(runs[0]["strategy"], runs, seconds))
    return comparisons


register(app)


def main() -> None:
    """Entry point: user errors exit with 2, failed runs with 1, Ctrl-C with 130."""
    guard_output()
    safe_paths()
    handler = RichHandler(console=Terminal(stderr=True), show_path=False, show_time=False)
    handler.addFilter(SHOWN)
    logging.basicConfig(level=logging.WARNING, format="%(message)s", handlers=[handler])
    for number in (signal.SIGTERM, signal.SIGHUP):  # the cleanup of Ctrl-C, also if a terminal ends, without `nohup`
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except FedSyncError as error:
        sys.exit(_say(error))
    except OSError as error:
        unusable = _unusable(error)
        if unusable is None:
            raise
        sys.exit(_say(unusable))
    except KeyboardInterrupt:
        Terminal(stderr=True).print("stopped")
        sys.exit(EXIT_INTERRUPTED)


def _say(error: FedSyncError) -> int:
    users = isinstance(error, ConfigError)
    # Journal entries are on their own lines, each as a `repr`.
    first, *story = str(error).split("\n") if isinstance(error, PolicyError) else [str(error)]
    terminal = Terminal(stderr=True)
    terminal.print(words("error:" if users else "failed:", "bold red"), first, soft_wrap=True)
    for line in story:
        terminal.print(line, soft_wrap=True)
    for other in error.others if isinstance(error, ConfigError) else ():
        terminal.print(words("error:", "bold red"), str(other), soft_wrap=True)
    return EXIT_USER if users else EXIT_FAILED


_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EROFS}  # also for files without a name


def _unusable(error: OSError) -> FedSyncError | None:
    """Return the user's error for an unusable path; None for a fault of FedSync, or for a broken pipe."""
    # A file descriptor may stand in for a name; it means nothing to the user.
    names = [name for name in (error.filename, error.filename2) if name is not None and not isinstance(name, int)]
    if not names and error.errno in _DISK:
        return RunError(f"a file cannot be written: {error.strerror}. Make room on the disk, and run it again")
    if not names or isinstance(error, BrokenPipeError):
        return None
    place = " -> ".join(os.fsdecode(name) for name in names)
    return ConfigError(place, error.strerror or type(error).__name__, "Check the path, its permissions and the disk")


if __name__ == "__main__":
    main()
