"""Constructors of shipped strategies: ``FedSync.lb_bsp(num_rounds=40)`` is ``strategies/lb-bsp.yaml`` with 40 rounds.

Each method names a file and the file's own settings. All other settings are in the files.
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
from fedsync.flower.silo_metrics import MetricsAggrFn
from fedsync.flower.uncalled_methods import OwnLoop, unexpected
from fedsync.policies.schema import Policy


class Options(TypedDict, total=False):
    """Keywords of all shipped strategies; for an omitted keyword, the strategy's file decides."""

    num_rounds: int
    """Number of commits, each of which makes a model version; `FedSync.start` may override it. Strategies that commit
    each arrival (`asp`, `ssp`, `pbsp`, `pssp`, `fedasync`) count each arrival as a round."""

    batch_size: int
    """Batch size of a local step [samples]; with a balancer, the mean over silos."""

    local_steps: int
    """Number of local steps in an order. A pass over n samples is n / ``batch_size`` steps."""

    learning_rate: float
    """Learning rate of the local optimizer; a ClientApp finds it as ``learning-rate``."""

    server_optimizer: str | Mapping[str, Any]
    """Optimizer that turns a commit's sum of updates into a step of the model: a kind, as ``"fedavgm"``, or a kind with
    its keys, as ``{"kind": "fedadam", "rate": 0.01}``. Left out, the model moves by the sum."""

    task: str | Mapping[str, Any]
    """Task of the silos: a ClientApp as ``"my_app.client_app:app"``, or the content of ``task`` in a strategy file.
    Left out, ``client_app:app`` in the package of the calling module."""

    fraction_train: float
    """Share of the silos that trains in a round, drawn anew each time; rounded down, as in `flwr`'s ``FedAvg``."""

    fraction_evaluate: float
    """Share of the silos that evaluates each version, drawn anew; at least two silos. With 0, no silo evaluates."""

    min_train_nodes: int
    """Minimum number of silos that train in a round, whatever ``fraction_train`` is; by default 2."""

    min_available_nodes: int
    """Number of silos that must have joined before the run begins; by default 2."""

    seed: int
    """Seed of all random numbers of the run."""

    overrides: Sequence[str]
    """``a.b=value`` assignments, as after ``--set``, for settings without a keyword. They are applied last."""

    policies: Mapping[str, Policy]
    """Ready policies by section, as in `FedSync`."""

    on_round: Callable[[int], Mapping[str, bool | int | float | str]]
    """Settings of a round's orders, as in `FedSync`."""

    train_metrics_aggr_fn: MetricsAggrFn
    """Function that combines the silos' training metrics of a round into one record, as in `flwr`'s strategies."""

    evaluate_metrics_aggr_fn: MetricsAggrFn
    """Function that combines the silos' evaluations of a version into one record."""

    out: str | Path
    """Folder for the run's files; by default a new temporary folder."""

    keys: Path
    """Key file of the server, for an encrypted run."""

    resume: bool
    """Whether to resume the run in ``out`` from its newest checkpoint."""

    overwrite: bool
    """Whether to replace an existing run in ``out``; by default, such a folder is refused."""


_PLACES = {
    "batch_size": "local.batch_size",
    "local_steps": "local.steps",
    "learning_rate": "local.learning_rate",
    "min_available_nodes": "min_silos",
    "fraction_evaluate": "fraction_evaluate",
    "seed": "seed",
}
"""Keys of a strategy file by keyword of all strategies."""

_OWN_PLACES = {
    "interval_s": "barrier.interval.interval_s",
    "server_rate": "aggregation.server_rate",
    "mixing": "aggregation.mixing",
}
"""Keys by keyword of single strategies; all others are of the barrier."""

_PASSED_ON = {"out", "keys", "resume", "overwrite", "policies", "on_round"}
_PASSED_ON |= {"train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"}
"""Keywords that are passed to `FedSync`."""

