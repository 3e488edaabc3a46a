"""Costs of the hub: latency of a question over TLS, processor time of many silos, and large payloads.

Silos are another process and answer at once. So the figures contain the transport alone, without agent and trainer.

    python bench/cost/hub.py
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import ssl
import statistics
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import print_table, write_json
from bench.cost.crowd_lines import CrowdLine, trusting
from fedsync.common.errors import FedSyncError
from fedsync.identity.certificates import make_authority, make_server_certificate
from fedsync.transport.hub.hub import Hub
from fedsync.transport.hub_line import HubLine
from fedsync.transport.join import Join, new_secret
from fedsync.transport.port import BASE, Blob, SiloQuestion


def silo(join: Join, folder: Path) -> None:
    """Answers all questions of one silo."""
    line, number = HubLine(join, new_secret()), 0
    line.join()
    try:
        while True:
            asked = line.asked(number)
            if asked is None:
                continue
            number, payload = asked.number, None
            if isinstance(asked.payload, Blob):
                file = folder / join.silo
                line.fetch(asked.payload, file)
                payload = np.memmap(file, np.uint8, "r")
            line.answer(asked, "done", payload)
    except (FedSyncError, OSError):
        return


def few(joins: Sequence[Join], folder: Path) -> None:
    threads = [threading.Thread(target=silo, args=(join, folder), daemon=True) for join in joins]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


async def _one_of_many(join: Join, trust: ssl.SSLContext) -> None:
    """A silo that is cheap: its own process must not be what is measured."""
    line, number = CrowdLine(join, new_secret(), trust), 0
    await line.join()
    while True:
        asked = await line.asked(number)
        if asked is not None:
            number = asked.head.number
            await line.answer(asked.head, "done", None)


def many(joins: Sequence[Join]) -> None:
    trust = trusting(joins[0].authority)

    async def all_of_them() -> None:
        await asyncio.gather(*(_one_of_many(join, trust) for join in joins), return_exceptions=True)

    asyncio.run(all_of_them())


class Federation:
    """A hub and silos that have joined it."""

    def __init__(self, silos: int, folder: Path) -> None:
        certificate = make_server_certificate(make_authority(folder / "authority"), [], folder / "server")
        authority = (folder / "authority" / "ca.crt").read_text()
        self.hub = Hub(folder / "hub")
        port = self.hub.start(certificate=certificate.certificate, key=certificate.key)
        self.names = [f"silo-{number}" for number in range(silos)]
        joins = [self.hub.invite(name, [f"https://127.0.0.1:{port}{BASE}"], authority) for name in self.names]
        context = multiprocessing.get_context("spawn")
        target, arguments = (few, (joins, folder)) if silos <= 16 else (many, (joins,))
        self.process = context.Process(target=target, args=arguments, daemon=True)
        self.process.start()
        while len(self.hub.peers()) < silos:
            assert self.process.is_alive()
            time.sleep(0.05)

    def ask(self, names: Sequence[str], question: SiloQuestion) -> float:
        """Seconds until all have answered."""
        begin_s, left = time.perf_counter(), len(names)
        for name in names:
            self.hub.send(name, question)
        while left:
            left -= len(self.hub.receive(10))
        return time.perf_counter() - begin_s

    def close(self) -> None:
        self.hub.close()
        self.process.join(5)
        self.process.kill()


def _spread(times: list[float]) -> dict[str, float]:
    times.sort()
    return {"median_ms": 1e3 * statistics.median(times), "p90_ms": 1e3 * times[int(0.9 * len(times))]}


def there_and_back(rounds: int) -> list[dict[str, Any]]:
    """Empty questions to five silos."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(5, Path(folder))
        for name, which in (("one silo", federation.names[:1]), ("five at once", federation.names)):
            times = [federation.ask(which, SiloQuestion("")) for _ in range(rounds)]
            rows.append({"what": name, **_spread(times)})
        federation.close()
    return rows


def crowds(sizes: Sequence[int], rounds: int, idle_s: float) -> list[dict[str, Any]]:
    """Processor time of the hub's process, its threads included: for an order there and back, and a silo that waits."""
    rows = []
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            federation = Federation(size, Path(folder))
            federation.ask(federation.names, SiloQuestion(""))
            begin_s, wall = time.process_time(), time.perf_counter()
            for _ in range(rounds):
                federation.ask(federation.names, SiloQuestion(""))
            spent_s, seconds = time.process_time() - begin_s, time.perf_counter() - wall
            begin_s = time.process_time()
            time.sleep(idle_s)
            waited_s = time.process_time() - begin_s
            federation.close()
        rows.append(
            {
                "silos": size,
                "processor_ms": 1e3 * spent_s / rounds / size,
                "orders_a_second": rounds * size / seconds,
                "idle_percent": 100 * waited_s / max(idle_s, 1e-9) / size,
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
            }
        )
    return rows


def large(megabytes: int) -> dict[str, float]:
    """A model down to two silos, and as much back."""
    data = np.random.default_rng(1).integers(0, 256, megabytes * 2**20, np.uint8)
    with tempfile.TemporaryDirectory() as folder:
        federation = Federation(2, Path(folder))
        begin_s = time.perf_counter()
        blob = federation.hub.publish(data)
        published_s = time.perf_counter() - begin_s
        both_s = federation.ask(federation.names, SiloQuestion("", blob, most=data.nbytes))
        federation.close()
    return {"megabytes": megabytes, "publish_s": published_s, "down_and_up_s": both_s}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--silos", type=int, nargs="+", default=[16, 100, 1000])
    parser.add_argument("--idle", type=float, default=60.0, help="seconds to measure silos that wait")
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("bench/results/hub.json"))
    options = parser.parse_args(arguments)
    back, crowd = there_and_back(options.rounds), crowds(options.silos, max(options.rounds // 30, 3), options.idle)
    moved = large(options.megabytes)
    print_table(
        "an empty question there and back, TLS, loopback",
        ("what", "median [ms]", "90 % [ms]"),
        [(row["what"], f"{row['median_ms']:.2f}", f"{row['p90_ms']:.2f}") for row in back],
    )
    print_table(
        "processor time of the hub's process, all silos at once",
        ("silos", "an order [ms]", "orders a second", "a silo that waits [% of a core]", "peak memory [MiB]"),
        [
            (
                str(row["silos"]),
                f"{row['processor_ms']:.2f}",
                f"{row['orders_a_second']:.0f}",
                f"{row['idle_percent']:.4f}",
                f"{row['peak_mib']:.0f}",
            )
            for row in crowd
        ],
    )
    print_table(
        "large bytes, two silos",
        ("MiB", "publish [s]", "down and back [s]"),
        [(str(options.megabytes), f"{moved['publish_s']:.2f}", f"{moved['down_and_up_s']:.2f}")],
    )
    write_json(options.out, {"there_and_back": back, "crowd": crowd, "large": moved})


if __name__ == "__main__":
    main()
