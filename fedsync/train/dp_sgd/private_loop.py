"""DP-SGD in a user's own training loop: each step clips the gradients of single rows, and adds noise.

The loop gets a loader of batches by Poisson sampling, and an optimizer whose ``step`` is private. If the model's values
change between two steps, or after the last, something else changed them, and the order is refused. The checks find
mistakes. They do not stop malicious code, for example a step on rows that the code has stored.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from fedsync.common.errors import ConfigError
from fedsync.core.orders import WorkOrder
from fedsync.privacy.release import PrivateSettings
from fedsync.train.dp_sgd.private_step import (
    CLIPPING,
    ROWS,
    check_alone,
    clipped_sums,
    gradients_of,
    noisy_mean,
    random_of,
    steady,
)

T = TypeVar("T")
_CALL = "model, optimizer, loader = work.private(model, optimizer, work.loader(train))"
_WRAPPERS = {"DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"}
_HELD = {"grad_sample", "summed_grad"}
"""Attributes of parameters in which Opacus holds gradients of a step."""


class PrivateLoop:
    """Private steps of one order; see `fedsync.client.Work.private`. ``model`` has the values from which the order
    starts, ``examples`` counts the silo's rows. Another check guards the parameters named ``frozen``.
    """

    def __init__(
        self, order: WorkOrder, settings: PrivateSettings, model: nn.Module, examples: int, frozen: Collection[str] = ()
    ) -> None:
        self._order, self._settings = order, settings
        self._model, self._examples, self._frozen = model, examples, frozen
        self._random = random_of(order.seed, seeded=settings.seeded)
        self._optimizer: PrivateOptimizer | None = None
        self._hooks: GradSampleHooks | None = None
        self._refusal: ConfigError | None = None
        self._steps = self._handed = self._rows = 0
        self._values = {name: tensor.detach().clone() for name, tensor in self._guarded()}

    def take(self, model: nn.Module, optimizer: Optimizer) -> tuple[Optimizer, list[NDArray[np.int64]]]:
        """Return the optimizer with private steps, and the rows of each step's batch; `ConfigError` for a model or
        optimizer that is not the order's own.
        """
        if self._optimizer is not None:
            self._refuse("work.private is called a second time in one order", "Call it once, before the loop")
        if not any(each is self._model for each in model.modules()):
            self._refuse("the model is not the one that setup gave to silo.use", "Give work.private that model")
        for name in _WRAPPERS & {type(each).__name__ for each in model.modules()}:
            self._refuse(f"the model is wrapped by {name}", "Train it on one device, without the wrapper")
        if not isinstance(optimizer, Optimizer):
            self._refuse(f"the optimizer is a {type(optimizer).__name__}", "Give work.private one of torch.optim")
        own = {id(each) for each in self._model.parameters() if each.requires_grad}
        if any(id(each) not in own for group in optimizer.param_groups for each in group["params"]):
            self._refuse("the optimizer has parameters that are not the model's, or are frozen", "Leave them out")
        if any(id(each) not in own for each in model.parameters() if each.requires_grad):
            problem = "the module around the model has parameters that are not the model's"
            self._refuse(problem, "Give silo.use the whole module, or freeze these parameters")
        if optimizer.state:
            self._refuse("the optimizer has done steps before", "Make a new optimizer in each order")
        self._hooks = GradSampleHooks(self._model, strict=True)
        self._optimizer = PrivateOptimizer(optimizer, self, self._settings.clip)
        rate = self._settings.rate(self._order.batch_size)
        return self._optimizer, [self._random.chosen(self._examples, rate) for _ in range(self._order.max_steps)]

    def handed(self, loader: DataLoader[T], rows: Sequence[NDArray[np.int64]]) -> Iterator[T]:
        """Yield the batches of ``loader``, each for one private step on its ``rows``. A batch without rows comes as a
        batch of one, whose gradient the step leaves out.
        """
        if self._handed:
            problem = "the private loader is read a second time in one order"
            self._refuse(problem, "Train in one pass over it, which has all steps of the order")
        for drawn, batch in zip(rows, DataLoader.__iter__(loader), strict=True):
            self._handed += 1
            self._rows = len(drawn)
            yield batch

    def step(self, optimizer: PrivateOptimizer) -> None:
        """Do a private step; `ConfigError` for a second step on a batch, or if something else changed the model."""
        single = self._gradients(optimizer)
        optimizer.max_grad_norm = self._settings.clip
        sums = clipped_sums(optimizer, single)
        for parameter, total in zip(optimizer.params, sums, strict=True):
            parameter.grad = noisy_mean(total, self._random, self._settings, self._order.batch_size)
        optimizer.original_optimizer.step()
        self._forget()
        self._steps += 1
        trained = {id(parameter) for parameter in optimizer.params}
        for name, tensor in self._guarded():
            if id(tensor) in trained:
                self._values[name].copy_(tensor.detach())

    def check(self, steps: int) -> None:
        """Raise `ConfigError` unless the order's ``steps``, each of them private, are all that changed the model."""
        if self._refusal is not None:
            raise self._refusal
        if self._optimizer is None:
            self._refuse("the function under @app.train() never calls work.private", f"Write {_CALL}")
        if self._steps != steps:
            problem = f"the loop took {steps} batches of the private loader and did {self._steps} private steps"
            self._refuse(problem, "Do one step after each of its batches")
        self._compare()

    def close(self) -> None:
        if self._hooks is not None:
            self._forget()
            self._hooks.cleanup()
            for parameter in self._model.parameters():
                parameter.grad = None
                vars(parameter).pop("summed_grad", None)

    def _single(self, parameter: nn.Parameter) -> Tensor:
        single: Any = gradients_of(parameter, wanted := max(self._rows, 1))
        sizes = list(map(len, single)) if isinstance(single, list) else [len(single)]
        if isinstance(single, list) or sizes != [wanted]:
            problem = f"a step has gradients of {' + '.join(map(str, sizes))} rows, and its batch has {wanted}"
            remedy = "Call backward once for each batch of the private loader, rows first, also of position_ids"
            self._refuse(problem, remedy)
        return torch.as_tensor(single)[: self._rows]

    def _gradients(self, optimizer: PrivateOptimizer) -> list[Tensor]:
        """Gradients of the batch's rows, [rows, ...] a parameter; raises `ConfigError` if no step is allowed now."""
        number = self._steps + 1
        if hasattr(optimizer, "grad_scale"):  # None after `unscale_`, which leaves the gradients of rows as they are
            self._refuse("a GradScaler enlarges gradients before they are clipped", "Leave it out, or disable it")
        if self._handed != number:
            problem = f"step {number} comes after {self._handed} batches of the private loader"
            self._refuse(problem, "Do one step after each of its batches, and fetch no batch ahead")
        held = [vars(parameter) for parameter in optimizer.params]
        if any("_current_grad_sample" in each for each in held):
            problem = f"before step {number}, a layer ran more often than its gradient was computed"
            self._refuse(problem, "Leave gradient checkpointing out, and run other passes under torch.no_grad()")
        if all(each.get("grad_sample") is None for each in held):
            problem = f"step {number} has no gradients of its batch's rows"
            self._refuse(problem, "Call backward for each batch, skip none, and do not compile the model")
        self._compare()
        return [self._single(parameter) for parameter in optimizer.params]

    def _compare(self) -> None:
        now = dict(self._guarded())
        same = now.keys() == self._values.keys()
        for name in [name for name, value in self._values.items() if not same or not _equal(value, now[name])]:
            problem = f"{name} of the model was changed by something other than a private step"
            remedy = "Change the model only by the step of the optimizer that work.private returns"
            self._refuse(problem, f"{remedy}, and use layers without running statistics, such as GroupNorm")

    def _guarded(self) -> Iterator[tuple[str, Tensor]]:
        yield from ((name, each) for name, each in self._model.named_parameters() if name not in self._frozen)
        yield from self._model.named_buffers()

    def _forget(self) -> None:
        """Drop all gradients of single rows, also of passes that no step followed."""
        for parameter in self._model.parameters():
            vars(parameter).update(dict.fromkeys(_HELD & vars(parameter).keys()))
            vars(parameter).pop("_current_grad_sample", None)
            parameter._forward_counter = 0  # type: ignore[attr-defined]
        for module in self._model.modules():
            for name in ("activations", "max_batch_len"):
                vars(module).pop(name, None)  # not `delattr`: a wrapper may have its inner module's by `__getattr__`

    def _refuse(self, problem: str, remedy: str) -> NoReturn:
        """Raise, and again at the end if the loop catches it."""
        self._refusal = self._refusal or ConfigError("privacy", problem, remedy)
        raise self._refusal


