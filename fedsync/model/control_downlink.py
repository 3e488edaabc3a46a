"""Download format of runs with control variates: unencrypted bytes sent with the model.

| bytes | content |
|---|---|
| 4 a value | the model, float32 |
| 4 a value | m of `fedsync.model.control_variates`, float32 |
| 16 a silo | first 8 bytes of SHA-256 of its name, and the serial number of its last committed update, int64 |

From the serial number a silo knows which update its own variate follows. All silos are sent the same bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.array_keeper import ArrayKeeper
from fedsync.model.chunked_arrays import give_back, spans
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import MAX_MAGNITUDE, check_length
from fedsync.model.transfer import Payload

_COUNTED = np.dtype([("silo", "S8"), ("serial", "<i8")])


@dataclass(frozen=True, slots=True, eq=False)
class ControlledModel:
    """Model with the control variate that corrects local steps.

    Args:
        model: float32 [values].
        control: m, float32 [values].
        counted: serial number of each silo's last committed update, by `key_of` its name.
    """

    model: Vector
    control: Vector
    counted: Mapping[bytes, int]

    def encode(self, keeper: ArrayKeeper) -> Payload:
        table = np.array(sorted(self.counted.items()), _COUNTED)
        return keeper.join([self.model, self.control, table.view(np.uint8)])

    @classmethod
    def decode(cls, payload: Payload, values: int) -> ControlledModel:
        """Read the server's bytes; arrays are views.

        Raises:
            ProtocolError: the length is wrong, or a control value is not finite or too large.
        """
        length = 8 * values
        check_length(payload, length + max(payload.nbytes - length, 0) // _COUNTED.itemsize * _COUNTED.itemsize, SERVER)
        model, control = payload[: 4 * values].view(np.float32), payload[4 * values : length].view(np.float32)
        for start, stop in spans(values, 4):
            low, high = np.min(control[start:stop]), np.max(control[start:stop])
            give_back(control)
            if not (low >= -MAX_MAGNITUDE and high <= MAX_MAGNITUDE):  # NaN fails every comparison
                raise ProtocolError(SERVER, "finite", f"control variates from {low} to {high}")
        table = np.frombuffer(payload[length:].tobytes(), _COUNTED)
        return cls(model, control, {bytes(row["silo"]).ljust(8, b"\0"): int(row["serial"]) for row in table})


def key_of(silo: str) -> bytes:
    return hashlib.sha256(silo.encode()).digest()[:8]


def serial_of(update_id: str) -> tuple[str, int]:
    """Return silo and serial number of an update; raise ValueError if the id has no number."""
    silo, _, serial = update_id.rpartition("/")
    return silo, int(serial)
