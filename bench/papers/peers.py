"""Code of other frameworks beside FedSync's, if installed: NVFLARE's encryption and APPFL's FedCompass.

    python bench/papers/peers.py [--parts nvflare appfl] [--params 1000000] [--quick] [--out FILE.json]

- ``nvflare``: the same updates through NVFLARE's own filters and aggregator (CKKS with the parameters that its
  provisioning chooses), and through FedSync's ``bfv``: processor time and bytes of a round.
  `bench/cost/cipher.py --against ckks` reimplements this arrangement; here it is the package itself, with its messages.
- ``appfl``: APPFL's scheduler of FedCompass and FedSync's, both in virtual time on ``one-to-three.yaml``, without
  training: local steps of a silo, updates per commit, the spread of their arrivals, and silos' waiting times. APPFL's
  reads the clock and sets timers, so it gets a virtual clock.

Neither package is used elsewhere, nor installed with FedSync. A part without its package is skipped.
NVFLARE's ``add`` and ``open`` count every stage that its message passes. FedSync's ``add`` excludes the check of
the signature, which NVFLARE leaves to the connection.
flwr's FedAvg is measured by ``driver_overhead.py`` and ``lb_bsp.py``.
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import logging
import tempfile
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.common import print_table, write_json
from bench.cost.cipher_peers import measure_peers
from bench.cost.cipher_round import CipherCost, measure_suite
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.model.layout import Layout, Vector

PARTS = ("nvflare", "appfl")
CLUSTER = "one-to-three"
MIN_STEPS, MAX_STEPS, LATEST = 4, 20, 1.2
SPEED_MOMENTUM = 0.9
"""Of APPFL's examples."""
SILOS = 4


# NVFLARE's encryption.


class NvflareSilo:
    """A client's filters, and the serialisation that its messages go through."""

    def __init__(self) -> None:
        import tenseal
        from nvflare.apis.fl_context import FLContext
        from nvflare.app_opt.he.model_decryptor import HEModelDecryptor
        from nvflare.app_opt.he.model_encryptor import HEModelEncryptor
        from nvflare.lighter.impl.he import HEBuilder

        builder = HEBuilder()
        # Of the project and its participants nothing is looked at here.
        builder.initialize(None, None)
        self.server_context = builder.get_serialized_context()
        context = tenseal.context_from(builder.get_serialized_context(is_client=True), n_threads=1)
        self._encryptor, self._decryptor, self._fl_ctx = HEModelEncryptor(), HEModelDecryptor(), FLContext()
        self._encryptor.tenseal_context = self._decryptor.tenseal_context = context
        self._encryptor.encrypt_layers = [True]  # all of them, as its own handler of the start says it

    def seal(self, values: Vector, layout: Layout, weight: int) -> list[bytes]:
        """The message of an update."""
        from nvflare.apis.dxo import DXO, DataKind, MetaKey
        from nvflare.apis.fl_context import FLContext
        from nvflare.app_common.app_constant import AppConstants
        from nvflare.fuel.utils import fobs

        meta = {MetaKey.NUM_STEPS_CURRENT_ROUND: weight}
        dxo = DXO(DataKind.WEIGHT_DIFF, data=dict(layout.split(values)), meta=meta)
        peer = FLContext()
        peer.put("__identity_name__", f"silo{weight}", private=False, sticky=False)
        self._fl_ctx.set_peer_context(peer)
        shareable = self._encryptor.process_dxo(dxo, dxo.to_shareable(), self._fl_ctx).to_shareable()
        shareable.add_cookie(AppConstants.CONTRIBUTION_ROUND, 0)
        return [fobs.dumps(shareable)]

    def open(self, sealed: list[bytes], layout: Layout) -> Vector:
        """The mean."""
        from nvflare.apis.dxo import from_shareable
        from nvflare.fuel.utils import fobs

        shareable = fobs.loads(sealed[0])
        dxo = self._decryptor.process_dxo(from_shareable(shareable), shareable, self._fl_ctx)
        return layout.join({name: np.array(dxo.data[name], dtype=np.float32) for name in layout.names})


