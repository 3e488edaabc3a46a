"""Cost of sealing, adding and opening a large model: seconds by stage, and memory at the server and at a silo.

    python bench/cost/encrypted_large.py [--million 25] [--silos 2 16] [--kind bfv] [--bits 16] [--parts stages round]

No Flower, nothing is sent. A server in one process and its silos in another work in turns, and exchange files that the
receiver maps. So the figures are what encryption adds to a round with any transport.

- ``stages``: processor seconds of each step for a million values, on words that fit the cache, and the share of the
  library's own calls in it. This share is the lower bound, because sealing and opening need these calls.
- ``round``: seconds, processor seconds and peak resident memory (beyond that before the call, in models of float32) of
  one silo's `send` and `receive`, and of the server's `put`, `commit`, `outgoing` and checkpoint. The server's peak is
  over the whole run, beyond a server without silos. Repeated calls count by their median.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import print_table, write_json
from bench.cost.cipher_round import KINDS, Clock, resnet_layout, status, update_of, watched_memory
from fedsync.cipher.encoding.integrity import Authenticator
from fedsync.cipher.encoding.packing import BITS, Packing
from fedsync.cipher.encoding.quantization import QuantizationGrid, needed_exponents
from fedsync.cipher.encoding.tally import Contribution, build
from fedsync.cipher.keys.authority import EmulatedKeys, emulated_keys
from fedsync.cipher.keys.keyring import open_ring
from fedsync.cipher.keys.material import GroupKey
from fedsync.cipher.plan import EncryptionPlan
from fedsync.cipher.server.sealed_aggregator import SUMS, EncryptedAggregator
from fedsync.cipher.silo.replica import EncryptedReplica
from fedsync.cipher.suites import open_suite
from fedsync.cipher.suites.suite import Adder, Member, check_words, form_of
from fedsync.common.files import OWNER_FILE, private_folder, write_pieces
from fedsync.core.actions import Commit
from fedsync.core.orders import WorkOrder, WorkReport
from fedsync.core.silo_weight import Weighting
from fedsync.model.chunked_arrays import map_file
from fedsync.model.layout import Vector
from fedsync.model.transfer import Payload
from fedsync.server.array_files import ArrayFiles, dump

PARTS = ("stages", "round")
_CHUNKS = 64
"""Of which stages are timed: 4 MiB of words."""

_REPEATS = 5
_ROUNDS = 2


def stages(kind: str, bits: int) -> list[tuple[str, float]]:
    """Processor seconds a million values of each stage."""
    keys = _in_memory_keys(kind)
    sealer, form = open_suite(kind, keys), form_of(kind)
    packing, adder = Packing(bits, form.slot_bits), Adder(form)
    authenticator = Authenticator(bytes(32), form)
    layout = resnet_layout(_CHUNKS * packing.per_chunk)
    update = update_of(0, layout.size)
    grid = QuantizationGrid(layout, packing, needed_exponents(update, layout, 1.0, bits), 1)
    header = build(Contribution(1, grid.exponents), 1)
    rng = np.random.Generator(np.random.SFC64(0))
    member = Member("silo/1", 0, bytes(16), bytes(32))
    out, clock = np.empty(layout.size, np.float32), Clock()
    # Under `masked` these are the costs without masks, which depend on the number of silos.
    work: dict[str, Callable[[], Any]] = {
        "exponents": lambda: needed_exponents(update, layout, 1.0, bits),
        "quantise, pack": lambda: [slots for slots, _ in grid.encode(header, update, 1.0, rng)],
        "tag: linear hash": lambda: _hashed(authenticator, words),
        "SHA-256": lambda: hashlib.sha256(words.data).digest(),
        "server: check": lambda: check_words(words, form, "silo"),
        "server: add": lambda: adder.add(total, words),
        "seal": lambda: [sealer.seal(portion, member, 8 * at) for at, portion in enumerate(portions)],
        "open": lambda: sealer.open(words, [member]),
        "unpack, scale": lambda: grid.decode([slots], 1.0, out, 1),
    }
    slots = np.concatenate([slots for slots, _ in grid.encode(header, update, 1.0, rng)])
    portions = [slots[at : at + 8] for at in range(0, len(slots), 8)]
    words = sealer.seal(slots, member)
    total = words.copy()
    if kind != "pad":
        work |= _library(sealer, slots, words)
    for name, do in work.items():
        for _ in range(_REPEATS):
            clock.time(name, do)
    return [(name, 1e6 * clock.least_s[name] / layout.size) for name in work]


def _hashed(authenticator: Authenticator, words: Any) -> object:
    hasher = authenticator.hasher()
    hasher.take(words)
    return hasher.value()


def _library(sealer: Any, slots: Any, words: Any) -> dict[str, Callable[[], Any]]:
    """What the library itself does, from lists to bytes and from bytes to lists."""
    from fedsync.cipher.suites.bfv import _VECTOR

    context, head, rows = sealer._context, sealer._head, [row.tolist() for row in slots]
    messages = [head + row.tobytes() for row in words]
    return {
        "floor: encrypt": lambda: [_VECTOR(context, row) for row in rows] and None,
        "floor: encrypt, serialise": lambda: [len(_VECTOR(context, row).serialize()) for row in rows],
        "floor: load, decrypt": lambda: [len(_VECTOR(context, message).decrypt()) for message in messages],
    }


def _in_memory_keys(kind: str) -> GroupKey:
    from fedsync.cipher.suites.bfv import new_context

    return GroupKey(1, b"none" if kind == "pad" else new_context(), bytes(32), {}, bytes(32))


# A round, in two processes.

_server: list[EncryptedAggregator] = []
_peaks: list[int] = []
_checkpoints: list[ArrayFiles] = []
_silos: dict[str, EncryptedReplica] = {}


def _measured(work: Callable[[], Any]) -> tuple[Any, dict[str, float]]:
    """What the work returns, its seconds, processor seconds and most memory beyond that before [bytes]."""
    _peaks.append(status("VmHWM"))  # it is about to be forgotten
    with watched_memory() as peak:
        begin_s, processor_s = time.perf_counter(), time.process_time()
        done = work()
        taken = {"s": time.perf_counter() - begin_s, "cpu_s": time.process_time() - processor_s}
    return done, {**taken, "bytes": float(peak.used)}


def _mapped(file: Path) -> Payload:
    return map_file(file)


def _written(file: Path, payload: Payload) -> Path:
    """A payload as a file, as a transport leaves it."""
    write_pieces(file, (payload.data,), OWNER_FILE)
    return file


def _begin_server(plan: EncryptionPlan, keys: EmulatedKeys, folder: Path) -> int:
    _server[:] = [EncryptedAggregator(plan, keys.server, folder=folder / SUMS)]
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    _checkpoints[:] = [ArrayFiles(private_folder(folder / "checkpoints"))]
    _peaks.clear()
    return status("VmRSS")


def _server_peak() -> int:
    return max(*_peaks, status("VmHWM"))


def _on_server(name: str, *arguments: Any) -> Any:
    return getattr(_server[0], name)(*arguments)


def _put(silo: str, update_id: str, file: Path) -> dict[str, float]:
    return _measured(lambda: _server[0].put(silo, update_id, _mapped(file)))[1]


def _commit(version: int, update_ids: list[str], folder: Path) -> dict[str, dict[str, float]]:
    weights = {update_id: 1 / len(update_ids) for update_id in sorted(update_ids)}
    _, commit = _measured(lambda: _server[0].commit(Commit(version, weights)))
    return {"server: commit": commit}


def _outgoing(silo: str, file: Path) -> dict[str, float]:
    payload, cost = _measured(lambda: _server[0].outgoing(silo))
    _written(file, payload)
    return cost


def _checkpoint(file: Path) -> dict[str, float]:
    def save() -> None:
        data, large = dump(dict(_server[0].state()))
        names = _checkpoints[0].write(large)
        _checkpoints[0].settle(names)
        _checkpoints[0].prune(names)
        write_pieces(file, (data,), OWNER_FILE)

    return _measured(save)[1]


def _begin_silo(name: str, plan: EncryptionPlan, keys: EmulatedKeys, folder: Path) -> Payload:
    ring = open_ring(keys.silos[name])
    if not _silos:
        _initial.append(update_of(0, plan.layout.size))
    _silos[name] = EncryptedReplica(
        plan, ring, open_suite(plan.kind, ring.group), 100, lambda: _initial[0], lambda: (_initial[0], 5, 40, None),
        folder / f"{name}.copy",
    )  # fmt: skip
    return _silos[name].greeting()


_initial: list[Vector] = []


def _receive(name: str, file: Path, version: int) -> dict[str, float]:
    return _measured(lambda: _silos[name].receive(_mapped(file), version))[1]


def _send(name: str, file: Path, version: int, seed: int) -> dict[str, float]:
    order = WorkOrder(f"{name}/{version + 1}", version, version + 1, 8, 5, 0.1, seed=version)
    report, update = WorkReport(version, 5, 40, compute_s=1.0, loss=1.0), update_of(seed, _initial[0].size)
    payload, cost = _measured(lambda: _silos[name].send(update, order, report))
    _written(file, payload)
    return cost


def _answer(name: str, question: Payload) -> Payload:
    return _silos[name].answer(question)


def one_run(plan: EncryptionPlan, silos: int, folder: Path) -> tuple[dict[str, list[dict[str, float]]], int]:
    """Costs by what was done, and the server's peak beyond an idle one [bytes]."""
    names = [f"silo{number}" for number in range(silos)]
    keys = emulated_keys(names, folder / "keys", seed=1)
    costs: dict[str, list[dict[str, float]]] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn) as server, ProcessPoolExecutor(1, spawn) as silo:

        def at(place: ProcessPoolExecutor, work: Callable[..., Any], *arguments: Any) -> Any:
            return place.submit(work, *arguments).result()

        def note(what: str, cost: dict[str, float]) -> None:
            costs.setdefault(what, []).append(cost)

        idle = at(server, _begin_server, plan, keys, folder)
        for name in names:
            at(server, _on_server, "greet", name, -1, at(silo, _begin_silo, name, plan, keys, folder))
        for version in range(_ROUNDS + 1):
            updates = []
            for number, name in enumerate(names):
                at(server, _on_server, "begin", f"{name}/{version + 1}")
                sums, update = folder / "catch-up", folder / f"{name}.update"
                # The first has all that is made once a version, and version 0 is no sum.
                cost = at(server, _outgoing, name, sums)
                if version and not number:
                    note("server: outgoing", cost)
                cost = at(silo, _receive, name, sums, version)
                if version:
                    note("silo: receive", cost)
                if version == _ROUNDS:
                    break
                note("silo: send", at(silo, _send, name, update, version, number))
                note("server: put", at(server, _put, name, f"{name}/{version + 1}", update))
                at(server, _on_server, "holds", name, version)
                updates.append(f"{name}/{version + 1}")
            if version == _ROUNDS:
                break
            for what, cost in at(server, _commit, version + 1, updates, folder).items():
                note(what, cost)
            while at(server, _blocked):
                for name, question in at(server, _on_server, "questions").items():
                    at(server, _on_server, "answer", name, at(silo, _answer, name, question))
            note("server: checkpoint", at(server, _checkpoint, folder / "checkpoint"))
        peak = at(server, _server_peak) - idle
    return costs, peak


