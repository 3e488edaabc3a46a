"""Base class of optional features (``extensions`` of a strategy file), with errors that name a user's failed hook."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass
from typing import Any

from fedsync.common.errors import ConfigError, FedSyncError
from fedsync.core.extension import Extension
from fedsync.core.orders import WorkOrder
from fedsync.policies.schema import Policy

_RETURNS: dict[str, tuple[type, ...]] = {
    "admits": (bool,),
    "excuses": (bool,),
    "takes": (str, type(None)),
    "pauses": (str,),
    "stops": (str, type(None)),
    "shows": (tuple,),
    "wake_s": (int, float, type(None)),
    "on_order": (WorkOrder,),
    "on_commit": (object,),
    "on_event": (object,),
    "on_join": (object,),
    "on_loss": (object,),
    "state": (dict,),
    "restore": (object,),
}
"""Allowed return types of each hook; notification hooks may return anything."""


class OwnExtension(Extension):
    """User's extension; ``kind`` is the feature's name in the strategy file."""

    def __init__(self, inner: Extension, kind: str) -> None:
        self._inner, self._kind = inner, kind
        self.name = inner.name  # type: ignore[misc]  # a class variable, but here each object has its own

    @property
    def expects(self) -> bool:
        with hook_errors(self._kind, "expects", self._inner):
            return self._inner.expects


def _hook(hook: str) -> Callable[..., Any]:
    def call(self: OwnExtension, *arguments: Any) -> Any:
        with hook_errors(self._kind, hook, self._inner):
            found = getattr(self._inner, hook)(*arguments)
        if not isinstance(found, _RETURNS[hook]):
            problem = f"its {hook} returns {found!r:.40}, which is {type(found).__name__}"
            kinds = " or ".join("None" if each is type(None) else each.__name__ for each in _RETURNS[hook])
            raise ConfigError(f"extensions, kind {self._kind!r}", problem, f"Return {kinds}")
        return found

    return call


for _each in _RETURNS:
    setattr(OwnExtension, _each, _hook(_each))


class OwnListener:
    """User's listener; arguments as for `OwnExtension`."""

    def __init__(self, inner: Any, kind: str) -> None:
        self._inner, self._kind = inner, kind

    def follow(self, ledger: Any) -> None:
        with hook_errors(self._kind, "follow", self._inner):
            self._inner.follow(ledger)


@contextmanager
def hook_errors(kind: str, hook: str, own: object) -> Iterator[None]:
    """Turn errors in the code of ``own`` into `ConfigError` with the user's line; pass on `FedSyncError`."""
    try:
        yield
    except FedSyncError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        file = getattr(sys.modules.get(type(own).__module__), "__file__", None)
        last = next((frame for frame in reversed(frames) if frame.filename == file), None)
        problem = f"its {hook} failed: {type(error).__name__}: {error}"
        place = f"{hook} of {type(own).__name__}" if last is None else f"{last.filename}, line {last.lineno}"
        remedy = f"Correct {place}"
        raise ConfigError(f"extensions, kind {kind!r}", problem, remedy) from error


class FeaturePolicy(Policy):
    """Optional feature of a run: it influences the run (`build`), reacts to its decisions (`listener`), or both."""

    section = "extension"

    def build(self) -> Extension | None:
        """Return a new extension per run, which may influence it; None if the feature decides nothing."""
        return None

    def followed(self) -> Extension | None:
        with hook_errors(self.kind, "build", self):
            built = self.build()
        if built is not None and not is_dataclass(built) and type(built).state is Extension.state:
            problem = f"{type(built).__name__} is no dataclass, so a checkpoint cannot store its fields"
            remedy = "Write @dataclass above the class, or override state and restore"
            raise ConfigError(f"extensions, kind {self.kind!r}", problem, remedy)
        return built if built is None or self.is_shipped() else OwnExtension(built, self.kind)

    def listened(self) -> Any:
        with hook_errors(self.kind, "listener", self):
            made = self.listener()
        return made if made is None or self.is_shipped() else OwnListener(made, self.kind)

    def listener(self) -> Any:
        """Return a `fedsync.observe.recorder.Listener`, whose ``follow`` is called with the run's ledger after every
        entry; None if the feature does nothing outside the run.
        """
        return None
