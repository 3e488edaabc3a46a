"""Four real hospitals (UCI heart disease): columns that one of them never measured, and missing cells in all."""

from pathlib import Path

import pytest

from fedsync.core.orders import Cursor, WorkOrder
from fedsync.tasks.csv_ import CsvTask
from fedsync.tasks.task_protocol import SiloSlot
from fedsync.train.loop import Trainer
from fedsync.train.options import LocalOptions

FOLDER = Path(__file__).parents[2] / "examples" / "heart" / "data"
HOSPITALS = ("cleveland", "hungarian", "switzerland", "va")


def hospital(index: int, **options: object) -> Trainer:
    files = tuple(str(FOLDER / f"{name}.csv") for name in HOSPITALS)
    task = CsvTask(files, target="num", positive_above=0, **options)
    return Trainer(task, SiloSlot(HOSPITALS[index], index, len(HOSPITALS), seed=7), LocalOptions(device="cpu"))


@pytest.mark.parametrize("model", ["logistic", "mlp"])
@pytest.mark.parametrize("index", range(len(HOSPITALS)))
def test_training_lowers_the_loss_on_unseen_patients(index: int, model: str) -> None:
    trainer = hospital(index, model=model)
    base = trainer.initial_model()
    outcome = trainer.run(WorkOrder("u", 0, 1, 32, 60, 0.1, seed=1), base, Cursor())
    before, after = outcome.report.evaluation, trainer.evaluate(base + outcome.update)
    assert before is not None
    assert after.loss < before.loss


def test_all_hospitals_have_the_same_model() -> None:
    layouts = [hospital(index).layout for index in range(len(HOSPITALS))]
    # 14 columns, one of them the target, all numeric.
    assert layouts[0].shapes == ((2, 13), (2,))
    assert all(layout == layouts[0] for layout in layouts)
    assert sum(hospital(index).examples for index in range(len(HOSPITALS))) == pytest.approx(0.75 * 920, abs=4)
