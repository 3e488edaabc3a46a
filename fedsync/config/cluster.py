"""A silo file: the machines that virtual time simulates and the local runtimes emulate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from fedsync.config.locate import locate
from fedsync.config.section import Section
from fedsync.config.yaml_file import YamlFile
from fedsync.core.curve import Curve
from fedsync.core.errors import ConfigError

NonNegative = Annotated[float, Field(ge=0)]


class LinearCurveConfig(Section):
    """Time in proportion to the batch."""

    kind: Literal["linear"]

    def build(self, speed: float) -> Curve:
        """Curve of a silo with this speed [samples/s]."""
        return Curve(speed)


class AffineCurveConfig(Section):
    """A constant time a step, and no gain below ``saturation`` samples: accelerators."""

    kind: Literal["affine"]
    launch_s: NonNegative = 0.0
    saturation: Annotated[int, Field(ge=0)] = 0

    def build(self, speed: float) -> Curve:
        """Curve of a silo with this speed [samples/s]."""
        return Curve(speed, self.launch_s, self.saturation)


CurveConfig = Annotated[LinearCurveConfig | AffineCurveConfig, Field(discriminator="kind")]


class SiloConfig(Section):
    """One machine.

    Args:
        name: letters, digits, dot, dash, underscore.
        speed: samples per second.
        jitter: sigma of a lognormal factor a step; 0 is exact.
        curve: how a step's time follows its batch.
        memory_samples: largest batch, if limited.
        overhead_s: seconds an order costs besides training.
        trace: CSV file with the columns ``seconds, factor``: a step function of speed multipliers.
    """

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]+$")]
    speed: Annotated[float, Field(gt=0, le=1e9)]
    jitter: NonNegative = 0.0
    curve: CurveConfig = Field(default_factory=lambda: LinearCurveConfig(kind="linear"))
    memory_samples: Annotated[int, Field(ge=1)] | None = None
    overhead_s: NonNegative = 0.0
    trace: str | None = None

    def build_curve(self) -> Curve:
        """Its curve without jitter and trace."""
        return self.curve.build(self.speed)


class ClusterConfig(Section):
    """All machines, each name once."""

    silos: Annotated[list[SiloConfig], Field(min_length=1)]

    @model_validator(mode="after")
    def _names_differ(self) -> Self:
        names = [silo.name for silo in self.silos]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"the name {name!r} stands {names.count(name)} times")
        return self

    @classmethod
    def load(cls, name: str | Path) -> ClusterConfig:
        """Read a silo file, by path or shipped name; traces are relative to it.

        Raises:
            ConfigError: anything is wrong; names the place and the remedy.
        """
        path = locate(name, "silos")
        file = YamlFile.read(path)
        config = file.validate(cls)
        silos = []
        for index, silo in enumerate(config.silos):
            if silo.trace is not None:
                trace = (path.parent / silo.trace).resolve()
                if not trace.is_file():
                    place = file.place(("silos", str(index), "trace"))
                    raise ConfigError(place, f"no file {silo.trace!r}", "Give a path relative to the silo file")
                silo = silo.model_copy(update={"trace": str(trace)})
            silos.append(silo)
        return config.model_copy(update={"silos": silos})
