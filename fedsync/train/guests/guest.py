"""Trainer that runs a user's own training code from a `fedsync.client.SiloApp`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import closing, nullcontext
from dataclasses import replace
from inspect import signature
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import Dataset

from fedsync.client.app import InUse, Silo, SiloApp
from fedsync.client.lasting import KeptLoader
from fedsync.client.work import Rows, Work, end_loop
from fedsync.common.errors import ConfigError
from fedsync.common.names import near_miss
from fedsync.common.rng import Stream, derive_seed
from fedsync.core.orders import Cursor, Evaluation, Split, WorkOrder
from fedsync.core.report_checks import METRIC_NAME
from fedsync.evaluation.metrics.named import Wanted
from fedsync.model.layout import Vector
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.privacy.release import PrivateSettings
from fedsync.tasks.metrics.measurement import Measuring, SumsByKey
from fedsync.train.batches import Sampler
from fedsync.train.guests.guest_code import own_code
from fedsync.train.guests.guest_reply import sendable, tested, whole
from fedsync.train.local_trainer import BeginPace, LocalTrainer, LoopResult
from fedsync.train.machine.device import resolve
from fedsync.train.module_parts import ModelParts, parts_of
from fedsync.train.options import LocalOptions
from fedsync.train.order_clock import BatchSizes, Pace
from fedsync.train.weights import Weights

if TYPE_CHECKING:
    from fedsync.train.dp_sgd.private_loop import PrivateLoop

MOST_STATE = 65_536
"""Limit of ``work.state`` as JSON [characters]."""

_KEPT = KeptLoader()
"""Loader cache of the process. Silos that share a process (virtual time) keep only the last order's workers."""