class NvflareServer:
    """The aggregator, and the serialisation that its messages go through."""

    def __init__(self) -> None:
        from nvflare.apis.event_type import EventType
        from nvflare.apis.fl_context import FLContext
        from nvflare.app_common.app_constant import AppConstants
        from nvflare.app_opt.he.intime_accumulate_model_aggregator import HEInTimeAccumulateWeightedAggregator

        self._fl_ctx = FLContext()
        self._fl_ctx.set_prop(AppConstants.CURRENT_ROUND, 0)
        self._aggregator = HEInTimeAccumulateWeightedAggregator()
        self._aggregator.handle_event(EventType.START_RUN, self._fl_ctx)
        self._names = itertools.count()

    def add(self, sealed: list[bytes]) -> None:
        """Load a message and add it."""
        from nvflare.apis.fl_constant import ReservedKey
        from nvflare.fuel.utils import fobs

        shareable = fobs.loads(sealed[0])
        shareable.set_peer_props({ReservedKey.IDENTITY_NAME: f"silo{next(self._names)}"})
        if not self._aggregator.accept(shareable, self._fl_ctx):
            raise SystemExit("NVFLARE's aggregator did not accept an update")

    def mean(self, weights: Sequence[int]) -> list[bytes]:
        """The message of the mean."""
        from nvflare.fuel.utils import fobs

        return [fobs.dumps(self._aggregator.aggregate(self._fl_ctx))]


def nvflare(params: int) -> dict[str, Any] | None:
    """One round with FedSync's ``bfv`` and with NVFLARE; None without NVFLARE."""
    try:
        import nvflare.app_opt.he  # noqa: F401 (to see whether it is there)
    except ImportError as error:
        print(f"nvflare: skipped ({error}). To compare: pip install -c constraints.txt nvflare")
        return None
    logging.disable(logging.ERROR)  # it expects an engine around it, and says so at every step
    ours = measure_suite("bfv", 16, params, SILOS)
    theirs = measure_peers(params, SILOS, (NvflareSilo(), NvflareServer()), "nvflare")

    def cells(label: str, name: str, better: Callable[[float, float], float] | None) -> tuple[str, ...]:
        own, other = float(getattr(ours, name)), float(getattr(theirs, name))
        ratio = "" if better is None else f"{better(own, other):.1f}x"
        return label, f"{own:.4g}", f"{other:.4g}", ratio

    def more(own: float, other: float) -> float:
        return own / other

    def less(own: float, other: float) -> float:
        return other / own

    rows: list[tuple[str, ...]] = [
        cells("silo: seal, M values/s", "seal_mparams_s", more),
        cells("server: add, M values/s", "server_add_mparams_s", more),
        cells("silo: open, M values/s", "open_mparams_s", more),
        cells("bytes a value, up", "bytes_per_param_up", less),
        cells("bytes a value, down", "bytes_per_param_down", less),
        cells("largest error, of the largest value", "max_error", None),
        cells("peak memory, MiB", "peak_mib", less),
    ]
    title = f"{params:,} values in 102 tensors, {SILOS} silos; processor time"
    print_table(title, ("", "FedSync, bfv of 16 bits", "NVFLARE, CKKS", "FedSync is better"), rows)
    results: dict[str, CipherCost] = {"fedsync": ours, "nvflare": theirs}
    return {name: asdict(cost) for name, cost in results.items()}


# APPFL's FedCompass.


