"""The kinds of barriers that the papers describe, and what each can be told."""

from __future__ import annotations

from typing import Literal

from fedsync.barrier.bsp import Bsp
from fedsync.config.section import Section
from fedsync.core.protocols import AnyBarrier


class BspConfig(Section):
    """Wait for everybody, then go on together."""

    kind: Literal["bsp"]

    def build(self) -> AnyBarrier:
        """The policy."""
        return Bsp()