def _blocked() -> bool:
    return _server[0].blocked


def rounds(kind: str, bits: int, million: float, silos: list[int]) -> dict[str, Any]:
    layout = resnet_layout(int(million * 1e6))
    results: dict[str, Any] = {}
    rows: list[tuple[str, ...]] = []
    for count in silos:
        plan = EncryptionPlan(kind, bits, layout, Weighting(), count)
        with tempfile.TemporaryDirectory(dir=Path.cwd()) as folder:
            costs, peak = one_run(plan, count, Path(folder))
        results[str(count)] = {"costs": costs, "server_peak_bytes": peak}
        for what, several in costs.items():
            middle = {key: statistics.median(one[key] for one in several) for key in several[0]}
            models = f"{middle['bytes'] / layout.nbytes:.2f}"
            rows.append((f"{count} silos, {what}", f"{middle['s']:.2f}", f"{middle['cpu_s']:.2f}", models))
        rows.append((f"{count} silos, server: peak of the run", "", "", f"{peak / layout.nbytes:.2f}"))
    title = f"{kind}, {bits} bits, {million:g} million values ({layout.nbytes / 2**20:.0f} MiB as float32)"
    print_table(title, ("", "seconds", "processor s", "memory [models]"), rows)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--million", type=float, default=25.0, help="values of the model")
    parser.add_argument("--silos", type=int, nargs="+", default=[2, 16])
    parser.add_argument("--kind", choices=KINDS, default="bfv")
    parser.add_argument("--bits", type=int, choices=BITS, default=16)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, default=Path("bench/results/encrypted_large.json"))
    options = parser.parse_args()
    results: dict[str, Any] = {}
    if "stages" in options.parts:
        found = stages(options.kind, options.bits)
        results["stages"] = dict(found)
        rows = [(name, f"{1e3 * seconds:.2f}", f"{seconds * options.million:.2f}") for name, seconds in found]
        title = f"{options.kind}, {options.bits} bits: processor time by stage"
        print_table(title, ("", "ms a million values", f"s for {options.million:g} million"), rows)
    if "round" in options.parts:
        results["round"] = rounds(options.kind, options.bits, options.million, options.silos)
    write_json(options.out, results)


if __name__ == "__main__":
    main()
