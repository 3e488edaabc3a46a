"""Configuration of the tensors that travel."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from fedsync.config.sections.section import Section
from fedsync.model.tensor_parts import PartPatterns

_MOST_PATTERNS = 1000

Pattern = Annotated[str, Field(min_length=1, max_length=256)]


class ModelConfig(Section):
    """Tensors of the model that travel, and tensors that stay at their silo.

    Names are the names in the model's state dict; in patterns, ``*`` and ``?`` match other characters. A tensor that
    is neither shared nor private is frozen: it keeps its built or loaded value, which must be the same at every silo.
    """

    share: Annotated[list[Pattern], Field(min_length=1, max_length=_MOST_PATTERNS)] | None = None
    """Tensors that travel, as in ``["adapters.*"]``; left out, all tensors with a gradient, and all buffers."""

    private: Annotated[list[Pattern], Field(max_length=_MOST_PATTERNS)] = Field(default_factory=list)
    """Tensors that each silo trains and keeps, as in ``["*norm*", "head.*"]``."""

    def build(self) -> PartPatterns:
        return PartPatterns(None if self.share is None else tuple(self.share), tuple(self.private))
