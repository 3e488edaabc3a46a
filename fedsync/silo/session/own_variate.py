"""Control variate of a silo (SCAFFOLD), and its change by the last update; see `fedsync.model.control_variates`.

m_i is the variate of silo i, m the mean of all m_i, u_i the silo's update, and K_i its number of local steps.

| state | event | next state |
|---|---|---|
| m_i, nothing proposed | an order is trained, and proposes ``m_i - m + u_i / K_i`` | m_i, proposed |
| m_i, proposed | the next order comes, and that update was in a commit | the proposal becomes m_i |
| m_i, proposed | the next order comes, and that update was discarded or lost | m_i, nothing proposed |

So m stays the mean of all m_i. m_i and its proposal are written to one file before the file of the last order
(`current_order`). After a crash between the two files, the order is repeated, and its first proposal is in no commit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from fedsync.common import foreign
from fedsync.common.errors import SERVER, ProtocolError
from fedsync.core.orders import WorkOrder
from fedsync.model.chunked_arrays import ArrayKeeper, give_back
from fedsync.model.control_variates import serial_of
from fedsync.model.layout import Vector
from fedsync.model.transfer import Replica
from fedsync.silo.session.current_order import VectorFile
from fedsync.silo.session.session_extension import SessionExtension
from fedsync.train.silo_trainer import Outcome

logger = foreign.logger(__name__)

VARIATE = "variate.bin"

_MEMORY = ArrayKeeper()


@dataclass(frozen=True, slots=True, eq=False)
class OwnVariate:
    """Control variate of one silo; an immutable value. ``own`` is m_i, float32 [values], with the update ``serial``, 0
    for none. ``proposed`` becomes m_i once the update ``proposed_serial`` is in a commit, float32 [values].
    """

    own: Vector
    serial: int = 0
    proposed: Vector | None = None
    proposed_serial: int = 0

    @classmethod
    def begin(cls, values: int, file: Path | None) -> OwnVariate:
        if file is not None and file.exists():
            found = VectorFile.load(file)
            if found is not None and all(each.size == values for each in found.vectors.values()):
                about, vectors = found.about, found.vectors
                return cls(vectors["own"], about["serial"], vectors["proposed"], about["proposed"])
            logger.warning("%s is corrupt: this silo's control variate is lost", file)
        return cls(_MEMORY.make(np.float32, values, lambda start, stop: np.zeros(stop - start, np.float32)))

    def settled(self, counted: int) -> OwnVariate:
        """Return the variate, given the number of this silo's last committed update; 0 for none."""
        if self.proposed is not None and self.proposed_serial == counted:
            return OwnVariate(self.proposed, counted)
        if self.serial != counted:
            logger.warning(
                "update %d of this silo is in the model, and its control variate is lost: the result is biased "
                "towards other silos' data by that much. Begin the run anew if that matters",
                counted,
            )
        return OwnVariate(self.own, counted)

    def correction(self, control: Vector, learning_rate: float) -> Vector:
        """Return the term that is added to gradients: ``(m_i - m) / eta``, float32 [values]."""
        made = self.own - control
        made /= np.float32(learning_rate)
        return made

    def proposing(self, order: WorkOrder, control: Vector, arriving: Vector, steps: int) -> OwnVariate:
        """Return the variate with the proposal of an update u_i, ``arriving``, float32 [values], of K_i ``steps``."""
        per_step = np.float32(1 / steps)

        def part(start: int, stop: int) -> Vector:
            made = arriving[start:stop] * per_step
            made += self.own[start:stop] - control[start:stop]
            give_back(control, self.own)
            return made

        proposed = _MEMORY.make(np.float32, self.own.size, part)
        return replace(self, proposed=proposed, proposed_serial=serial_of(order.update_id)[1])

    def save(self, file: Path) -> OwnVariate:
        """Write the file durably, or raise `ConfigError`; return the variate with its arrays as maps of the file."""
        assert self.proposed is not None
        about = {"serial": self.serial, "proposed": self.proposed_serial}
        vectors = VectorFile(about, {"own": self.own, "proposed": self.proposed}).save(file)
        return replace(self, own=vectors["own"], proposed=vectors["proposed"])


class StepControl(SessionExtension):
    """Correction of a silo's steps, and bookkeeping of its variate in a file, or in memory without ``folder``."""

    def __init__(self, silo: str, values: int, replica: Replica, folder: Path | None) -> None:
        self._silo = silo
        self._replica = replica
        self._file = None if folder is None else folder / VARIATE
        self._variate = OwnVariate.begin(values, self._file)

    def correction(self, order: WorkOrder) -> Vector | None:
        """Return the term for an order's gradients, float32 [values]; None for an order that only scores.
        `ProtocolError` if the server did not send the control variates.
        """
        if order.scores_only:
            return None
        control = self._replica.control
        if control is None:
            raise ProtocolError(SERVER, "payload", "no control variates came with the model")
        self._variate = self._variate.settled(self._replica.counted(self._silo))
        return self._variate.correction(control, order.learning_rate)

    def released(self, order: WorkOrder, outcome: Outcome) -> Outcome:
        control = self._replica.control
        if order.scores_only or control is None:
            return outcome
        arriving = self._replica.arriving(outcome.update, order, outcome.report)
        self._variate = self._variate.proposing(order, control, arriving, outcome.report.steps)
        if self._file is not None:
            self._variate = self._variate.save(self._file)
        return outcome
