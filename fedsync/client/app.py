"""`SiloApp`: the functions of a silo's own training code."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fedsync.common.errors import ConfigError

Function = TypeVar("Function", bound=Callable[..., Any])


class SiloApp:
    """Training code of one's own: functions that a silo calls.

    Once a process ``setup``, for each order ``train``, and ``evaluate`` where a model is to be judged.

    A function gets what it names among its parameters: ``silo`` (`fedsync.client.Silo`), ``work``
    (`fedsync.client.Work`, in ``train`` only) and what ``setup`` gave to ``silo.use``.
    """

    def __init__(self) -> None:
        self._functions: dict[str, Callable[..., Any]] = {}
        self.opaque = False
        """Whether ``train`` counts as one long step, which nobody looks into."""

    def setup(self) -> Callable[[Function], Function]:
        """The function that loads model and data, once a process; it returns ``silo.use(...)``."""
        return self._registered("setup")

    def train(self, *, opaque: bool = False) -> Callable[[Function], Function]:
        """The function that trains the model in place, for one order.

        Args:
            opaque: it takes ``work.rows`` and trains on them in one go. It counts as one step, so that neither a
                deadline nor the server can end it.
        """
        self.opaque = opaque
        return self._registered("train")

    def evaluate(self) -> Callable[[Function], Function]:
        """The function that evaluates the model: it returns ``{name: (mean, samples)}``.

        ``loss`` is the loss; the first of the others is the score, of which more is better. With ``measure`` among its
        parameters it has metrics summed that the run wants: ``measure(outputs, targets)`` for each batch; see
        docs/your-task.md.
        """
        return self._registered("evaluate")

    def has(self, name: str) -> bool:
        return name in self._functions

    def takes(self) -> set[str]:
        """Names of the functions' parameters."""
        return {
            parameter for function in self._functions.values() for parameter in inspect.signature(function).parameters
        }

    def call(self, name: str, known: Mapping[str, Any]) -> Any:
        """Call a function with what it names.

        Args:
            name: ``setup``, ``train`` or ``evaluate``.
            known: what there is to name.

        Raises:
            ConfigError: it names something else, or was not given.
            Exception: whatever it raises.
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
