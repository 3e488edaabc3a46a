"""Constructors of shipped strategies: ``FedSync.lb_bsp(num_rounds=40)`` is ``lb-bsp.yaml`` with 40 rounds."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, TypedDict, TypeVar, Unpack

from fedsync.common.errors import ConfigError
from fedsync.common.field_docs import meanings
from fedsync.config.locate import locate
from fedsync.config.strategy import StrategyConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.flower.silo_metrics import MetricsAggrFn
from fedsync.flower.uncalled_methods import OwnLoop, unexpected
from fedsync.policies.schema import Policy


class Options(TypedDict, total=False):
    """Keywords of shipped strategies; for an omitted keyword, the strategy's file decides.

    If only some strategies take a keyword, its description ends with their names.
    """

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
    """Minimum number of silos in a round, unless silos are lost, whatever ``fraction_train`` is; by default 2."""

    min_available_nodes: int
    """Number of silos that must have joined before the run begins; by default 2."""

    interval_s: float
    """Length of a round [s]: `fsp`, `fsp_he`, `lb_fsp`, `lb_fsp_psp`."""

    sync_ratio: float
    """Share of a round's samples that ends the round: `a_bsp`, `lb_a_bsp`."""

    share: float
    """Share of the silos whose updates end a round; later updates are part of the next round: `quorum`."""

    server_rate: float
    """Factor on the step of each commit. With single updates (`asp`, `ssp`, `pbsp`, `pssp`), 1 / number of silos is the
    usual choice. Unknown to `fedavg`, `bsp`, `deadline`, `quorum` and `fedasync`."""

    staleness: int
    """Maximum lead of a silo over the slowest silo [orders]; in `pssp`, over the sample: `ssp`, `pssp`."""

    sample_size: int
    """Number of silos in the sample for which a silo waits: `pbsp`, `pssp`."""

    size: int
    """Number of arrived updates that make a commit: `fedbuff`."""

    mixing: float
    """Share of a fresh silo's model in the new model: `fedasync`."""

    seed: int
    """Seed of all random numbers of the run."""

    overrides: Sequence[str]
    """``a.b=value`` assignments, as after ``--set``, for settings without a keyword. They are applied last."""

    policies: Mapping[str, Policy]
    """Ready policies by section, as in `FedSync`. A keyword that sets a replaced section is refused."""

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
    "interval_s": "barrier.interval.interval_s",
    "server_rate": "aggregation.server_rate",
    "mixing": "aggregation.mixing",
    **{key: f"barrier.{key}" for key in ("sync_ratio", "share", "staleness", "sample_size", "size")},
}
"""Keys of a strategy file by keyword."""

_WHOLE = {"fraction_train": "barrier", "server_optimizer": "server_optimizer", "on_round": "on_round"}
"""Section by keyword that sets or wraps a whole section."""

_PASSED_ON = {"out", "keys", "resume", "overwrite", "policies", "on_round"}
_PASSED_ON |= {"train_metrics_aggr_fn", "evaluate_metrics_aggr_fn"}

_LEAST = 2
"""Minimum number of silos in a round, as in Flower's strategies."""