@dataclass(slots=True)
class VirtualTime:
    """Stands in for the modules ``time`` and ``threading`` of one module: nobody else is near, so locks are locks."""

    now_s: float = 0.0
    Lock: Callable[[], Any] = threading.Lock
    _heap: list[tuple[float, int, Callable[[], None]]] = field(default_factory=list)
    _serial: itertools.count[int] = field(default_factory=itertools.count)

    def time(self) -> float:
        """Virtual seconds."""
        return self.now_s

    def at(self, at_s: float, call: Callable[[], None]) -> None:
        """Have something done then."""
        heapq.heappush(self._heap, (at_s, next(self._serial), call))

    def run(self, until_s: float) -> None:
        """Let time pass."""
        while self._heap and self._heap[0][0] <= until_s:
            self.now_s, _, call = heapq.heappop(self._heap)
            call()

    def Timer(self, interval: float, function: Callable[..., None], args: Any = (), kwargs: Any = None) -> VirtualTimer:
        """As `threading.Timer`."""
        return VirtualTimer(self, interval, lambda: function(*args, **(kwargs or {})))


@dataclass(slots=True)
class VirtualTimer:
    """As `threading.Timer`."""

    clock: VirtualTime
    interval: float
    call: Callable[[], None]
    cancelled: bool = False

    def start(self) -> None:
        """Begin to wait."""
        self.clock.at(self.clock.now_s + self.interval, lambda: None if self.cancelled else self.call())

    def cancel(self) -> None:
        """Do nothing when the time has come."""
        self.cancelled = True


@dataclass(slots=True)
class Books:
    """What happened: orders of each silo as (steps, busy seconds, waited seconds), commits as arrival times."""

    orders: dict[str, list[tuple[int, float, float]]] = field(default_factory=dict)
    commits: list[list[float]] = field(default_factory=list)

    def figures(self) -> dict[str, Any]:
        """For the table; what happened first, while speeds were not known, is in it."""
        waits = [wait_s for orders in self.orders.values() for *_, wait_s in orders]
        busy = [busy_s for orders in self.orders.values() for _, busy_s, _ in orders]
        several = [arrivals for arrivals in self.commits if len(arrivals) > 1]
        return {
            "steps": {name: fmean(steps for steps, *_ in orders) for name, orders in sorted(self.orders.items())},
            "commits": len(self.commits),
            "updates_per_commit": fmean(map(len, self.commits)),
            "spread_s": fmean(max(arrivals) - min(arrivals) for arrivals in several) if several else 0.0,
            "wait_fraction": sum(waits) / (sum(waits) + sum(busy)),
            "steps_in_all": sum(steps for orders in self.orders.values() for steps, *_ in orders),
        }


class CompassRun:
    """APPFL's scheduler, driven by silos of these seconds a step."""

    def __init__(self, step_s: dict[str, float]) -> None:
        from appfl.algorithm.scheduler import compass_scheduler
        from omegaconf import DictConfig

        self.books, self.clock, self._step_s = Books({name: [] for name in step_s}), VirtualTime(), step_s
        self._arrived: dict[str, float] = {}
        compass_scheduler.time = compass_scheduler.threading = self.clock
        options = DictConfig(
            {
                "num_clients": len(step_s),
                "same_init_model": False,
                "min_local_steps": MIN_STEPS,
                "max_local_steps": MAX_STEPS,
                "latest_time_factor": LATEST,
                "speed_momentum": SPEED_MOMENTUM,
                "optimize_memory": False,
            }
        )
        self._scheduler = compass_scheduler.CompassScheduler(options, self, logging.getLogger("appfl"))

    def run(self, seconds: float) -> Books:
        """So many virtual seconds."""
        for name in self._step_s:
            self._scheduler.get_parameters()
            self._begin(name, MAX_STEPS)
        self.clock.run(seconds)
        return self.books

    def get_parameters(self, **_: Any) -> dict[str, Any]:
        """As the scheduler's aggregator."""
        return {}

    def aggregate(
        self, client_id: str | None = None, local_model: Any = None, local_models: Any = None, **_: Any
    ) -> dict[str, Any]:
        """As the scheduler's aggregator: a commit."""
        names = [client_id] if client_id is not None else list(local_models)
        self.books.commits.append([self._arrived[name] for name in names])
        return {}

    def _begin(self, name: str, steps: int) -> None:
        began_s = self.clock.now_s
        self.clock.at(began_s + steps * self._step_s[name], lambda: self._arrive(name, steps, began_s))

    def _arrive(self, name: str, steps: int, began_s: float) -> None:
        arrived_s = self._arrived[name] = self.clock.now_s

        def go_on(answer: tuple[Any, dict[str, int]]) -> None:
            self.books.orders[name].append((steps, arrived_s - began_s, self.clock.now_s - arrived_s))
            self._begin(name, answer[1]["local_steps"])

        answer = self._scheduler.schedule(name, {})
        if isinstance(answer, Future):
            answer.add_done_callback(lambda future: go_on(future.result()))
        else:
            go_on(answer)