class GuestTrainer(LocalTrainer):
    """Trainer that calls a user's functions, with the model parts that the strategy file names in ``run``.

    A repeated order gives the same update if the functions draw random numbers only from torch, NumPy or Python's
    ``random``, and keep state between orders only in the model or in ``work.state``. Raises `ConfigError` if there is
    no such device, no training sample, or the functions do not fit together, and `RunError` if the app's setup failed.
    """

    def __init__(self, app: SiloApp, silo: Silo, options: LocalOptions, run: PartPatterns = UNSAID) -> None:
        device = resolve(options.device)
        self._app = app
        self._silo = silo
        self._sizes, self._steps_by_itself = BatchSizes(silo.name), app.opaque
        model_seed = derive_seed(silo.seed, Stream.MODEL)
        with own_code(torch.device("cpu"), model_seed):
            self._used = _used(app, app.call("setup", {"silo": silo}))
        with own_code(torch.device("cpu"), model_seed):
            given = self._used.model
            self._model = given if isinstance(given, nn.Module) else given()
        self._parts = ModelParts(self._model, parts_of(self._model, run, self._used.patterns, "silo.use"))
        self._model.to(device)
        self._known = {"model": self._model, **self._used.parts}
        weights, parts = Weights(self._model, self._parts.shared), self._parts
        super().__init__(silo.name, weights, device, options, parts.frozen_digest, parts.kept_names)
        self.private_names = parts.private_names
        self._initial = self._weights.read()
        self._settings: PrivateSettings | None = None
        self._private: PrivateLoop | None = None
        self._sampler, self._scout = (Sampler(self._used.examples, silo.seed, silo.name) for _ in range(2))

    @property
    def examples(self) -> int:
        return self._used.examples

    def initial_model(self) -> Vector:
        return self._initial

    def _recall(self, cursor: Cursor) -> None:
        self._model.to(self._device)  # other libraries' trainers may leave it elsewhere
        self._parts.restore(cursor.private)

    def make_private(self, settings: PrivateSettings) -> int:
        """See `SiloTrainer`; raises `ConfigError` if the loop does no private steps with ``work.private``."""
        from fedsync.train.dp_sgd.private_loop import try_loop
        from fedsync.train.dp_sgd.private_step import check_layers

        if self._app.opaque:
            problem = "a loop with opaque=True has no steps that could be private"
            raise ConfigError("privacy", problem, "Write a loop with work.private, or leave privacy out")
        if settings.person_column:
            problem = "a training loop does not tell which samples are of one person"
            raise ConfigError("privacy", problem, "Write a task with persons, or have the owner write unit: example")
        check_layers(self._model)
        self._set_threads()
        if self._settings is None:
            try_loop(self._try, settings, self._model, self.examples, self._parts.frozen)
        self._settings = settings
        return self.examples

    def _try(self, order: WorkOrder, steps: PrivateLoop) -> None:
        self._model.train()
        self._call(order, Cursor(), [], lambda: Pace(order, self._device, self._probe), steps)

    def _begin(self, order: WorkOrder) -> None:
        if self._settings is None and not self._options.private:
            return
        from fedsync.train.dp_sgd.private_loop import PrivateLoop

        if self._settings is None or self._settings.noise is None:
            raise ConfigError("privacy", "the silo has chosen no noise yet", "Begin the run again")
        self._private = PrivateLoop(order, self._settings, self._model, self.examples, self._parts.frozen)

    def _train(self, order: WorkOrder, cursor: Cursor, begin: BeginPace) -> LoopResult:
        paces: list[Pace] = []
        self._model.train()
        self._model.zero_grad()  # a loop that adds up gradients may have ended between two steps of its optimizer
        work = self._call(order, cursor, paces, begin, self._private)
        pace = self._ended(order, paces)
        missized = self._sizes.check(
            pace,
            pace.follows,
            "its own batches do not have work.batch_size samples, so balancing does not reach them: give them that "
            "size, or use work.loader",
        )
        means = _means(work.logged)
        loss = means.pop("loss", None)
        # An order that only evaluates changes neither the shared nor the private parts of the model.
        private = cursor.private if order.scores_only else self._parts.keep()
        left = replace(self._sampler.after(cursor, pace.samples), state=_kept(work.state), private=private)
        return LoopResult(pace, loss, left, {**sendable(means), **missized})

    def _call(
        self, order: WorkOrder, cursor: Cursor, paces: list[Pace], begin: BeginPace, steps: PrivateLoop | None
    ) -> Work:
        def begun() -> Pace:
            paces.append(begin())
            return paces[-1]

        def drawn() -> Rows:
            return self._sampler.take(cursor, order.planned_samples)[0]

        def fetch(dataset: Dataset[Any], options: Mapping[str, Any], done: int) -> Iterator[Any]:
            walk = islice(self._scout.walk(cursor, order.batch_size, order.batch_size), done, None)
            return _KEPT.of(dataset, options).order(walk, order.max_steps - done)

        state = json.loads(cursor.state)
        work = Work(order, self._device, state, self.examples, drawn, begun, fetch, self._silo.told(order), steps)
        with nullcontext() if steps is None else closing(steps), own_code(self._device, order.seed):
            if self._app.opaque:
                work.begun()
            self._app.call("train", {"work": work, **self._known})
            end_loop(work.loop)
            if steps is not None:
                steps.check(sum(pace.steps for pace in paces))
        return work

    def _ended(self, order: WorkOrder, paces: list[Pace]) -> Pace:
        if self._app.opaque:
            paces[0].jump(order.max_steps)
            paces[0].finish()
        if not paces or not paces[0].steps:
            problem = "the function under @app.train() took no batch of the order"
            raise ConfigError(
                "@app.train()", problem, "Loop over work.loader(...) or work.batches(...), or write opaque=True"
            )
        return paces[0]

    def _evaluate(self, split: Split) -> Evaluation:
        if not self._app.has("evaluate"):
            return Evaluation(0.0, 0.0, 0)
        self._model.eval()
        measure = GuestMeasure(self._options.measured, self._device)
        known = {"config": self._silo.evaluate_config, "measure": measure, **self._known}
        with own_code(self._device, self._silo.seed), torch.no_grad():
            found = self._app.call("evaluate", known)
        return replace(_evaluation(found), sums=measure.sums())


