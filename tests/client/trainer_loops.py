"""Loops of Lightning and Hugging Face for tests; both libraries must be there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedsync.client import Work
from tests.client.test_private_loops import half_squares

lightning = pytest.importorskip("lightning")
transformers = pytest.importorskip("transformers")

Loop = Callable[[Work, nn.Module, Dataset[Any]], None]
STEPS = 3


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Dropout(0.0), nn.Linear(4, 1))


class Lit(lightning.LightningModule):  # type: ignore[misc, name-defined]
    def __init__(self, net: nn.Module, rate: float) -> None:
        super().__init__()
        self.net, self.lr = net, rate

    def loss(self, batch: Any) -> Any:
        return half_squares(self.net, batch)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


class ByHand(Lit):
    def __init__(self, net: nn.Module, rate: float) -> None:
        super().__init__(net, rate)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        loss = half_squares(self.net, batch)
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return loss


def fit(
    work: Work,
    model: nn.Module,
    train: Any,
    kind: Any = Lit,
    callbacks: Any = (),
    given: Any = None,
    test: Any = None,
    **options: Any,
) -> None:
    from fedsync.client.lightning import FedSyncCallback

    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    engine = lightning.Trainer(
        accelerator="cpu",
        enable_model_summary=False,
        callbacks=[FedSyncCallback(work), *callbacks],
        **{"max_epochs": -1, **quiet, **options},
    )
    batches = work.loader(train) if given is None else given
    engine.fit(kind(model, work.learning_rate), batches, val_dataloaders=test)


class Wrapped(nn.Module):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, points: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": half_squares(self.net, (points, targets))}


def collate(samples: list[Any]) -> dict[str, Tensor]:
    points, targets = zip(*samples, strict=True)
    return {"points": torch.stack(points), "targets": torch.stack(targets)}


def arguments(**options: Any) -> Any:
    plain = {"lr_scheduler_type": "constant", "optim": "sgd", "save_strategy": "no", "report_to": "none"}
    plain |= {"disable_tqdm": True, "use_cpu": True, "remove_unused_columns": False}
    return transformers.TrainingArguments(output_dir="unused", **{**plain, **options})


def face(
    work: Work,
    model: nn.Module,
    train: Any,
    kind: Any = transformers.Trainer,
    callbacks: Any = (),
    after: Callable[[Any], None] = lambda trainer: None,
    net: Any = Wrapped,
    collate: Any = collate,
    test: Any = None,
    **options: Any,
) -> None:
    from fedsync.client.huggingface import trainer_for

    args, data = arguments(learning_rate=work.learning_rate, **options), {"train_dataset": train, "eval_dataset": test}
    theirs = kind(model=net(model), args=args, data_collator=collate, callbacks=list(callbacks), **data)
    trainer = trainer_for(work, theirs)
    after(trainer)
    trainer.train()


def with_options(loop: Any, **options: Any) -> Loop:
    return lambda work, model, train: loop(work, model, train, **options)


def honest_trial(loop: Any, **options: Any) -> Loop:
    """The loop with these options, and without them in the trial, so that the order finds what the trial would."""
    return lambda work, model, train: loop(work, model, train, **(options if work.max_steps > 1 else {}))