def own_compass(cluster: ClusterConfig, seconds: float) -> Books:
    """FedSync's ``fedcompass.yaml`` on the same silos."""
    from fedsync.observe.replay import read_ledger
    from fedsync.simulation.timing_only import run_timing

    config = StrategyConfig.load("fedcompass", [f"stop={{seconds: {seconds}}}"])
    with tempfile.TemporaryDirectory() as folder:
        run_timing(config, cluster, Path(folder))
        rows = read_ledger(Path(folder) / "journal.jsonl").rounds
    books = Books({silo.name: [] for silo in cluster.silos})
    for row in rows:
        books.commits.append([row.at_s - share.wait_s for share in row.silos.values()])
        for name, share in row.silos.items():
            books.orders[name].append((share.steps, share.compute_s + share.overhead_s, share.wait_s))
    return books


def appfl(seconds: float) -> dict[str, Any] | None:
    """Both schedulers; None without APPFL."""
    try:
        import appfl.algorithm.scheduler.compass_scheduler  # noqa: F401 (to see whether it is there)
    except ImportError as error:
        print(f"appfl: skipped ({error}). To compare: pip install appfl, in an environment of its own, with FedSync")
        return None
    cluster = ClusterConfig.load(CLUSTER)
    size = StrategyConfig.load("fedcompass", []).local.batch_size
    step_s = {silo.name: size / silo.speed for silo in cluster.silos}
    runs = {"FedSync": own_compass(cluster, seconds).figures(), "APPFL": CompassRun(step_s).run(seconds).figures()}
    columns = ("", *(f"{silo.speed:g}/s" for silo in cluster.silos))
    title = f"FedCompass on {CLUSTER}.yaml, {seconds:g} virtual s: mean local steps of an order, by the silo's speed"
    print_table(title, columns, [(n, *(f"{s:.1f}" for s in run["steps"].values())) for n, run in runs.items()])
    print_table(
        "The same runs",
        ("", "commits", "updates a commit", "arrivals apart [s]", "waiting", "local steps in all"),
        [
            (
                name,
                run["commits"],
                f"{run['updates_per_commit']:.2f}",
                f"{run['spread_s']:.3f}",
                f"{run['wait_fraction']:.1%}",
                f"{run['steps_in_all']:,}",
            )
            for name, run in runs.items()
        ],
    )
    return runs


def main() -> None:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--params", type=int, default=1_000_000)
    parser.add_argument("--quick", action="store_true", help="tiny, to see that it works")
    parser.add_argument("--processes", type=int, default=1, help="as for other benches; one is all it takes")
    parser.add_argument("--out", type=Path, default=Path("bench/results/peers.json"))
    options = parser.parse_args()
    if options.quick:
        options.params = 20_000
    results: dict[str, Any] = {}
    if "nvflare" in options.parts:
        results["nvflare"] = nvflare(options.params)
    if "appfl" in options.parts:
        results["appfl"] = appfl(60.0 if options.quick else 600.0)
    write_json(options.out, results)


if __name__ == "__main__":
    main()
