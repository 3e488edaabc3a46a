"""Choice of a task's trainer: FedSync's training loop, or the task's own loop."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from fedsync.common.errors import ConfigError
from fedsync.model.tensor_parts import UNSAID, PartPatterns
from fedsync.tasks.task_section import Scores, TaskSection

if TYPE_CHECKING:
    from fedsync.client.app import Silo
    from fedsync.tasks.task_protocol import Task
    from fedsync.train.local_trainer import LocalTrainer, ModelKeeper
    from fedsync.train.options import LocalOptions


class OwnLoopSection(TaskSection):
    """Base of tasks with a training loop of their own, so that only silos know the model."""

    own_loop: ClassVar[bool] = True
    scores: ClassVar[Scores] = "any"
    libraries: ClassVar[tuple[str, ...]] = ("torch._dynamo",)
    """Modules that PyTorch imports with the first optimizer of a foreign loop; see `fedsync.train.options`."""

    deals_data: ClassVar[bool] = False

    def build(self) -> Task:
        problem = "the server cannot build this task: its model is defined in the training code of the silos"
        raise ConfigError(f"task.kind {self.kind}", problem, "Ask a silo for the model, or try a run in virtual time")

    def trainer(self, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID) -> LocalTrainer:
        """Return the trainer as `trainer_of`."""
        raise NotImplementedError


def trainer_of(
    task: TaskSection, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID
) -> LocalTrainer:
    """Return the trainer of a silo, one of ``slots`` sharing the data; ``run`` chooses the tensors that travel."""
    if isinstance(task, OwnLoopSection):
        return task.trainer(site, slots, options, run)
    from fedsync.tasks.task_protocol import SiloSlot
    from fedsync.train.loop import Trainer

    slot = SiloSlot(site.name, site.index, slots, site.seed)
    if options.private:
        from fedsync.train.dp_sgd.private_trainer import PrivateTrainer

        return PrivateTrainer(task.build_by_row(), slot, options, run)
    return Trainer(task.build(), slot, options, run)


def keeper_of(
    task: TaskSection, site: Silo, slots: int, options: LocalOptions, run: PartPatterns = UNSAID
) -> ModelKeeper:
    if isinstance(task, OwnLoopSection):
        return task.trainer(site, slots, options, run)
    from fedsync.tasks.task_protocol import SiloSlot
    from fedsync.train.weights import TaskModel

    built = task.build_by_row() if options.private else task.build()
    built.table(SiloSlot(site.name, site.index, slots, site.seed))  # the form of the model may depend on the table
    return TaskModel(built, site.seed, run)
