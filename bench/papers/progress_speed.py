"""Speed and spread (PSP, figures 10-13 and 10-14): 32 silos for 400 virtual seconds, nothing trained.

The paper says only that ASP came to about 200 iterations and BSP to 80, on workers that shared a server. Here an
iteration is one local step with a lognormal time, whose median and sigma are chosen such that ASP and BSP come to
that. ``speeds`` and ``slow`` add a case that the paper leaves open: silos that are permanently unequal.

Theory of pBSP, for independent iteration times with mean 1, and M(k) the mean of the greatest of k:
BSP goes at 1 / M(n), ASP at 1. A silo that waits until all of a sample have caught up (``kept``) goes at
1 / M(beta + 1) at best, and slower since the sampled silos wait, too. A silo that draws a new sample whenever an update
arrives continues when it sees no lagging silo, so only a lag of many silos holds it.

The spread is ``max - min`` and the standard deviation over silos, each the mean of 41 instants in the second half of
the run: at a single instant BSP's is 0 or 1 by chance. ``SSP(1)`` and ``SSP(2)`` show the progress that a bound on the
spread allows: within s + 1 by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import beside, figure, in_parallel, line, print_table, save
from bench.papers.progress_shared import BARRIERS, SIGMA, SPEED, clocks, silos, watch
from fedsync.config.cluster import ClusterConfig

SILOS, SECONDS = 32, 400.0
BOUNDS: dict[str, dict[str, Any]] = {f"SSP({s})": {"kind": "ssp", "staleness": s} for s in (1, 2)}
COMPARED = {**BARRIERS, **BOUNDS}
SIZES = {f"beta {size}:": {"kind": "sampled", "sample_size": size} for size in (0, 1, 2, 4, 8, 16, 24)}
"""Drawn in a panel of their own, for the paper-like cluster only."""


def speed_clusters(seed: int) -> dict[str, ClusterConfig]:
    unequal = SPEED * np.exp(0.2 * np.random.default_rng(seed).normal(size=SILOS))
    return {
        "paper-like": silos([SPEED] * SILOS, jitter=SIGMA),
        "speeds": silos(list(unequal), jitter=SIGMA),
        "slow": silos([SPEED] * (SILOS - 4) + [SPEED / 2] * 4, jitter=SIGMA),
    }


def speed_run(job: tuple[str, str, int, float]) -> dict[str, Any]:
    place, name, seed, seconds = job
    cluster = speed_clusters(seed)[place]
    seen = watch((COMPARED | SIZES)[name], cluster, seconds, seed)
    late = clocks(seen, cluster, list(np.linspace(seconds / 2, seconds, 41)))
    return {
        "cluster": place,
        "barrier": name,
        "seed": seed,
        "progress": late[-1].tolist(),
        "mean": float(late[-1].mean()),
        "range": float((late.max(1) - late.min(1)).mean()),
        "std": float(late.std(1).mean()),
        "updates": [int(np.searchsorted(seen.at_s, t, side="right")) for t in np.linspace(0, seconds, 41)],
    }


def speed(quick: bool, processes: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    seconds, seeds = (60.0, 1) if quick else (SECONDS, 5)
    jobs = [
        (place, name, 7 + seed, seconds)
        for place in speed_clusters(7)
        for name in (*COMPARED, *(SIZES if place == "paper-like" else ()))
        for seed in range(seeds)
    ]
    runs = in_parallel(speed_run, jobs, processes)
    rows = []
    for place in speed_clusters(7):
        bsp: dict[str, float] = {}
        for name in (*COMPARED, *(SIZES if place == "paper-like" else ())):
            mine = [run for run in runs if (run["cluster"], run["barrier"]) == (place, name)]
            row = {key: float(np.mean([run[key] for run in mine])) for key in ("mean", "range", "std")}
            bsp = bsp or row
            ratios = {f"{key}_to_bsp": row[key] / max(bsp[key], 1e-9) for key in row}
            rows.append({"cluster": place, "barrier": name, "seeds": seeds, **row, **ratios})
    return rows, runs


def show_speed(rows: list[dict[str, Any]], runs: list[dict[str, Any]], out: Path) -> None:
    print_table(
        f"Progress of {SILOS} silos, mean of {rows[0]['seeds']} seeds",
        ("cluster", "barrier", "mean progress", "x BSP", "max - min", "x BSP", "std", "x BSP"),
        [
            (
                row["cluster"],
                row["barrier"].replace("beta ", "pBSP, sample of ").rstrip(":"),
                f"{row['mean']:.1f}",
                f"{row['mean_to_bsp']:.2f}",
                f"{row['range']:.2f}",
                f"{row['range_to_bsp']:.2f}",
                f"{row['std']:.2f}",
                f"{row['std_to_bsp']:.2f}",
            )
            for row in rows
        ],
    )
    made, (top, cdf, betas, other) = figure(2, 2)
    first = {(run["cluster"], run["barrier"]): run for run in reversed(runs)}
    seconds = SECONDS if len(runs) > 60 else 60.0
    for index, name in enumerate(COMPARED):
        run = first["paper-like", name]
        grid = np.linspace(0, seconds, len(run["updates"]))
        top.plot(grid, run["updates"], **line(index), markevery=(index, 8), label=name)
        for ax, place in ((cdf, "paper-like"), (other, "speeds")):
            _cdf(ax, first[place, name]["progress"], index, name)
    names = [name for place, name in first if place == "paper-like" and name.startswith("beta ")]
    for index, name in enumerate(sorted(names, key=lambda name: int(name[5:-1]))):
        _cdf(betas, first["paper-like", name]["progress"], index, name[5:-1])
    top.set(title="Updates at the server (cf. figure 10-13)", xlabel="virtual time [s]", ylabel="updates")
    cdf.set(title="Progress, equal speeds, series as left (10-14a)")
    betas.set(title="pBSP, by sample size (10-14b)")
    other.set(title="Progress, unequal mean speeds, series as above")
    for ax in (cdf, betas, other):
        ax.set(xlabel="orders finished at the end", ylabel="share of silos")
    # The panels on the right show the series of the first; a legend there would cover them.
    top.legend(fontsize=7, frameon=False)
    low, high = betas.get_xlim()
    betas.set_xlim(low, high + (high - low) / 5)  # room for the legend
    betas.legend(title="sample size", fontsize=7, title_fontsize=7, frameon=False, loc="right")
    save(made, beside(out, "-speed"))


def _cdf(ax: Any, progress: Sequence[int], index: int, name: str) -> None:
    ordered = np.sort(progress)
    shares = np.arange(1, len(ordered) + 1) / len(ordered)
    ax.plot(ordered, shares, drawstyle="steps-post", **line(index), markevery=(index, 6), label=name)