_LEAST = 2
"""Minimum number of silos in a round, as in Flower's strategies."""


class Shipped(OwnLoop):
    """Constructors of `FedSync`, one for each shipped strategy. All take `Options`; no argument is required."""

    @classmethod
    def fedavg(cls, **options: Unpack[Options]) -> Self:
        """FedAvg: all silos do the same work, and each round waits for the slowest silo."""
        return cls._shipped("fedavg", options)

    @classmethod
    def bsp(cls, **options: Unpack[Options]) -> Self:
        """BSP: FedAvg under the name that the papers use."""
        return cls._shipped("bsp", options)

    @classmethod
    def lb_bsp(cls, **options: Unpack[Options]) -> Self:
        """LB-BSP: batch sizes follow each silo's predicted speed, so that all silos finish together."""
        return cls._shipped("lb-bsp", options)

    @classmethod
    def lb_bsp_gpu(cls, **options: Unpack[Options]) -> Self:
        """LB-BSP for step times that are not proportional to the batch, as on GPUs."""
        return cls._shipped("lb-bsp-gpu", options)

    @classmethod
    def lb_bsp_he(cls, **options: Unpack[Options]) -> Self:
        """LB-BSP under encryption: the server adds updates that it cannot read. Requires ``keys``."""
        return cls._shipped("lb-bsp-he", options)

    @classmethod
    def elastic(cls, **options: Unpack[Options]) -> Self:
        """Elastic BSP (ZipLine): each silo gets a number of steps with which all are predicted to finish together.

        The number is between half and twice ``local_steps``.
        """
        steps = options.get("local_steps")
        own = {} if steps is None else {"lookahead": 2 * steps, "floor": max(steps // 2, 1)}
        return cls._shipped("elastic", options, **own)

    @classmethod
    def fsp(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """FSP: every silo trains until the time of the round is over, for any number of steps.

        Args:
            interval_s: length of a round [s].
        """
        return cls._shipped("fsp", options, interval_s=interval_s)

    @classmethod
    def fsp_he(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """FSP under encryption; see `fsp` and `lb_bsp_he`."""
        return cls._shipped("fsp-he", options, interval_s=interval_s)

    @classmethod
    def a_bsp(cls, *, sync_ratio: float | None = None, **options: Unpack[Options]) -> Self:
        """A-BSP: the first silo that finishes ends the round for all, once enough samples are processed.

        Args:
            sync_ratio: share of the round's samples that is enough.
        """
        return cls._shipped("a-bsp", options, sync_ratio=sync_ratio)

    @classmethod
    def asp(cls, *, server_rate: float | None = None, **options: Unpack[Options]) -> Self:
        """ASP: no silo waits, and each update is committed as it arrives.

        Args:
            server_rate: factor on each update; 1 / number of silos is the usual choice.
        """
        return cls._shipped("asp", options, server_rate=server_rate)

    @classmethod
    def ssp(cls, *, staleness: int | None = None, server_rate: float | None = None, **options: Unpack[Options]) -> Self:
        """SSP: as `asp`, but a silo may be ahead of the slowest silo only by a bound.

        Args:
            staleness: maximum lead of a silo [orders].
            server_rate: as in `asp`.
        """
        return cls._shipped("ssp", options, staleness=staleness, server_rate=server_rate)

    @classmethod
    def pbsp(
        cls, *, sample_size: int | None = None, server_rate: float | None = None, **options: Unpack[Options]
    ) -> Self:
        """pBSP: a silo waits for a random sample of other silos instead of for all.

        Args:
            sample_size: number of silos in the sample.
            server_rate: as in `asp`.
        """
        return cls._shipped("pbsp", options, sample_size=sample_size, server_rate=server_rate)

    @classmethod
    def pssp(
        cls,
        *,
        sample_size: int | None = None,
        staleness: int | None = None,
        server_rate: float | None = None,
        **options: Unpack[Options],
    ) -> Self:
        """pSSP: as `ssp`, but with the bound on the lead over a random sample of other silos.

        Args:
            sample_size: number of silos in the sample.
            staleness: maximum lead over the sample [orders].
            server_rate: as in `asp`.
        """
        return cls._shipped(
            "pssp",
            options,
            sample_size=sample_size,
            staleness=staleness,
            server_rate=server_rate,
        )

    @classmethod
    def pssp_he(cls, **options: Unpack[Options]) -> Self:
        """pSSP under encryption; see `pssp` and `lb_bsp_he`."""
        return cls._shipped("pssp-he", options)

    @classmethod
    def auto(cls, **options: Unpack[Options]) -> Self:
        """`lb_bsp` with one local step per order and the server optimizer ``cautious-adam``."""
        return cls._shipped("auto", options)

    @classmethod
    def lb_a_bsp(cls, *, sync_ratio: float | None = None, **options: Unpack[Options]) -> Self:
        """LB-BSP and A-BSP: balanced batches, and the first silo that finishes ends the round, as in `a_bsp`."""
        return cls._shipped("lb-a-bsp", options, sync_ratio=sync_ratio)

    @classmethod
    def lb_fsp(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """LB-BSP and FSP: balanced batches in rounds of fixed time ``interval_s`` [s]."""
        return cls._shipped("lb-fsp", options, interval_s=interval_s)

    @classmethod
    def lb_fsp_psp(cls, *, interval_s: float | None = None, **options: Unpack[Options]) -> Self:
        """LB-BSP, FSP and PSP: as `lb_fsp`, but the end of a round waits for a random sample of silos."""
        return cls._shipped("lb-fsp-psp", options, interval_s=interval_s)

    @classmethod
    def fedbuff(cls, *, size: int | None = None, **options: Unpack[Options]) -> Self:
        """FedBuff: commit whenever ``size`` updates have arrived, from any silos."""
        return cls._shipped("fedbuff", options, size=size)

    @classmethod
    def fedasync(cls, *, mixing: float | None = None, **options: Unpack[Options]) -> Self:
        """FedAsync: each arrival is mixed into the model, with less weight the staler it is.

        Args:
            mixing: share of a fresh silo's model in the new model.
        """
        return cls._shipped("fedasync", options, mixing=mixing)

    @classmethod
    def fedcompass(cls, **options: Unpack[Options]) -> Self:
        """FedCompass: step counts make silos arrive in groups; ``local_steps`` is the maximum number of steps."""
        most = options.get("local_steps")
        own = {} if most is None else {"max_steps": most, "min_steps": max(most // 5, 1)}
        return cls._shipped("fedcompass", options, **own)

    @classmethod
    def deadline(cls, **options: Unpack[Options]) -> Self:
        """BSP that does not wait for silos whose order takes longer than orders usually do."""
        return cls._shipped("deadline", options)

    @classmethod
    def quorum(cls, *, share: float | None = None, **options: Unpack[Options]) -> Self:
        """BSP whose rounds end when ``share`` of the silos have sent; later updates are part of the next round."""
        return cls._shipped("quorum", options, share=share)

    @classmethod
    def _shipped(cls, name: str, options: Options, **own: object) -> Self:
        """Build the strategy of a shipped file, with the caller's settings; None keeps the file's value."""
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
        places = _PLACES | {key: _OWN_PLACES.get(key, f"barrier.{key}") for key in own}
        for key, place in places.items():
            value = own.get(key, options.get(key))
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
    """Return ``client_app:app`` in the package of a module, the usual place in Flower's templates.

    Raises:
        ConfigError: the module does not exist.
    """
    package = caller.get("__package__") or ""
    module = f"{package}.client_app" if package else "client_app"
    if find_spec(module) is None:
        raise ConfigError("task", f"there is no module {module}", 'Name the ClientApp: task="my_app.client_app:app"')
    return f"{module}:app"
