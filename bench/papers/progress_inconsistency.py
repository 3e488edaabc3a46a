"""Inconsistency (PSP, figure 10-18): other silos' updates between a silo's read and its own update.

Mean and standard deviation, divided by the number of silos, for 50 to 10,000 equal silos; nothing is trained.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from bench.common import beside, figure, in_parallel, line, print_table, save
from bench.papers.progress_shared import BARRIERS, SIGMA, SPEED, silos, watch


def inconsistency_run(job: tuple[str, dict[str, Any], int, float]) -> dict[str, Any]:
    """The coordinator looks every 0.1 s, a twentieth of an order."""
    name, barrier, count, seconds = job
    cluster = silos([SPEED] * count, jitter=SIGMA)
    seen = watch(barrier, cluster, seconds, 7, poll_s=0.1)
    warm = int(np.searchsorted(seen.commits, seconds / 4)) if barrier["kind"] != "bsp" else 0
    between = np.array(seen.between[warm:]) / count
    return {
        "barrier": name,
        "silos": count,
        "mean": float(between.mean()),
        "std": float(between.std()),
        "progress": len(seen.at_s) / count,
    }


def inconsistency(quick: bool, processes: int) -> list[dict[str, Any]]:
    counts, seconds = ((10_000, 5000, 2000, 1000, 500, 200, 100, 50), 40.0) if not quick else ((100, 50), 10.0)
    barriers = {"ASP": BARRIERS["ASP"], "SSP(4)": BARRIERS["SSP(4)"], "BSP": BARRIERS["BSP"]}
    barriers |= {f"pBSP({size})": {"kind": "sampled", "sample_size": size} for size in (1, 4, 16, 32)}
    jobs = [(name, barrier, count, seconds) for count in counts for name, barrier in barriers.items()]
    return in_parallel(inconsistency_run, jobs, processes)


def show_inconsistency(runs: list[dict[str, Any]], out: Path) -> None:
    counts = sorted({run["silos"] for run in runs})
    by = {(run["barrier"], run["silos"]): run for run in runs}
    names = list(dict.fromkeys(run["barrier"] for run in runs))
    print_table(
        "Updates of others between read and update, divided by the number of silos: mean / std",
        ("barrier", *(f"{count:,} silos" for count in counts)),
        [(n, *(f"{by[n, c]['mean']:.3f} / {by[n, c]['std']:.3f}" for c in counts)) for n in names],
    )
    made, axes = figure(2)
    for ax, key, label in zip(axes, ("mean", "std"), ("mean", "standard deviation"), strict=True):
        for index, name in enumerate(names):
            ax.plot(counts, [by[name, count][key] for count in counts], **line(index), label=name)
        ax.set(xscale="log", xlabel="silos", ylabel=f"{label} of inconsistency / silos")
        ax.set_title(f"Inconsistency, {label} (cf. figure 10-18)")
    axes[0].legend(fontsize=7, frameon=False, ncols=2, loc=(0.3, 0.1))
    save(made, beside(out, "-inconsistency"))
