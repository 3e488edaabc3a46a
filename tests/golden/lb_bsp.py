"""The run behind ``lb-bsp.jsonl``: three silos, LB-BSP, three rounds, workers that compute nothing.

The journal in this folder is what this run wrote when it was last looked at. If a change of the code is meant to
change decisions, regenerate it on purpose and read the difference before committing it, from the repository's root:

    python -m tests.golden.lb_bsp
    git diff tests/golden
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from tests.sim.fake import Result, machines, simulate, strategy

JOURNAL = Path(__file__).with_name("lb-bsp.jsonl")


def run(out: Path) -> Result:
    """No jitter and no transcendental function: the same bytes on every machine."""
    silos = machines({"speed": 300.0}, {"speed": 200.0, "overhead_s": 0.5}, {"speed": 100.0, "memory_samples": 20})
    return simulate(out, silos, strategy(local={"steps": 4, "batch_size": 24}))


def main() -> None:
    """Write the journal anew."""
    with tempfile.TemporaryDirectory() as folder:
        JOURNAL.write_text(run(Path(folder)).text, encoding="utf-8")


if __name__ == "__main__":
    main()
