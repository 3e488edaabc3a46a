"""Trainer that adds a silo's survival sums to a vector; the vector of sums takes the place of the model."""

from __future__ import annotations

from fedsync.extras.surveys.survey_trainer import SheetTrainer
from fedsync.extras.survival.survival_estimates import next_beta
from fedsync.extras.survival.survival_sums import SurvivalForm, SurvivalRows, first_vector, read_survival, step_vector
from fedsync.model.layout import Vector
from fedsync.model.table_columns import TableForm
from fedsync.train.options import LocalOptions


class SurvivalTrainer(SheetTrainer):
    """Trainer that adds a silo's counts in the first round, and its sums for one Newton step in each further round.

    Coefficients follow from the sums of earlier rounds, so no message has them. A repeated order gives the same update.

    Args:
        place: index of this silo among ``form.places``.
        rows: rows of the silo's table.
    """

    def __init__(
        self,
        name: str,
        place: int,
        form: SurvivalForm,
        rows: SurvivalRows,
        options: LocalOptions,
        table: TableForm | None,
    ) -> None:
        self._place, self._form, self._survivors = place, form, rows
        super().__init__(name, form.layout, options, len(rows.times), table)

    def _next(self, sums: Vector) -> Vector:
        form, read = self._form, read_survival(self._form, sums)
        if read is None:
            return first_vector(form, self._place, self._survivors)
        if len(read.steps) + 1 == form.rounds:
            return self.initial_model()
        return step_vector(form, self._place, self._survivors, read, next_beta(form, read))
