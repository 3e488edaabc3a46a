"""What a silo has to know of a run, beside its orders. Travels with every message, so that any process can serve it."""

from __future__ import annotations

import json
from typing import Annotated

from pydantic import Field, ValidationError

from fedsync.config.cluster import ClusterConfig, SiloConfig
from fedsync.config.local import LocalConfig
from fedsync.config.section import Section
from fedsync.config.strategy import StrategyConfig
from fedsync.config.tasks import TaskConfig
from fedsync.core.errors import ProtocolError


class RunSpec(Section):
    """One run, as silos see it.

    Args:
        seed: of the run.
        silos: number of shares that the data is split into.
        task: what is trained.
        local: how.
        emulate: the machines that silos pretend to be, by partition; empty in a real federation.
    """

    seed: int
    silos: Annotated[int, Field(ge=1)]
    task: TaskConfig
    local: LocalConfig
    emulate: list[SiloConfig] = Field(default_factory=list)

    @classmethod
    def of(cls, config: StrategyConfig, cluster: ClusterConfig | None, silos: int) -> RunSpec:
        """Spec of a strategy, on emulated machines if there is a cluster."""
        emulate = cluster.silos if cluster is not None else []
        return cls(seed=config.seed, silos=silos, task=config.task, local=config.local, emulate=list(emulate))

    @property
    def fastest(self) -> float:
        """Speed of the fastest emulated machine [samples/s]."""
        return max(silo.speed for silo in self.emulate)

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(self.model_dump(mode="json"), separators=(",", ":"))

    @classmethod
    def parse(cls, text: str) -> RunSpec:
        """The inverse of `dump`.

        Raises:
            ProtocolError: the server sent something else.
        """
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            raise ProtocolError("server", "run specification", str(error.errors(include_url=False)[0])) from error
