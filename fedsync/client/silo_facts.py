"""What a silo is told of itself when it sets up, and what it says it trains with."""

from __future__ import annotations

import glob
import json
from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from fedsync.common.errors import ConfigError
from fedsync.core.orders import WorkOrder
from fedsync.model.tensor_parts import PartPatterns

Scalar = bool | int | float | str
"""A value of Flower's node and run configurations."""


@dataclass(frozen=True, slots=True, eq=False)
class InUse:
    """What `Silo.use` was given.

    Args:
        model: a module, or what makes one.
        examples: training samples of the silo.
        parts: all that functions may ask for by name, the model apart.
        patterns: which of the model's tensors travel, and which stay at the silo.
    """

    model: nn.Module | Callable[[], nn.Module]
    examples: int
    parts: Mapping[str, Any]
    patterns: PartPatterns = field(default_factory=PartPatterns)


@dataclass(frozen=True, slots=True)
class Silo:
    """One site, as its own code sees it.

    Args:
        index: its place among the silos, from 0 on.
        name: of the silo; unique within a run.
        seed: of the run; the same for every silo.
        device: where to train, for ``torch.device``.
        node_config: what the site's owner says, as in Flower's ``context.node_config``.
        run_config: what the run says, likewise.
        options: ``task.options`` of the strategy file.
        train_config: what the ServerApp gives to training, as in the ``config`` of Flower's messages.
        evaluate_config: what it gives to evaluation.
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
        """``train_config``, and what an order says instead of entries there or beside them."""
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
        """What functions of the app get by these names: ``model``, ``train``, ``val`` and whatever else is named here.

        Args:
            model: a module, or a function that makes one. Give the function where setting up draws random numbers
                of its own: it is called with torch seeded alike at every silo.
            train: training data, of any kind.
            val: data to evaluate on, of any kind.
            examples: training samples; left out, ``len(train)``.
            private: parameters and persistent buffers whose names begin so stay here and never travel. The silo keeps
                them from order to order, as training leaves them. An order that fails leaves them as they were.
            share: those whose names begin so travel, and no others; left out, all do that have a gradient or are
                buffers, but for what is private. The rest is frozen: it stays as it is made.

        Raises:
            ConfigError: nobody knows how many samples there are, or a name is taken.
        """
        if examples is None and not isinstance(train, Sized):
            problem = f"a {type(train).__name__} has no length, so nobody knows how many samples this silo holds"
            raise ConfigError("silo.use", problem, "Give examples=, the number of training samples")
        taken = {"work", "silo"} & more.keys()
        if taken:
            problem = f"{', '.join(sorted(taken))} is what FedSync gives to functions"
            raise ConfigError("silo.use", problem, "Choose another name")
        count = len(train) if examples is None else examples
        patterns = PartPatterns(None if share is None else _begin(share), _begin(private))
        return InUse(model, count, {"train": train, "val": val, "silo": self, **more}, patterns)


def _begin(prefixes: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns of names that begin so."""
    given = (prefixes,) if isinstance(prefixes, str) else prefixes
    return tuple(f"{glob.escape(prefix)}*" for prefix in given)
