"""What is sent again of a large model, and of an update, when its line is cut in the middle.

The gate of a SuperLink and the client of a SuperNode are the real ones, over a socket whose first connection ends after
half of the bytes. Counted is all that goes through it, either way, with HTTP, beyond the bytes of the model.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from bench.common import print_table, write_json
from fedsync.config.gate import GateConfig
from fedsync.core.array_keeper import ArrayKeeper
from fedsync.core.transfer import Payload
from fedsync.flower.internals.parcel_client import ParcelClient
from fedsync.flower.parcels import ParcelStore
from tests.flower.internals.superlink import Cutting, SuperLink, noise, serving

MIB = 2**20
COLUMNS = ("", "connections", "MiB carried", "beyond the model", "seconds")


def cut(link: SuperLink, nbytes: int, transfer: Callable[[ParcelClient], None]) -> list[float]:
    """One transfer through a line that is cut once: connections, bytes carried, seconds."""
    line, silo = Cutting(link.port, nbytes // 2), link.silo()
    begin_s = time.perf_counter()
    transfer(ParcelClient(f"127.0.0.1:{line.port}", None, lambda: silo.headers))
    return [line.lines, line.carried, time.perf_counter() - begin_s]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--parameters", type=int, default=25_000_000)
    parser.add_argument("--out", type=Path, default=Path("bench/results/cut_line.json"))
    options = parser.parse_args()
    nbytes = 4 * options.parameters
    with tempfile.TemporaryDirectory(prefix="cut-line-") as name, pytest.MonkeyPatch.context() as patch:
        folder = Path(name)
        folder.chmod(0o700)
        store = ParcelStore.begin(folder / "parcels")
        model = ArrayKeeper(folder / "arrays").keep(noise(nbytes))

        def down(client: ParcelClient) -> None:
            parcel = store.publish(model)
            assert parcel is not None
            same(client.fetch(parcel, folder / "silo"))

        def up(client: ParcelClient) -> None:
            node = link.silo().number
            ticket = store.expect(node, "update a/1", nbytes)
            assert ticket is not None
            uploaded = client.upload(ticket, model)
            assert uploaded is not None
            same(store.arrived(node, ticket, uploaded, "berlin"))

        def same(got: Payload) -> None:
            assert np.array_equal(got, model), "what came is not what was sent"

        with serving(patch, GateConfig(), parcels=folder / "parcels") as link:
            found = {"model, to a silo": cut(link, nbytes, down), "update, from a silo": cut(link, nbytes, up)}
        store.end()
    rows = [
        [what, f"{lines:.0f}", f"{carried / MIB:.1f}", f"{carried / nbytes - 1:.2%}", f"{seconds:.1f}"]
        for what, (lines, carried, seconds) in found.items()
    ]
    print_table(f"{nbytes / MIB:.0f} MiB, a line that is cut after half of them", COLUMNS, rows)
    write_json(options.out, {"bytes": nbytes, **found})


if __name__ == "__main__":
    main()
