"""Cost of an entry of a silo's audit log: its own work, the digest of what leaves, and the wait for the disk.

An entry is on the disk before the answer that it describes leaves. Processor time is that of this process.
The last column is the disk's time for as many bytes, measured in turns with the entries. FedSync takes the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from unittest.mock import patch

import numpy as np

from bench.common import print_table, write_json
from fedsync.common.sandbox.path_sandbox import ALLOWED
from fedsync.core.orders import WorkOrder
from fedsync.silo.owner.audit import audit_answer
from fedsync.silo.owner.audit_chain import AUDIT
from fedsync.silo.protocol import Identity, InProgress, Train, write_reply, write_request

WHO = Identity('{"run": "run-1"}', 0, "berlin")


@dataclass(frozen=True)
class Row:
    """Medians of an entry, in milliseconds; ``disk_ms`` is that of a bare write of as many bytes."""

    answer_bytes: int
    wall_ms: float
    cpu_ms: float
    disk_ms: float


def timed(work: Callable[[], None]) -> tuple[float, float]:
    """Milliseconds of wall and processor time."""
    wall_s, cpu_s = perf_counter(), process_time()
    work()
    return 1e3 * (perf_counter() - wall_s), 1e3 * (process_time() - cpu_s)


def measure(folder: Path, parameters: int, entries: int) -> Row:
    """Entries about answers of so many float32 values."""
    asked = write_request(Train(WorkOrder("berlin/1", 0, 1, 8, 2, 0.1, seed=1)))
    said, answer = write_reply(InProgress(1, 8)), np.ones(parameters, np.float32).view(np.uint8)
    descriptor = os.open(folder / "bare", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)

    def bare() -> None:
        os.write(descriptor, b"x" * 500)
        os.fdatasync(descriptor)

    written, disk = [], []
    for _ in range(entries):
        written.append(timed(lambda: audit_answer(WHO, asked, 4000, said, answer)))
        disk.append(timed(bare)[0])
    os.close(descriptor)
    walls, cpus = zip(*written[1:], strict=True)
    return Row(answer.nbytes, median(walls), median(cpus), median(disk[1:]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench/results/audit.json"))
    parser.add_argument("--entries", type=int, default=200, help="of each size")
    parser.add_argument("--parameters", type=int, nargs="+", default=[0, 1_000_000, 25_000_000])
    parser.add_argument("--folder", type=Path, help="where the log is written; its disk is measured")
    options = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        allowed = {"audit": {"folder": str(Path(folder) / AUDIT), "asks": "fl.example.org:9092"}}
        with patch.dict(os.environ, {ALLOWED: json.dumps(allowed)}):
            rows = [measure(Path(folder), parameters, options.entries) for parameters in options.parameters]
    print_table(
        f"An entry of the audit log, medians of {options.entries}",
        ("answer, bytes", "wall ms", "processor ms", "bare write and sync ms"),
        [(f"{row.answer_bytes:,}", *(f"{ms:.2f}" for ms in (row.wall_ms, row.cpu_ms, row.disk_ms))) for row in rows],
    )
    write_json(options.out, [asdict(row) for row in rows])


if __name__ == "__main__":
    main()
