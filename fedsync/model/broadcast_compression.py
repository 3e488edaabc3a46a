"""Compressed model downloads: differences in fewer than 32 bits, from which all silos build the same model.

The *public* model is the model at the silos. Version 0 is the run's first model. Version n adds to version n - 1 the
encoded difference between the server's exact model n and the public model n - 1. So server and silos agree on every
bit, and the rounding error of one difference is part of the next difference.

| a silo that holds | is sent | bytes a value |
|---|---|---|
| the newest version | nothing | 0 |
| one of the last few versions | the differences since this version | bytes of the wire format, per difference |
| an older version, none, or one that a resumed run lacks; after a rollback: any | the public model, as float32 | 4 |

The server keeps the newest differences, as long as they take fewer bytes than the model. A payload begins with two
int64: its base version, -1 for none, and its resulting version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from fedsync.common.errors import SERVER, ProtocolError
from fedsync.model.chunked_arrays import ArrayKeeper, give_back
from fedsync.model.layout import Vector
from fedsync.model.plain_wire import FP32, WireFormat, check_length, check_values
from fedsync.model.transfer import OtherVersion, Payload

HEAD_BYTES = 16


def differences_kept(values: int, wire: WireFormat) -> int:
    return max(FP32.payload_bytes(values) - 1, 0) // max(wire.payload_bytes(values), 1)


def download_bytes(values: int, wire: WireFormat, behind: int | None) -> int:
    if wire is FP32:
        return FP32.payload_bytes(values)
    if behind is None or not 0 <= behind <= differences_kept(values, wire):
        return HEAD_BYTES + FP32.payload_bytes(values)
    return HEAD_BYTES + behind * wire.payload_bytes(values)


@dataclass(frozen=True, slots=True)
class _Difference:
    to: Vector
    base: Vector

    @property
    def size(self) -> int:
        return self.to.size

    def __getitem__(self, span: slice, /) -> Vector:
        difference = self.to[span] - self.base[span]
        give_back(self.to, self.base)
        return difference


class PublicModel:
    """Server side of compressed downloads: the public model, float32 [values], and the payload for each silo.

    A new process needs only ``model`` and ``version`` to continue; it starts without differences. With float32 as the
    wire format of differences, every order brings the whole model and silos hold none.
    """

    def __init__(self, model: Vector, wire: WireFormat, keeper: ArrayKeeper | None = None) -> None:
        self.model, self.version, self._wire, self._keeper = model, 0, wire, keeper or ArrayKeeper()
        self._differences: list[Payload] = []
        self._made: dict[int, Payload] = {}
        self._earlier: tuple[int, Payload] | None = None

    def advance(self, exact: Vector) -> None:
        self.version += 1
        self._made.clear()
        if self._wire is FP32:
            self.model = exact
            return
        difference = self._wire.encode(_Difference(exact, self.model), keeper=self._keeper)
        self.model = _moved(self._wire, self.model, [difference], self._keeper)
        kept = differences_kept(exact.size, self._wire)
        self._differences = [*self._differences, difference][-kept:] if kept else []

    def restart(self, model: Vector) -> None:
        self.version += 1
        self.model = model
        self._made.clear()
        self._differences = []

    def payload(self, held: int) -> Payload:
        """Return the payload for a silo that holds version ``held``, -1 for none; equal calls share one object."""
        if self._wire is FP32:
            return self.model
        behind = self.version - held
        if held < 0 or not 0 <= behind <= len(self._differences):
            held, behind = -1, 0
        if held not in self._made:
            parts = self._differences[len(self._differences) - behind :] if held >= 0 else [self.model]
            self._made[held] = self._headed(held, self.version, parts)
        return self._made[held]

    def whole(self, version: int, model: Vector) -> Payload:
        """Return the payload of a whole earlier public model; equal calls share one object."""
        if self._wire is FP32:
            return model
        if self._earlier is None or self._earlier[0] != version:
            self._earlier = version, self._headed(-1, version, [model])
        return self._earlier[1]

    def _headed(self, held: int, version: int, parts: Sequence[Payload]) -> Payload:
        return self._keeper.join([np.array([held, version], np.int64), *parts])


class HeldModel:
    """Silo side of compressed downloads: the public model that a silo holds."""

    def __init__(self, values: int, wire: WireFormat, keeper: ArrayKeeper | None = None) -> None:
        self._values, self._wire, self._keeper = values, wire, keeper or ArrayKeeper()
        self.version, self.model = -1, np.empty(0, np.float32)

    def receive(self, payload: Payload, version: int) -> Vector:
        """Return the model ``version``, float32 [values]; an invalid payload changes nothing. Raises `OtherVersion` if
        its base is another version than the one held, and `ProtocolError` if it is malformed.
        """
        if payload.dtype != np.uint8 or payload.ndim != 1 or payload.nbytes < HEAD_BYTES:
            raise ProtocolError(SERVER, "length", f"{payload.dtype} {payload.shape} is no model")
        base, leads_to = payload[:HEAD_BYTES].view(np.int64).tolist()
        if leads_to != version or not -1 <= base <= version:
            raise ProtocolError(SERVER, "version", f"it leads from {base} to {leads_to}, not to {version}")
        if base < 0:
            model = self._whole(payload[HEAD_BYTES:])
        elif base != self.version:
            raise OtherVersion(self.version, base)
        else:
            model = self._continued(payload[HEAD_BYTES:], version - base)
        self.version, self.model = version, model
        return model

    def _whole(self, payload: Payload) -> Vector:
        check_values(FP32, self._values, SERVER, payload)
        return payload.view(np.float32)

    def _continued(self, payload: Payload, count: int) -> Vector:
        nbytes = self._wire.payload_bytes(self._values)
        check_length(payload, count * nbytes, SERVER)
        if not count:
            return self.model
        parts = [payload[start : start + nbytes] for start in range(0, count * nbytes, nbytes)] if nbytes else []
        for part in parts:
            self._wire.check(part, self._values, SERVER)
        model = _moved(self._wire, self.model, parts, self._keeper)
        check_values(FP32, model.size, SERVER, model)
        return model


def _moved(wire: WireFormat, model: Vector, differences: Sequence[Payload], keeper: ArrayKeeper) -> Vector:
    def part(start: int, stop: int) -> Vector:
        moved = model[start:stop].copy()
        for difference in differences:
            moved += wire.decode(difference, start, stop)
        give_back(model, *differences)
        return moved

    return keeper.make(np.float32, model.size, part)
