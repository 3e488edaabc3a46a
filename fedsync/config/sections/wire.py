"""How many bits travel in the clear."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsync.config.sections.section import Section
from fedsync.model.plain_wire import FP32, Wire, WireFormat
from fedsync.model.wire_formats import Bf16, Fp16, Int8, TopK

Format = Literal["fp32", "bf16", "fp16", "int8"]

_FORMATS: dict[str, WireFormat] = {"fp32": FP32, "bf16": Bf16(), "fp16": Fp16(), "int8": Int8()}


class WireConfig(Section):
    """How models and updates travel in runs without encryption, which has bits of its own."""

    up: Format = "fp32"
    """Updates to the server: 4 bytes a value; ``bf16`` and ``fp16`` 2, ``fp16`` more precisely; ``int8`` 1, and what is
    lost is added to the silo's next update."""

    down: Format = "fp32"
    """Models to the silos. With fewer than 32 bits a silo keeps the model, and is sent what is new in each version
    since; one that holds none, or too old a one, is sent the whole model as ``fp32``."""

    top_k: Annotated[float, Field(gt=0, le=0.5)] | None = None
    """Share of an update that is sent: the values of largest magnitude, with 4 bytes more for the place of each. What
    is not sent is added to the silo's next update."""

    @property
    def formats(self) -> Wire:
        """The formats that these words mean."""
        up = _FORMATS[self.up]
        return Wire(up if self.top_k is None else TopK(self.top_k, up), _FORMATS[self.down])

    @property
    def set(self) -> bool:
        """Whether anything travels otherwise than as float32."""
        return self != WireConfig()
