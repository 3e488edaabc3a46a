"""The shipped strategies by name: ``FedSync.lb_bsp(num_rounds=40)`` is ``strategies/lb-bsp.yaml`` with other numbers.

A method says which file it reads and which of the file's own settings it names. All else is in the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Self, TypedDict, Unpack

from fedsync.common.errors import ConfigError
from fedsync.config.locate import locate
from fedsync.config.strategy import StrategyConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.flower.own_loop import OwnLoop, unexpected
from fedsync.flower.silo_metrics import MetricsAggrFn
from fedsync.policies.schema import Policy


class Options(TypedDict, total=False):
    """What all shipped strategies can be told, each by its keyword; left out, the strategy's file decides."""

    num_rounds: int
    """Commits, each of which makes a model version; `FedSync.start` may say another number. Where a strategy commits
    each arrival (`asp`, `ssp`, `pbsp`, `pssp`, `fedasync`), an arrival is a round."""

    batch_size: int
    """Samples of a local step; with a balancer, the mean over silos."""

    local_steps: int
    """Local steps of an order. A pass over n samples is n / ``batch_size`` of them."""

    learning_rate: float
    """Of the local optimizer; with a ClientApp, what it finds as ``learning-rate``."""

    server_optimizer: str | Mapping[str, Any]
    """What a commit's sum of updates is made into: a kind, as ``"fedavgm"``, or with its keys, as ``{"kind": "fedadam",
    "rate": 0.01}``. Left out, the model moves by the sum."""

    task: str | Mapping[str, Any]
    """What silos train: a ClientApp as ``"my_app.client_app:app"``, or what stands below ``task`` in a strategy file.
    Left out, ``client_app:app`` in the package of the calling module."""

    fraction_train: float
    """Part of the silos that trains in a round, drawn anew for each; as `flwr`'s ``FedAvg`` has it, rounded down."""

    fraction_evaluate: float
    """Part of the silos that evaluates each version, drawn anew; at least two of them. With 0 nobody evaluates."""

    min_train_nodes: int
    """Silos that train in a round at least, however small ``fraction_train`` makes their number; by default 2."""

    min_available_nodes: int
    """Silos that must have joined before the run begins; by default 2."""

    seed: int
    """Everything random in the run follows from it."""

    overrides: Sequence[str]
    """``a.b=value`` assignments, as after ``--set``: what the keywords do not reach. They come last."""

    policies: Mapping[str, Policy]
    """Ready policies by section, as `FedSync` takes them."""

    on_round: Callable[[int], Mapping[str, bool | int | float | str]]
    """Settings of a round's orders, as `FedSync` takes them."""

    train_metrics_aggr_fn: MetricsAggrFn
    """Makes one record of the silos' training metrics in a round; as `flwr`'s strategies have it."""

    evaluate_metrics_aggr_fn: MetricsAggrFn
    """The same of their evaluations of a version."""

    out: str | Path
    """Folder for the run's files; a new temporary one by default."""

    keys: Path
    """The server's key file, for an encrypted run."""

    resume: bool
    """Go on with the run in ``out``, from its newest checkpoint."""

    overwrite: bool
    """Replace the run that ``out`` has; by default its folder is refused."""


_PLACES = {
    "batch_size": "local.batch_size",
    "local_steps": "local.steps",
    "learning_rate": "local.learning_rate",
    "min_available_nodes": "min_silos",
    "fraction_evaluate": "fraction_evaluate",
    "seed": "seed",
}
"""Keys of a strategy file, by keyword."""

_PASSED_ON = {"out", "keys", "resume", "overwrite", "policies", "on_round"} | {
    f"{which}_metrics_aggr_fn" for which in ("train", "evaluate")
}
"""Keywords that `FedSync` has, too."""

_LEAST = 2
"""Silos of a round at least, as of Flower's strategies."""


