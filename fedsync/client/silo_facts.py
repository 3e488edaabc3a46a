"""A silo's information for its own training code, and the objects that the code trains with."""

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
        """``train_config``, updated with the order's own entries."""
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
            examples: number of training samples; default ``len(train)``.
            private: prefixes of parameters and persistent buffers that stay at the silo. The silo keeps their trained
                values between orders; a failed order leaves them unchanged.
            share: prefixes of the only tensors that travel. By default all tensors travel that have a gradient or are
                buffers, except private tensors. Other tensors are frozen: they stay as built.

        Raises:
            ConfigError: the number of samples is unknown, or a name is taken.
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
    """Patterns of names with these prefixes."""
    given = (prefixes,) if isinstance(prefixes, str) else prefixes
    return tuple(f"{glob.escape(prefix)}*" for prefix in given)
