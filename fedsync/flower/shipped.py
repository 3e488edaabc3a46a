"""Constructors of shipped strategies: ``FedSync.lb_bsp(num_rounds=40)`` is ``strategies/lb-bsp.yaml`` with 40 rounds.

Each method names a file and the file's own settings. All other settings are in the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, Self, TypedDict, TypeVar, Unpack

from fedsync.common.errors import ConfigError
from fedsync.common.field_docs import meanings
from fedsync.config.locate import locate
from fedsync.config.strategy import StrategyConfig
from fedsync.config.yaml_file import YamlFile
from fedsync.flower.own_loop import OwnLoop, unexpected
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

    out: str | Path
    """Folder for the run's files; by default a new temporary folder."""

    keys: Path
    """Key file of the server, for an encrypted run."""

    resume: bool
    """Whether to resume the run in ``out`` from its newest checkpoint."""

    overwrite: bool
    """Whether to replace an existing run in ``out``; by default, such a folder is refused."""

    interval_s: float
    """Length of a round [s], of `fsp` and the strategies that combine it."""

    sync_ratio: float
    """Share of a round's samples that is enough to end the round, of `a_bsp` and `lb_a_bsp`."""

    server_rate: float
    """Factor on each update, of `asp`, `ssp`, `pbsp` and `pssp`; 1 / number of silos is the usual choice."""

    staleness: int
    """Maximum lead of a silo [orders]: over the slowest silo with `ssp`, over a random sample with `pssp`."""

    sample_size: int
    """Number of silos in the sample of `pbsp` and `pssp`."""

    size: int
    """Number of updates in a commit of `fedbuff`."""

    mixing: float
    """Share of a fresh silo's model in the new model of `fedasync`."""


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
    "sync_ratio": "barrier.sync_ratio",
    "server_rate": "aggregation.server_rate",
    "staleness": "barrier.staleness",
    "sample_size": "barrier.sample_size",
    "size": "barrier.size",
    "mixing": "aggregation.mixing",
}
"""Keys of a strategy file by keyword of single strategies."""

_PASSED_ON = {"out", "keys", "resume", "overwrite", "policies", "on_round"}
"""Keywords that are passed to `FedSync`."""

_LEAST = 2
"""Minimum number of silos in a round, as in Flower's strategies."""


S_co = TypeVar("S_co", bound="Shipped", covariant=True)


class Constructor(Protocol[S_co]):
    """Class method that makes the strategy of a shipped file, with the caller's settings."""

    def __call__(self, **options: Unpack[Options]) -> S_co: ...


class ShippedFile:
    """Descriptor of a class method by the name of its file: ``lb_bsp`` for ``lb-bsp.yaml``.

    Args:
        own: keywords of this strategy alone.
        of_steps: settings of the barrier that follow from ``local_steps``.
    """

    def __init__(self, *own: str, of_steps: Callable[[int], Mapping[str, int]] | None = None) -> None:
        self._own, self._of_steps = own, of_steps

    def __set_name__(self, owner: type[Shipped], name: str) -> None:
        self._name = name

    def __get__(self, instance: object, owner: type[S_co]) -> Constructor[S_co]:
        def construct(**options: Unpack[Options]) -> S_co:
            steps = options.get("local_steps")
            of_steps = {} if steps is None or self._of_steps is None else self._of_steps(steps)
            return owner._shipped(self._name, options, self._own, of_steps)

        construct.__doc__ = meanings(Shipped)[self._name]
        return construct


