"""`SiloApp`, the container of a silo's own training functions."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedsync.common.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class SiloApp:
    """Training code of a user, as functions that the silo calls.

    The silo calls ``setup`` once per process, ``train`` for each order, and ``evaluate`` for each evaluation.

    A function gets the arguments that it names as parameters: ``silo`` (`fedsync.client.Silo`), ``work``
    (`fedsync.client.Work`, in ``train`` only) and the values that ``setup`` gave to ``silo.use``.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self.opaque = False
        """Whether ``train`` counts as one long step without visible inner steps."""

    def setup(self) -> Callable[[Function], Function]:
        """Register the function that loads model and data, once per process; it returns ``silo.use(...)``."""
        return self._registered("setup")

    def train(self, *, opaque: bool = False) -> Callable[[Function], Function]:
        """Register the function that trains the model in place, for one order.

        Args:
            opaque: the function takes ``work.rows`` and trains on them in one go. It counts as one step, so neither a
                deadline nor the server can end it early.
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
        """Parameter names of all functions."""
        return {
            parameter for function in self._functions.values() for parameter in inspect.signature(function).parameters
        }

    def call(self, name: str, known: Mapping[str, Any]) -> Any:
        """Call the function ``setup``, ``train`` or ``evaluate`` with the arguments of ``known`` that it names.

        Raises `ConfigError` if the function is missing or needs an unknown argument, and any error of the function.
        """
        function = self._functions.get(name)
        if function is None:
            raise ConfigError(f"@app.{name}()", "the app has no such function", f"Write one under @app.{name}()")
        parameters = inspect.signature(function).parameters.values()
        missing = [each.name for each in parameters if each.name not in known and _must_be_given(each)]
        if missing:
            place = f"{function.__code__.co_filename}, {function.__name__}"
            remedy = f"There is {', '.join(known)}; more comes by silo.use(model, train, val, {missing[0]}=...)"
            raise ConfigError(place, f"it takes {', '.join(missing)}, which nobody gives", remedy)
        return function(**{each.name: known[each.name] for each in parameters if each.name in known})

    def _registered(self, name: str) -> Callable[[Function], Function]:
        def register(function: Function) -> Function:
            if name in self._functions:
                raise ConfigError(f"@app.{name}()", "there are two of them", "Leave one")
            self._functions[name] = function
            return function

        return register


def _must_be_given(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty and parameter.kind not in (
        parameter.VAR_POSITIONAL,
        parameter.VAR_KEYWORD,
    )
