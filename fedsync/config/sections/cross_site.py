"""What silos train for themselves, to be compared with the models of a run."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.config.cipher import CipherConfig, PlainConfig, sealed_metrics
from fedsync.config.sections.section import Section
from fedsync.config.training import PositiveInt
from fedsync.evaluation.local_baselines import CrossSite


class AloneConfig(Section):
    """How long silos train alone."""

    rounds: PositiveInt
    """Orders, each of as many steps and samples as the silo's last in the run."""


class CrossSiteConfig(Section):
    """What silos train for themselves when the run is over, to be compared with its models. See docs/results.md."""

    local: bool | AloneConfig = True
    """Whether each trains alone, from the run's first model, with as many samples as it processed in the run; or with
    ``{rounds: 40}`` so many orders."""

    fine_tune: Annotated[int, Field(ge=0)] = 0
    """Steps that each trains the run's best model with its own data; 0 for none."""

    @model_validator(mode="after")
    def _trains(self) -> Self:
        if not self.local and not self.fine_tune:
            raise ValueError("nothing is trained; write local: true, or fine_tune: 20, or leave cross_site out")
        return self

    def check(self, cipher: CipherConfig, evaluated: float) -> None:
        """See that a run can compare anything; ``evaluated`` is the part of silos that evaluates.

        Raises:
            ValueError: it cannot; says what to write.
        """
        if evaluated == 0:
            raise ValueError("fraction_evaluate 0 has nobody evaluate what evaluation.cross_site compares; write 1.0")
        if not isinstance(cipher, PlainConfig) and sealed_metrics(cipher) is None and self.fine_tune:
            raise ValueError(
                "evaluation.cross_site.fine_tune begins with the best model, which silos of an encrypted run keep only "
                "where metrics are sealed; leave it out, or write cipher.metrics: sealed"
            )

    def build(self, *, share: bool) -> CrossSite:
        """What follows from it; models of silos whose owners allow it travel if they ``share``."""
        rounds = self.local.rounds if isinstance(self.local, AloneConfig) else None
        return CrossSite(bool(self.local), rounds, self.fine_tune, share)