class Shipped(OwnLoop):
    """Constructors of `FedSync`, one for each shipped strategy. All take `Options`; no argument is required."""

    fedavg: ShippedFile = ShippedFile()
    """FedAvg: all silos do the same work, and each round waits for the slowest silo."""

    bsp: ShippedFile = ShippedFile()
    """BSP: FedAvg under the name that the papers use."""

    lb_bsp: ShippedFile = ShippedFile()
    """LB-BSP: batch sizes follow each silo's predicted speed, so that all silos finish together."""

    lb_bsp_gpu: ShippedFile = ShippedFile()
    """LB-BSP for step times that are not proportional to the batch, as on GPUs."""

    lb_bsp_he: ShippedFile = ShippedFile()
    """LB-BSP under encryption: the server adds updates that it cannot read. Requires ``keys``."""

    elastic: ShippedFile = ShippedFile(of_steps=lambda steps: {"lookahead": 2 * steps, "floor": max(steps // 2, 1)})
    """Elastic BSP (ZipLine): each silo gets a number of steps with which all are predicted to finish together. The
    number is between half and twice ``local_steps``."""

    fsp: ShippedFile = ShippedFile("interval_s")
    """FSP: every silo trains until the time of the round is over, for any number of steps."""

    fsp_he: ShippedFile = ShippedFile("interval_s")
    """FSP under encryption; see `fsp` and `lb_bsp_he`."""

    a_bsp: ShippedFile = ShippedFile("sync_ratio")
    """A-BSP: the first silo that finishes ends the round for all, once enough samples are processed."""

    asp: ShippedFile = ShippedFile("server_rate")
    """ASP: no silo waits, and each update is committed as it arrives."""

    ssp: ShippedFile = ShippedFile("staleness", "server_rate")
    """SSP: as `asp`, but a silo may be ahead of the slowest silo only by a bound."""

    pbsp: ShippedFile = ShippedFile("sample_size", "server_rate")
    """pBSP: a silo waits for a random sample of other silos instead of for all."""

    pssp: ShippedFile = ShippedFile("sample_size", "staleness", "server_rate")
    """pSSP: as `ssp`, but with the bound on the lead over a random sample of other silos."""

    pssp_he: ShippedFile = ShippedFile()
    """pSSP under encryption; see `pssp` and `lb_bsp_he`."""

    auto: ShippedFile = ShippedFile()
    """`lb_bsp` with one local step per order and the server optimizer ``cautious-adam``."""

    lb_a_bsp: ShippedFile = ShippedFile("sync_ratio")
    """LB-BSP and A-BSP: balanced batches, and the first silo that finishes ends the round, as in `a_bsp`."""

    lb_fsp: ShippedFile = ShippedFile("interval_s")
    """LB-BSP and FSP: balanced batches in rounds of fixed time."""

    lb_fsp_psp: ShippedFile = ShippedFile("interval_s")
    """LB-BSP, FSP and PSP: as `lb_fsp`, but the end of a round waits for a random sample of silos."""

    fedbuff: ShippedFile = ShippedFile("size")
    """FedBuff: commit whenever ``size`` updates have arrived, from any silos."""

    fedasync: ShippedFile = ShippedFile("mixing")
    """FedAsync: each arrival is mixed into the model, with less weight the staler it is."""

    fedcompass: ShippedFile = ShippedFile(of_steps=lambda most: {"max_steps": most, "min_steps": max(most // 5, 1)})
    """FedCompass: step counts make silos arrive in groups; ``local_steps`` is the maximum number of steps."""

    deadline: ShippedFile = ShippedFile()
    """BSP that does not wait for silos whose order takes longer than orders usually do."""

    @classmethod
    def _shipped(cls, name: str, options: Options, own: Sequence[str], of_steps: Mapping[str, int]) -> Self:
        """Build the strategy of a shipped file, with the caller's settings; `TypeError` for an unknown keyword."""
        here, allowed = f"FedSync.{name}", Options.__annotations__.keys() - (_OWN_PLACES.keys() - set(own))
        if unknown := options.keys() - allowed:
            raise unexpected(here, min(unknown), allowed)
        file = YamlFile.read(locate(name.replace("_", "-")))
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
        given = {**options, **of_steps}
        for key, place in {**_PLACES, **_OWN_PLACES, **{key: f"barrier.{key}" for key in of_steps}}.items():
            value = given.get(key)
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
