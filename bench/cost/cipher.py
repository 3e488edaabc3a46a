"""Cost of a round of encrypted aggregation on this machine, compared with encryption as other frameworks use it.

    python bench/cost/cipher.py [--params 1000000] [--silos 4] [--kind bfv] [--bits 16] [--against ckks] [--json]

One process plays all roles: every silo encrypts, the server adds, a silo decrypts. Nothing is sent. Processor time.
``--against ckks`` encrypts the same updates with CKKS as other frameworks do, in the same run (``cipher_peers.py``).
``--json`` prints `CipherCost`; after a comparison, also ``against`` and ``ratio`` (how much better FedSync is).
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from bench.common import print_table
from bench.cost.cipher_peers import measure_peers
from bench.cost.cipher_round import KINDS, CipherCost, measure_suite
from fedsync.cipher.encoding.packing import BITS
from fedsync.common.errors import ConfigError

PEERS = "ckks"
ROWS = {
    "seal_mparams_s": "seal, M values/s",
    "server_add_mparams_s": "server: check and add, M values/s",
    "open_mparams_s": "open, M values/s",
    "tag_mparams_s": "of sealing, the tag alone, M values/s",
    "check_mparams_s": "of opening, the tag's check alone, M values/s",
    "bytes_per_param_up": "bytes a value, up",
    "bytes_per_param_down": "bytes a value, down",
    "max_error": "largest error, of the largest value",
    "peak_mib": "peak memory, MiB",
}
RATIOS = {
    "seal_mparams_s": "seal",
    "server_add_mparams_s": "server_add",
    "open_mparams_s": "open",
    "bytes_per_param_up": "bytes_up",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--params", type=int, default=1_000_000, help="values of the model")
    parser.add_argument("--silos", type=int, default=4, help="silos that send an update")
    parser.add_argument("--kind", choices=KINDS, default="bfv")
    parser.add_argument("--bits", type=int, choices=BITS, default=16, help="of a quantised value")
    parser.add_argument("--against", choices=[PEERS], help="encryption as peers use it, in the same run")
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    if options.params < 1000 or not 2 <= options.silos <= 200:
        parser.error("--params: 1000 values at least; --silos: 2 to 200")
    try:
        own = measure_suite(options.kind, options.bits, options.params, options.silos)
    except ConfigError as error:
        parser.error(str(error))
    other = None
    if options.against:
        with silenced():
            other = measure_peers(options.params, options.silos)
    if options.json:
        result: dict[str, Any] = asdict(own)
        if other:
            result |= {"against": asdict(other), "ratio": ratios(own, other)}
        print(json.dumps(result, indent=2))
    else:
        title = f"{own.params:,} values, {own.silos} silos, {own.bits} bits; processor time of one silo's update"
        print_table(title, *table(own, other))


@contextmanager
def silenced() -> Iterator[None]:
    """Drop what native code prints: the library warns of every long vector, on standard output."""
    sys.stdout.flush()
    kept = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    try:
        yield
    finally:
        if os.name == "posix":
            # What C still holds back would come out later.
            ctypes.CDLL(None).fflush(None)
        os.dup2(kept, 1)
        os.close(kept)
        os.close(nowhere)


def ratios(own: CipherCost, other: CipherCost) -> dict[str, float]:
    """How many times better ``own`` is."""
    found = {name: getattr(own, column) / getattr(other, column) for column, name in RATIOS.items()}
    return {**found, "bytes_up": 1 / found["bytes_up"]}


def table(own: CipherCost, other: CipherCost | None) -> tuple[list[str], list[list[str]]]:
    """Columns and rows."""
    columns, rows = ["", own.kind], [[label, shown(own, column)] for column, label in ROWS.items()]
    if other:
        columns += [f"{other.kind}, as peers use it", "ratio"]
        better = ratios(own, other)
        for column, row in zip(ROWS, rows, strict=True):
            ratio = f"{better[RATIOS[column]]:.1f}x" if column in RATIOS else ""
            row += [shown(other, column), ratio]
    return columns, rows


def shown(cost: CipherCost, column: str) -> str:
    value = getattr(cost, column)
    return "-" if value is None else f"{value:.4g}"


if __name__ == "__main__":
    main()