def _steps_of(name: str, steps: int) -> dict[str, int]:
    match name:
        case "elastic":
            return {"lookahead": 2 * steps, "floor": max(steps // 2, 1)}
        case "fedcompass":
            return {"max_steps": steps, "min_steps": max(steps // 5, 1)}
    return {}


def _refuse_replaced(here: str, options: Options) -> None:
    """Raise `ConfigError` if a keyword or an override sets a section that a ready policy replaces."""
    ready = options.get("policies") or {}
    keys = {key: place for key, place in {**_PLACES, **_WHOLE}.items() if options.get(key) is not None}
    if options.get("fraction_train") == 1:
        del keys["fraction_train"]  # all silos: the barrier is not wrapped
    places = [*keys.items(), *(("overrides", each.partition("=")[0].strip()) for each in options.get("overrides", ()))]
    for key, place in places:
        section = place.partition(".")[0]
        if section in ready:
            problem = f"policies[{section!r}] replaces the section that it sets"
            raise ConfigError(f"{here}, {key}", problem, "Leave out one of the two, or set it in the policy")


Made = TypeVar("Made", bound="Shipped", covariant=True)


class Constructor(Protocol[Made]):
    """Constructor of a shipped strategy; no argument is required."""

    def __call__(self, **options: Unpack[Options]) -> Made: ...


class ShippedFile:
    """Class attribute whose value is the constructor of a shipped file, ``lb-bsp.yaml`` for the name ``lb_bsp``."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._owner, self._key = owner, name

    def __get__(self, instance: object, owner: type[Made]) -> Constructor[Made]:
        made = partial(owner._shipped, self._key.replace("_", "-"))
        made.__doc__ = meanings(self._owner)[self._key]  # for help()
        return made


class Shipped(OwnLoop):
    """Constructors of `FedSync`, one for each shipped strategy. All take `Options`."""

    fedavg = ShippedFile()
    """FedAvg: all silos do the same work, and each round waits for the slowest silo."""
    bsp = ShippedFile()
    """BSP: FedAvg under the name that the papers use."""
    lb_bsp = ShippedFile()
    """LB-BSP: batch sizes follow each silo's predicted speed, so that all silos finish together."""
    lb_bsp_gpu = ShippedFile()
    """LB-BSP for step times that are not proportional to the batch, as on GPUs."""
    lb_bsp_he = ShippedFile()
    """LB-BSP under encryption: the server adds updates that it cannot read. Requires ``keys``."""
    elastic = ShippedFile()
    """Elastic BSP (ZipLine): step counts from half to twice ``local_steps``, so that all silos finish together."""
    fsp = ShippedFile()
    """FSP: every silo trains until the time of the round is over, for any number of steps."""
    fsp_he = ShippedFile()
    """FSP under encryption; see `lb_bsp_he`."""
    a_bsp = ShippedFile()
    """A-BSP: the first silo that finishes ends the round for all, once enough samples are processed."""
    asp = ShippedFile()
    """ASP: no silo waits, and each update is committed as it arrives."""
    ssp = ShippedFile()
    """SSP: as `asp`, but a silo may be ahead of the slowest silo only by a bound."""
    pbsp = ShippedFile()
    """pBSP: a silo waits for a random sample of other silos instead of for all."""
    pssp = ShippedFile()
    """pSSP: as `ssp`, but with the bound on the lead over a random sample of other silos."""
    pssp_he = ShippedFile()
    """pSSP under encryption; see `lb_bsp_he`."""
    auto = ShippedFile()
    """`lb_bsp` with one local step per order and the server optimizer ``cautious-adam``."""
    lb_a_bsp = ShippedFile()
    """LB-BSP and A-BSP: balanced batches, and the first silo that finishes ends the round."""
    lb_fsp = ShippedFile()
    """LB-BSP and FSP: balanced batches in rounds of fixed time."""
    lb_fsp_psp = ShippedFile()
    """LB-BSP, FSP and PSP: as `lb_fsp`, but the end of a round waits for a random sample of silos."""
    fedbuff = ShippedFile()
    """FedBuff: a commit whenever enough updates have arrived, from any silos."""
    fedasync = ShippedFile()
    """FedAsync: each arrival is mixed into the model, with less weight the staler it is."""
    fedcompass = ShippedFile()
    """FedCompass: step counts make silos arrive in groups; ``local_steps`` is the maximum number of steps."""
    deadline = ShippedFile()
    """BSP that does not wait for silos whose order takes longer than orders usually do."""
    quorum = ShippedFile()
    """BSP whose rounds end when a share of the silos has sent."""

    @classmethod
    def _shipped(cls, name: str, **options: Unpack[Options]) -> Self:
        """Build the strategy of a shipped file, with the caller's settings; None keeps the file's value."""
        here = f"FedSync.{name.replace('-', '_')}"
        unknown = options.keys() - Options.__annotations__.keys()
        if unknown:
            raise unexpected(here, min(unknown), Options.__annotations__)
        _refuse_replaced(here, options)
        file = YamlFile.read(locate(name))
        part = options.get("fraction_train")
        least = options.get("min_train_nodes") or _LEAST
        within = part is not None and part != 1
        if within:
            barrier = {"kind": "fraction", "share": part, "least": least, "inner": file.data["barrier"]}
            file.put("barrier", barrier, f"{here}, fraction_train")
        if options.get("num_rounds") is not None:
            file.put("stop", {"rounds": options["num_rounds"]}, f"{here}, num_rounds")
        task = options.get("task") or _beside_the_server(sys._getframe(1).f_globals)
        file.put("task", {"kind": "clientapp", "app": task} if isinstance(task, str) else dict(task), f"{here}, task")
        optimizer = options.get("server_optimizer")
        if optimizer is not None:
            chosen = {"kind": optimizer} if isinstance(optimizer, str) else dict(optimizer)
            file.put("server_optimizer", chosen, f"{here}, server_optimizer")
        steps = {} if options.get("local_steps") is None else _steps_of(name, options["local_steps"])
        for key, value in {**options, **steps}.items():
            place = f"barrier.{key}" if key in steps else _PLACES.get(key)
            if place is not None and value is not None:
                inside = place.replace("barrier.", "barrier.inner.", 1) if within else place
                file.put(inside, value, f"{here}, {key}")
        if options.get("min_train_nodes") is not None:
            available = options.get("min_available_nodes") or _LEAST
            file.put("min_silos", max(least, available), f"{here}, min_train_nodes")
        file.override(options.get("overrides", ()))
        more: dict[str, Any] = {key: value for key, value in options.items() if key in _PASSED_ON}
        return cls(file.validate(StrategyConfig), **more)  # type: ignore[call-arg]  # as `FedSync` takes them


def _beside_the_server(caller: Mapping[str, Any]) -> str:
    """Return ``client_app:app`` in a module's package, as in Flower's templates; `ConfigError` if it does not exist."""
    package = caller.get("__package__") or ""
    module = f"{package}.client_app" if package else "client_app"
    if find_spec(module) is None:
        raise ConfigError("task", f"there is no module {module}", 'Name the ClientApp: task="my_app.client_app:app"')
    return f"{module}:app"