class PrivateOptimizer(DPOptimizer):  # type: ignore[misc]  # Opacus leaves it untyped
    """Optimizer whose ``step`` is a private step of an order."""

    _step_supports_amp_scaling = True  # so a GradScaler sets `grad_scale`, by which the loop refuses it

    def __init__(self, optimizer: Optimizer, loop: PrivateLoop, clip: float) -> None:
        super().__init__(optimizer, max_grad_norm=clip, **CLIPPING)
        self._loop = loop

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        found = None
        if closure is not None:
            with torch.enable_grad():
                found = closure()
        self._loop.step(self)
        return found


class Tried(BaseException):
    """End of a call that tried a loop; a `BaseException`, so that a loop that catches `Exception` lets it pass."""


class _TriedLoop(PrivateLoop):
    """Loop that ends at its first step, on all ``samples`` or the ``only`` one, and gives the gradients of its rows."""

    def __init__(
        self,
        order: WorkOrder,
        settings: PrivateSettings,
        model: nn.Module,
        frozen: Collection[str],
        samples: list[Any],
        only: int | None,
    ) -> None:
        super().__init__(order, settings, model, order.batch_size, frozen)
        self._samples, self._only = samples, only
        self.found: list[Tensor] = []

    def handed(self, loader: DataLoader[T], rows: Sequence[NDArray[np.int64]]) -> Iterator[T]:
        data: Any = loader.dataset
        self._samples.extend([data[row] for row in range(self._examples)] if not self._samples else ())
        chosen = self._samples if self._only is None else [self._samples[self._only]]
        self._handed, self._rows = 1, len(chosen)
        yield loader.collate_fn(chosen)

    def step(self, optimizer: PrivateOptimizer) -> None:
        self.found = [each.clone() for each in self._gradients(optimizer)]
        raise Tried


