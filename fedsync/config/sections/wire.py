"""Configuration of number formats of unencrypted messages."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsync.config.sections.section import Section
from fedsync.model.plain_wire import FP32, Bf16, Fp16, Int8, TopK, Wire, WireFormat

Format = Literal["fp32", "bf16", "fp16", "int8"]

_FORMATS: dict[str, WireFormat] = {"fp32": FP32, "bf16": Bf16(), "fp16": Fp16(), "int8": Int8()}


class WireConfig(Section):
    """Number formats of models and updates in runs without encryption; encryption sets its own bits."""

    up: Format = "fp32"
    """Format of updates to the server. ``fp32`` takes 4 bytes per value; ``bf16`` and ``fp16`` take 2, ``fp16`` with
    higher precision; ``int8`` takes 1, and its rounding error is added to the silo's next update."""

    down: Format = "fp32"
    """Format of models to the silos. With fewer than 32 bits, a silo keeps the model and receives only the changes of
    each later version. A silo without a recent model receives the whole model as ``fp32``."""

    top_k: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Share of an update that is sent: the values of largest magnitude, each with 4 more bytes for its position. The
    other values are added to the silo's next update."""

    @property
    def formats(self) -> Wire:
        up = _FORMATS[self.up]
        return Wire(up if self.top_k is None else TopK(self.top_k, up), _FORMATS[self.down])

    @property
    def set(self) -> bool:
        """Whether any message has another format than float32."""
        return self != WireConfig()
