"""Check of FedSync's decisions against algorithms that were written a second time, from the papers alone.

    python bench/papers/independent/check.py [--cases 1500] [--seed 7] [--quick] [--out FILE.json]

The modules ``paper_*.py`` in this folder contain the algorithms, and import nothing of FedSync. The modules
``compare_*.py`` give both the same random inputs: whole runs in virtual time without training, or single calls. The
command ends with 1 if a difference is larger than allowed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bench.common import in_parallel, print_table, write_json
from bench.papers.independent import compare_averaging as averaging
from bench.papers.independent import compare_barriers as barriers
from bench.papers.independent import compare_batches as batches
from bench.papers.independent import compare_intervals as intervals
from bench.papers.independent import compare_steps as steps
from bench.papers.independent.finding import Finding
from fedsync.policies.barrier.kinds.elastic import METHODS
from fedsync.policies.barrier.kinds.sampled import Sampling

COMPARISONS: tuple[Callable[[int, np.random.Generator], Finding], ...] = (
    batches.cpu_sizes,
    batches.gpu_sizes,
    batches.narx_forward,
    batches.narx_step,
    intervals.fspb,
    intervals.fspv,
    barriers.absp_signal,
    barriers.absp_data,
    *(partial(steps.sync_points, method=method) for method, exact in METHODS.items() if exact),
    barriers.ssp,
    partial(barriers.psp_passing, staleness=0),
    partial(barriers.psp_passing, staleness=2),
    partial(barriers.psp_samples, sampling=Sampling.DYNAMIC),
    partial(barriers.psp_samples, sampling=Sampling.GROUPED),
    averaging.fedbuff,
    averaging.fedasync,
    averaging.fednova,
    averaging.scaffold,
    steps.fedcompass,
)


def compare(number: int, cases: int, seed: int) -> dict[str, Any]:
    """Result of one of `COMPARISONS`. Each has its own generator, so its cases do not depend on the others."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    return COMPARISONS[number](cases, np.random.default_rng(seed)).dump()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=1500, help="random cases of an algorithm, about")
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="100 cases")
    parser.add_argument("--out", type=Path, default=Path("bench/results/independent.json"))
    options = parser.parse_args()
    cases = 100 if options.quick else options.cases
    job = partial(compare, cases=cases, seed=options.seed)
    findings = in_parallel(job, range(len(COMPARISONS)), options.processes)
    rows = [[f"{cell:.3g}" if isinstance(cell, float) else cell for cell in row.values()] for row in findings]
    print_table(f"FedSync and reimplementations from the papers, seed {options.seed}", list(findings[0]), rows)
    write_json(options.out, {"seed": options.seed, "findings": findings})
    sys.exit(0 if all(row["verdict"] == "agrees" for row in findings) else 1)


if __name__ == "__main__":
    main()
