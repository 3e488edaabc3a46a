"""Configuration of the comparison of a run's models with models that silos train alone."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from fedsync.config.cipher import CipherConfig, PlainConfig, sealed_metrics
from fedsync.config.sections.section import Section
from fedsync.config.training import PositiveInt
from fedsync.evaluation.local_baselines import CrossSite


class AloneConfig(Section):
    """Length of the silos' training alone."""

    rounds: PositiveInt
    """Number of orders, each with as many steps and samples as the silo's last order in the run."""


class CrossSiteConfig(Section):
    """Training of each silo alone after the run, to compare its model with the run's models. See docs/cross-site.md."""

    local: bool | AloneConfig = True
    """Whether each silo trains alone from the run's first model, with as many samples as it processed in the run.
    ``{rounds: 40}`` sets the number of orders instead."""

    fine_tune: Annotated[int, Field(ge=0)] = 0
    """Steps for which each silo trains the run's best model further with its own data; 0 for none."""

    @model_validator(mode="after")
    def _trains(self) -> Self:
        if not self.local and not self.fine_tune:
            raise ValueError("nothing is trained; write local: true, or fine_tune: 20, or leave cross_site out")
        return self

    def check(self, cipher: CipherConfig, evaluated: float) -> None:
        """Check that a run can compare models; ``evaluated`` is the share of silos that evaluate.

        Raises:
            ValueError: silos evaluate nothing, or they do not keep the best model that ``fine_tune`` needs.
        """
        if evaluated == 0:
            raise ValueError("fraction_evaluate 0 has nobody evaluate what evaluation.cross_site compares; write 1.0")
        if not isinstance(cipher, PlainConfig) and sealed_metrics(cipher) is None and self.fine_tune:
            raise ValueError(
                "evaluation.cross_site.fine_tune begins with the best model, which silos of an encrypted run keep only "
                "where metrics are sealed; leave it out, or write cipher.metrics: sealed"
            )

    def build(self, *, share: bool) -> CrossSite:
        """Return the comparison; with ``share``, models of silos whose owners allow it are sent to other silos."""
        rounds = self.local.rounds if isinstance(self.local, AloneConfig) else None
        return CrossSite(bool(self.local), rounds, self.fine_tune, share)
