"""Which tensors of a model travel, as a strategy file says it."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedsync.config.sections.section import Section
from fedsync.model.tensor_parts import PartPatterns

_MOST_PATTERNS = 1000

Pattern = Annotated[str, Field(min_length=1, max_length=256)]


class ModelConfig(Section):
    """Which tensors of the model travel, and which stay at their silo.

    Names are those of the model's state dict; in patterns ``*`` and ``?`` stand for other letters. What neither travels
    nor is private is frozen: it stays as it was built or loaded, and must be the same at every silo.
    """

    share: Annotated[list[Pattern], Field(min_length=1, max_length=_MOST_PATTERNS)] | None = None
    """Tensors that travel, as in ``["adapters.*"]``; left out, all that have a gradient, and all buffers."""

    private: Annotated[list[Pattern], Field(max_length=_MOST_PATTERNS)] = Field(default_factory=list)
    """Tensors that each silo trains and keeps for itself, as in ``["*norm*", "head.*"]``."""

    def build(self) -> PartPatterns:
        return PartPatterns(None if self.share is None else tuple(self.share), tuple(self.private))
