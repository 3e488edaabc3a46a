"""Search for the first NaN or infinity in training.

Only an order whose loss or update is not finite is repeated, with the same model, seed and samples; training itself
runs without checks. Then torch hooks check every step:

| what | checked | is the first cause if |
|---|---|---|
| inputs | when the outermost module is called | loss or gradients of the step are not finite either |
| loss | when ``backward`` is called on it | inputs are finite |
| gradients | before the optimizer's step | inputs and loss are finite |
| model | after the optimizer's step | all others are finite |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from fedsync.common.errors import Diverged

_GREW, _BURST = 10.0, 1000.0
"""Growth factors of the loss, and of the model, above which training counts as diverged."""


class _Found(BaseException):
    """Signal that ends the repeated order; a `BaseException`, so that training code does not catch it."""


class DivergenceSearch:
    """Search of one repeated order for the cause; see the module."""

    def __init__(self) -> None:
        self._step, self._depth = 1, 0
        self._spoiled: set[str] = set()
        self._losses: list[float] = []
        self._sizes: list[float] = []
        self._first: tuple[str, int] | None = None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Check the order that is repeated inside, up to the step with the cause; raises no error."""
        hooks = (
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
            register_optimizer_step_pre_hook(self._before_step),
            register_optimizer_step_post_hook(self._after_step),
        )
        tensors: Any = torch.Tensor
        backward = tensors.backward
        tensors.backward = self._watched(backward)
        try:
            yield
        except (_Found, Exception):  # a repeated order may fail differently; the first failure is the one to report
            pass
        finally:
            tensors.backward = backward
            for hook in hooks:
                hook.remove()
        self._conclude()

    def error(self, learning_rate: float, loss: float | None) -> Diverged:
        """Describe the cause as an error; ``loss`` is the order's mean training loss, if known."""
        what, step = self._first or ("", 0)
        first, last = (self._losses[0], self._losses[-1]) if self._losses else (0.0, 0.0)
        diverged = abs(last) > _GREW * abs(first) or self._sizes[-1:] > [_BURST * max(self._sizes[:1], default=0.0)]
        place = f"training, step {step}"
        match what:
            case "inputs":
                problem = f"the inputs hold NaN or infinity, and so the loss became {loss}"
                return Diverged(place, problem, "Correct the data; the learning rate is not the cause")
            case "loss" if not diverged:
                problem = "the loss is not finite, though inputs and model are"
                return Diverged(place, problem, "Look for NaN in the targets, and for log(0) or 0/0 in the loss")
            case "gradients" if not diverged:
                problem = "the gradients are not finite, though inputs, loss and model are"
                remedy = "Look for sqrt(0) or log(0) in model and loss, or lower local.learning_rate"
                return Diverged(place, problem, remedy)
            case "":
                problem = f"the update or the reported loss is not finite; the loss is {loss}"
                return Diverged("training", problem, "Look for NaN in the data and in what the training code returns")
        problem = f"training diverged at learning rate {learning_rate}: not finite were first the {what} of step {step}"
        if what == "loss":
            problem += f", after losses from {first:.4g} to {last:.4g}"
        return Diverged("local.learning_rate", problem, "Lower it")

    def _enter(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        if not self._depth and not _finite(args):
            self._spoiled.add("inputs")
        self._depth += 1

    def _leave(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self._depth -= 1

    def _watched(self, backward: Callable[..., None]) -> Callable[..., None]:
        def watched(loss: Tensor, *args: Any, **options: Any) -> None:
            if _finite(loss):
                self._losses.append(float(loss.detach().sum()))
            else:
                self._spoiled.add("loss")
            backward(loss, *args, **options)

        return watched

    def _before_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if not _finite([each.grad for each in _parameters(optimizer)]):
            self._spoiled.add("gradients")
        self._sizes.append(max(float(each.detach().abs().max()) for each in _parameters(optimizer) if each.numel()))

    def _after_step(self, optimizer: Optimizer, args: Any, options: Any) -> None:
        if not _finite(list(_parameters(optimizer))):
            self._spoiled.add("model")
        self._conclude()
        if "model" in self._spoiled:
            raise _Found
        self._spoiled.clear()
        self._step += 1

    def _conclude(self) -> None:
        if self._first is None and self._spoiled - {"inputs"}:
            causes = ("inputs", "loss", "gradients", "model")
            what = next(each for each in causes if each in self._spoiled)
            if what == "inputs" and not self._spoiled & {"loss", "gradients"}:
                what = "model"
            self._first = what, self._step


def _parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    return (each for group in optimizer.param_groups for each in group["params"])


def _finite(value: Any) -> bool:
    if isinstance(value, Tensor):
        return not value.is_floating_point() or bool(torch.isfinite(value.detach()).all())
    if isinstance(value, float):
        return -inf < value < inf
    if isinstance(value, Mapping):
        return all(map(_finite, value.values()))
    return not isinstance(value, list | tuple) or all(map(_finite, value))