class Shipped(OwnLoop):
    """Constructors of `FedSync`, one for each shipped strategy. All take `Options`; nothing has to be given."""

    @classmethod
    def fedavg(cls, **options: Unpack[Options]) -> Self:
        """FedAvg: all silos do the same work, and everybody waits for the slowest."""
        return cls._shipped("fedavg", options)

    @classmethod
    def bsp(cls, **options: Unpack[Options]) -> Self:
        """BSP: FedAvg whose silos count the same, however much data each has."""
        return cls._shipped("bsp", options)

    @classmethod
    def lb_bsp(cls, **options: Unpack[Options]) -> Self:
        """LB-BSP: batch sizes follow each silo's predicted speed, so that all finish together."""
        return cls._shipped("lb-bsp", options)

    @classmethod
    def lb_bsp_gpu(cls, **options: Unpack[Options]) -> Self:
        """LB-BSP where a step's time is not in proportion to its batch, as on GPUs."""
        return cls._shipped("lb-bsp-gpu", options)

    @classmethod
    def lb_bsp_he(cls, **options: Unpack[Options]) -> Self:
        """LB-BSP under encryption: the server adds what it cannot read. Give ``keys``."""
        return cls._shipped("lb-bsp-he", options)

    @classmethod
    def elastic(cls, **options: Unpack[Options]) -> Self:
        """Elastic BSP (ZipLine): each silo gets so many steps that all are predicted to finish together.

        They are between half and twice ``local_steps``.
        """
        steps = options.get("local_steps")
        return cls._shipped(
            "elastic",
            options,
            lookahead=("barrier.lookahead", None if steps is None else 2 * steps),
            floor=("barrier.floor", None if steps is None else max(steps // 2, 1)),
        )

    @classmethod
    def fsp(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """FSP: every silo trains until the round's time is over, however many steps that are.

        Args:
            interval_s: how long a round takes [s].
            options: see `Options`.
        """
        return cls._shipped("fsp", options, interval_s=("barrier.interval.interval_s", interval_s))

    @classmethod
    def fsp_he(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """FSP under encryption; see `fsp` and `lb_bsp_he`."""
        return cls._shipped("fsp-he", options, interval_s=("barrier.interval.interval_s", interval_s))

    @classmethod
    def a_bsp(cls, *, sync_ratio: float | None = None, **options: Unpack[Options]) -> Self:
        """A-BSP: the first silo that is done ends the round for all, once enough samples are processed.

        Args:
            sync_ratio: part of the round's samples that is enough.
            options: see `Options`.
        """
        return cls._shipped("a-bsp", options, sync_ratio=("barrier.sync_ratio", sync_ratio))

    @classmethod
    def asp(cls, *, server_rate: float | None = None, **options: Unpack[Options]) -> Self:
        """ASP: nobody waits, and each update is committed as it arrives.

        Args:
            server_rate: how much of an update is added; one over the number of silos.
            options: see `Options`.
        """
        return cls._shipped("asp", options, server_rate=("aggregation.server_rate", server_rate))

    @classmethod
    def ssp(cls, *, staleness: int | None = None, server_rate: float | None = None, **options: Unpack[Options]) -> Self:
        """SSP: as `asp`, but nobody runs further ahead of the slowest than a bound.

        Args:
            staleness: orders that a silo may be ahead.
            server_rate: as in `asp`.
            options: see `Options`.
        """
        rate = ("aggregation.server_rate", server_rate)
        return cls._shipped("ssp", options, staleness=("barrier.staleness", staleness), server_rate=rate)

    @classmethod
    def pbsp(
        cls, *, sample_size: int | None = None, server_rate: float | None = None, **options: Unpack[Options]
    ) -> Self:
        """pBSP: a silo waits for a few others, which are drawn, instead of for all.

        Args:
            sample_size: how many are drawn.
            server_rate: as in `asp`.
            options: see `Options`.
        """
        rate = ("aggregation.server_rate", server_rate)
        return cls._shipped("pbsp", options, sample_size=("barrier.sample_size", sample_size), server_rate=rate)

    @classmethod
    def pssp(
        cls,
        *,
        sample_size: int | None = None,
        staleness: int | None = None,
        server_rate: float | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """pSSP: as `ssp`, but the bound is towards a few others, which are drawn.

        Args:
            sample_size: how many are drawn.
            staleness: orders that a silo may be ahead of those.
            server_rate: as in `asp`.
            options: see `Options`.
        """
        return cls._shipped(
            "pssp",
            options,
            sample_size=("barrier.sample_size", sample_size),
            staleness=("barrier.staleness", staleness),
            server_rate=("aggregation.server_rate", server_rate),
        )

    @classmethod
    def pssp_he(cls, **options: Unpack[Options]) -> Self:
        """pSSP under encryption; see `pssp` and `lb_bsp_he`."""
        return cls._shipped("pssp-he", options)

    @classmethod
    def auto(cls, **options: Unpack[Options]) -> Self:
        """`lb_bsp` with one local step an order and the server optimizer ``cautious-adam``."""
        return cls._shipped("auto", options)

    @classmethod
    def lb_a_bsp(cls, *, sync_ratio: float | None = None, **options: Unpack[Options]) -> Self:
        """Balanced batches, and the first silo to finish ends the round once enough is processed.

        Args:
            sync_ratio: part of a round's samples that is enough.
            options: see `Options`.
        """
        return cls._shipped("lb-a-bsp", options, sync_ratio=("barrier.sync_ratio", sync_ratio))

    @classmethod
    def lb_fsp(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """Balanced batches in rounds that are bounded by time.

        Args:
            interval_s: how long a round takes [s].
            options: see `Options`.
        """
        return cls._shipped("lb-fsp", options, interval_s=("barrier.interval.interval_s", interval_s))

    @classmethod
    def lb_fsp_psp(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """Balanced batches in rounds that are bounded by time; a round that is over waits for a sampled few.

        Args:
            interval_s: how long a round takes [s].
            options: see `Options`.
        """
        return cls._shipped("lb-fsp-psp", options, interval_s=("barrier.interval.interval_s", interval_s))

    @classmethod
    def fedbuff(cls, *, size: int | None = None, **options: Unpack[Options]) -> Self:
        """FedBuff: commits whenever so many updates are there, whoever sent them.

        Args:
            size: updates of a commit.
            options: see `Options`.
        """
        return cls._shipped("fedbuff", options, size=("barrier.size", size))

    @classmethod
    def fedasync(cls, *, mixing: float | None = None, **options: Unpack[Options]) -> Self:
        """FedAsync: each arrival is mixed into the model, the less the staler it is.

        Args:
            mixing: part of the new model that is a fresh silo's.
            options: see `Options`.
        """
        return cls._shipped("fedasync", options, mixing=("aggregation.mixing", mixing))

    @classmethod
    def fedcompass(cls, **options: Unpack[Options]) -> Self:
        """FedCompass: steps are measured out so that silos arrive in groups; ``local_steps`` are the most of them."""
        most = options.get("local_steps")
        least = None if most is None else max(most // 5, 1)
        return cls._shipped(
            "fedcompass",
            options,
            max_steps=("barrier.max_steps", most),
            min_steps=("barrier.min_steps", least),
        )

    @classmethod
    def deadline(cls, **options: Unpack[Options]) -> Self:
        """BSP, but nobody is waited for who takes longer than orders usually do."""
        return cls._shipped("deadline", options)

    @classmethod
    def _shipped(cls, name: str, options: Options, **own: tuple[str, object]) -> Self:
        """The strategy of a shipped file, with what the caller said in its place.

        Args:
            name: of the file.
            options: of all strategies.
            own: of this one: key of the file and value by keyword; None leaves it.
        """
        here = f"FedSync.{name.replace('-', '_')}"
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            raise unexpected(here, min(unknown), Options.__annotations__.keys() | own.keys())
        file = YamlFile.read(locate(name))
        part = options.get("fraction_train")
        least = options.get("min_train_nodes") or _LEAST
        within = part is not None and part != 1
        if within:
            barrier = {"kind": "fraction", "share": part, "least": least, "inner": file.data["barrier"]}
            file.put("barrier", barrier, f"{here}, fraction_train")
        if options.get("num_rounds") is not None:
            file.put("stop", {"rounds": options["num_rounds"]}, f"{here}, num_rounds")
        task = options.get("task") or _beside_the_server(sys._getframe(2).f_globals)
        file.put("task", {"kind": "clientapp", "app": task} if isinstance(task, str) else dict(task), f"{here}, task")
        optimizer = options.get("server_optimizer")
        if optimizer is not None:
            chosen = {"kind": optimizer} if isinstance(optimizer, str) else dict(optimizer)
            file.put("server_optimizer", chosen, f"{here}, server_optimizer")
        for key, (place, value) in {**{key: (_PLACES[key], options.get(key)) for key in _PLACES}, **own}.items():
            if value is not None:
                inside = place.replace("barrier.", "barrier.inner.", 1) if within else place
                file.put(inside, value, f"{here}, {key}")
        if options.get("min_train_nodes") is not None:
            available = options.get("min_available_nodes") or _LEAST
            file.put("min_silos", max(least, available), f"{here}, min_train_nodes")
        file.override(options.get("overrides", ()))
        more: dict[str, Any] = {key: value for key, value in options.items() if key in _PASSED_ON}
        return cls(file.validate(StrategyConfig), **more)  # type: ignore[call-arg]  # as `FedSync` takes them


def _beside_the_server(caller: Mapping[str, Any]) -> str:
    """``client_app:app`` in the package of a module, as Flower's templates call it.

    Raises:
        ConfigError: there is no such module.
    """
    package = caller.get("__package__") or ""
    module = f"{package}.client_app" if package else "client_app"
    if find_spec(module) is None:
        raise ConfigError("task", f"there is no module {module}", 'Name the ClientApp: task="my_app.client_app:app"')
    return f"{module}:app"