def try_loop(
    call: Callable[[WorkOrder, PrivateLoop], None],
    settings: PrivateSettings,
    model: nn.Module,
    examples: int,
    frozen: Collection[str] = (),
) -> None:
    """Try a loop's first step on some rows together, and on each alone; ``call`` calls the loop, and keeps nothing.
    Raises `ConfigError` if the loop does no private step with ``work.private``, or its loss mixes the rows of a batch.
    """
    rows = min(ROWS, examples)
    order = WorkOrder("", 0, 1, batch_size=rows, max_steps=1, learning_rate=0.001, seed=0)
    samples: list[Any] = []

    def gradients(only: int | None) -> list[Tensor]:
        loop = _TriedLoop(order, settings, model, frozen, samples, only)
        try:
            call(order, loop)
        except Tried:
            return loop.found
        finally:
            loop.close()
        loop.check(1)
        raise AssertionError("a check without a step raises")

    with steady(model):
        together = gradients(None)
        if rows > 1:
            alone = [[one[0] for one in gradients(row)] for row in range(rows)]
            check_alone(together, alone)
    model.zero_grad(set_to_none=True)


def _equal(before: Tensor, now: Tensor) -> bool:
    if before.shape != now.shape or before.dtype != now.dtype:
        return False
    there = before.to(now.device)
    if now.is_floating_point():
        return torch.allclose(there, now, rtol=0.0, atol=0.0, equal_nan=True)
    return torch.equal(there, now)