def _used(app: SiloApp, given: object) -> InUse:
    if not isinstance(given, InUse):
        problem = f"it returned {type(given).__name__}"
        raise ConfigError("@app.setup()", problem, "End it with return silo.use(model, train, val)")
    if given.examples < 1:
        raise ConfigError("silo.use", "this silo holds no training samples", "Give it data, or leave it out")
    for name in sorted(given.parts.keys() - {"train", "val", "silo"} - app.takes()):
        allowed = {*signature(Silo.use).parameters} - {"self", "more"} | app.takes()
        raise ConfigError("silo.use", f"no function of the app takes {name!r}", near_miss(name, allowed))
    return given


def _means(logged: Mapping[str, list[torch.Tensor]]) -> dict[str, float]:
    means: dict[str, float] = {}
    for name, values in logged.items():
        if not METRIC_NAME.fullmatch(name):
            raise ConfigError("work.log", f"{name!r} is no name of a figure", "Use small letters, digits and _")
        means[name] = float(torch.stack(values).mean())
    return means


def _kept(state: MutableMapping[str, Any]) -> str:
    try:
        text = json.dumps(state, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        problem = f"it cannot be kept: {error}"
        raise ConfigError("work.state", problem, "Keep numbers, text, lists and dicts in it") from error
    if len(text) > MOST_STATE:
        raise ConfigError("work.state", f"it has {len(text)} characters, at most {MOST_STATE}", "Keep less in it")
    return text


def _evaluation(found: object) -> Evaluation:
    """Convert a user's evaluation to sums: ``{"loss": (mean, samples), "dice": (mean, samples)}``."""
    place = "@app.evaluate()"
    if not isinstance(found, Mapping):
        raise ConfigError(place, f"it returned {type(found).__name__}", 'Return {"accuracy": (mean, samples)}')
    sums: dict[str, tuple[float, int]] = {}
    for name, pair in found.items():
        try:
            mean, told = pair
            value = float(mean)
        except (TypeError, ValueError) as error:
            problem = f"{name} is {pair!r}"
            raise ConfigError(place, problem, "Return a pair, the mean and the number of samples") from error
        samples = whole(told, f"{place}, {name}")
        # The mean of an empty validation set is NaN, and nothing was evaluated.
        sums[str(name)] = value * samples if samples else 0.0, samples
        if not math.isfinite(sums[str(name)][0]):
            raise ConfigError(place, f"{name} is {pair!r}, which is not finite", "Correct the evaluation")
    loss, counted = sums.pop("loss", (None, 0))
    first = next(iter(sums), "")
    score, samples = sums.pop(first, (None, counted))
    if counted and not samples:
        score, samples = None, counted
    if loss is not None and counted != samples:  # both sums are divided by the same number of samples
        loss = loss / counted * samples if counted else None
    others = {name: (total / count, count) for name, (total, count) in sums.items() if count}
    return Evaluation(loss, score, samples, tested(others))


class GuestMeasure:
    """Accumulator of a run's metrics over batches; only metrics shipped with FedSync are measured."""

    def __init__(self, wanted: Wanted, device: torch.device) -> None:
        self._measuring = Measuring(wanted.metrics(lambda: ()), device)
        self._found = self._measuring.begin()
        self._device = device
        self.samples = 0

    def __call__(self, outputs: Any, targets: Any, *, probabilities: bool = False) -> None:
        """Add a batch; raises `ConfigError` if the lengths differ.

        Args:
            outputs: tensors or arrays [n, ...]: logits per class, a single logit for two classes, or the values
                that the run's metrics need.
            targets: true values [n, ...].
            probabilities: outputs are probabilities as from `predict_proba`, [n, classes] or [n] of class 1.
        """
        given, truth = (torch.as_tensor(each).to(self._device) for each in (outputs, targets))
        if len(given) != len(truth):
            raise ConfigError("measure", f"{len(given)} outputs and {len(truth)} targets", "Give one of each a sample")
        if probabilities:
            given = torch.logit(given.double()) if given.ndim == 1 else torch.log(given.double())
        rows = torch.arange(self.samples, self.samples + len(given), device=self._device)
        self._found.add(self._measuring.of(given, truth, rows))
        self.samples += len(given)

    def sums(self) -> SumsByKey:
        return self._found.sums(self.samples) if self.samples else {}
