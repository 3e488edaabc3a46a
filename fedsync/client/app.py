"""`SiloApp`, the container of a user's own functions that set up, train and evaluate at a silo."""

from __future__ import annotations

import glob
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any, TypeVar

from torch import nn
from torch.utils.data import DataLoader

from fedsync.common.errors import ConfigError
from fedsync.core.orders import WorkOrder
from fedsync.model.tensor_parts import PartPatterns

Function = TypeVar("Function", bound=Callable[..., Any])


class SiloApp:
    """Training code of a user, as functions that the silo calls.

    The silo calls ``setup`` once per process, ``train`` for each order, and ``evaluate`` for each evaluation. A
    function gets the arguments that it names as parameters: ``silo`` (`fedsync.client.Silo`), ``work``
    (`fedsync.client.Work`, in ``train`` only) and the values that ``setup`` gave to ``silo.use``.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self.opaque = False  # whether ``train`` counts as one long step without visible inner steps

    def setup(self) -> Callable[[Function], Function]:
        """Register the function that loads model and data, once per process; it returns ``silo.use(...)``."""
        return self._registered("setup")

    def train(self, *, opaque: bool = False) -> Callable[[Function], Function]:
        """Register the function that trains the model in place, for one order. An ``opaque`` function takes
        ``work.rows`` and trains on them in one go. It counts as one step, so neither a deadline nor the server can end
        it early.
        """
        self.opaque = opaque
        return self._registered("train")

    def evaluate(self) -> Callable[[Function], Function]:
        """Register the function that evaluates the model; it returns ``{name: (mean, samples)}``.

        ``loss`` is the loss; the first other entry is the score, for which larger is better. With a parameter
        ``measure``, the function can call ``measure(outputs, targets)`` for each batch, to sum the run's metrics; see
        docs/metrics.md.
        """
        return self._registered("evaluate")

    def has(self, name: str) -> bool:
        return name in self._functions

    def takes(self) -> set[str]:
        return {
            parameter for function in self._functions.values() for parameter in inspect.signature(function).parameters
        }

    def call(self, name: str, known: Mapping[str, Any]) -> Any:
        """Call the function ``setup``, ``train`` or ``evaluate`` with the arguments of ``known`` that it names.
        `ConfigError` if the function is missing or needs an unknown argument.
        """
        function = self._functions.get(name)
        if function is None:
            raise ConfigError(f"@app.{name}()", "the app has no such function", f"Write one under @app.{name}()")
        parameters = inspect.signature(function).parameters.values()
        variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        needed = [each.name for each in parameters if each.default is each.empty and each.kind not in variadic]
        missing = [name for name in needed if name not in known]
        if missing:
            place = f"{function.__code__.co_filename}, {function.__name__}"
            remedy = f"Use {', '.join(known)}, or add silo.use(model, train, val, {missing[0]}=...)"
            raise ConfigError(place, f"it takes {', '.join(missing)}, which has no value", remedy)
        return function(**{each.name: known[each.name] for each in parameters if each.name in known})

    def _registered(self, name: str) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            if name in self._functions:
                raise ConfigError(f"@app.{name}()", "there are two of them", "Leave one")
            self._functions[name] = function
            return function

        return register


Scalar = bool | int | float | str  # value of Flower's node and run configurations


@dataclass(frozen=True, slots=True, eq=False)
class InUse:
    """Arguments of `Silo.use`; functions may request ``parts`` by name."""

    model: nn.Module | Callable[[], nn.Module]
    examples: int
    parts: Mapping[str, Any]
    patterns: PartPatterns = field(default_factory=PartPatterns)


@dataclass(frozen=True, slots=True)
class Silo:
    """Site as seen by its own training code.

    Args:
        index: position among the silos, from 0.
        name: name of the silo, unique within a run.
        seed: seed of the run, equal for every silo.
        device: where to train, for ``torch.device``.
        node_config: settings by the site's owner, as in Flower's ``context.node_config``.
        run_config: settings of the run, as in Flower's ``context.run_config``.
        options: ``task.options`` of the strategy file.
        train_config: the ServerApp's settings for training, as in the ``config`` of Flower's messages.
        evaluate_config: the ServerApp's settings for evaluation.
    """

    index: int
    name: str
    seed: int
    device: str
    node_config: Mapping[str, Scalar] = field(default_factory=dict)
    run_config: Mapping[str, Scalar] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    train_config: Mapping[str, Scalar] = field(default_factory=dict)
    evaluate_config: Mapping[str, Scalar] = field(default_factory=dict)

    def told(self, order: WorkOrder) -> Mapping[str, Scalar]:
        return {**self.train_config, **json.loads(order.config)} if order.config else self.train_config

    def use(
        self,
        model: nn.Module | Callable[[], nn.Module],
        train: Any,
        val: Any = None,
        *,
        examples: int | None = None,
        private: str | Iterable[str] = (),
        share: str | Iterable[str] | None = None,
        **more: Any,
    ) -> InUse:
        """Return the arguments that functions of the app get by name: ``model``, ``train``, ``val`` and ``more``.

        Args:
            model: a module, or a function that makes a module. Give a function if ``setup`` draws its own random
                numbers: it is called with torch seeded equally at every silo.
            train: training data, of any type.
            val: evaluation data, of any type.
            examples: number of training samples; default ``len(train)``, except for a loader, a tuple or a mapping.
            private: prefixes of parameters and persistent buffers that stay at the silo. The silo keeps their trained
                values between orders; a failed order leaves them unchanged.
            share: prefixes of the only tensors that travel. By default all tensors travel that have a gradient or are
                buffers, except private tensors. Other tensors are frozen: they stay as built.

        Raises:
            ConfigError: the number of samples is unknown, or a name is taken.
        """
        if examples is None and (isinstance(train, DataLoader | tuple | Mapping) or not isinstance(train, Sized)):
            problem = f"a {type(train).__name__} has no length in samples, and the silo needs their number"
            raise ConfigError("silo.use", problem, "Give examples=, the number of training samples")
        taken = {"work", "silo"} & more.keys()
        if taken:
            problem = f"{', '.join(sorted(taken))} is reserved for FedSync's own arguments"
            raise ConfigError("silo.use", problem, "Choose another name")
        count = len(train) if examples is None else examples
        patterns = PartPatterns(None if share is None else _begin(share), _begin(private))
        return InUse(model, count, {"train": train, "val": val, "silo": self, **more}, patterns)


def _begin(prefixes: str | Iterable[str]) -> tuple[str, ...]:
    given = (prefixes,) if isinstance(prefixes, str) else prefixes
    return tuple(f"{glob.escape(prefix)}*" for prefix in given)
