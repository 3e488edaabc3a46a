"""A silo file: the machines that virtual time simulates and the local runtimes emulate."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.common.names import SILO_NAME
from fedsync.config.locate import beside, locate
from fedsync.config.sections.section import Section
from fedsync.config.yaml_file import YamlFile
from fedsync.core.silo_presence import MAX_AWAY_S, Presence
from fedsync.core.speed.curve import Curve

NonNegative = Annotated[float, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]


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
    """Seconds of a step that go by whatever its batch [s]."""

    saturation: Annotated[int, Field(ge=0)] = 0
    """Batch below which a step gets no shorter [samples]."""

    def build(self, speed: float) -> Curve:
        """Curve of a silo with this speed [samples/s]."""
        return Curve(speed, self.launch_s, self.saturation)


CurveConfig = Annotated[LinearCurveConfig | AffineCurveConfig, Field(discriminator="kind")]


class MarkovConfig(Section):
    """Others use the machine now and then: a two-state Markov chain in continuous time."""

    kind: Literal["markov"]
    factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """What the speed is multiplied by while they do."""

    on_s: Positive = 30.0
    """Mean seconds that they stay; exponentially distributed [s]."""

    off_s: Positive = 60.0
    """Mean seconds until they come again; exponentially distributed [s]."""


class PeriodicConfig(Section):
    """Load that comes and goes like day and night: a sine, in 64 steps a period.

    The speed is multiplied by ``1 - amplitude (1 + sin(2 pi (t / period_s + phase))) / 2``.
    """

    kind: Literal["periodic"]
    period_s: Positive
    """Seconds from peak to peak [s]."""

    amplitude: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share of the speed that is lost at the peak."""

    phase: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Where in its period the load is at time 0, as a share of it; 0.25 is the peak."""


class CrashesConfig(Section):
    """The machine goes down at random: exponential times between a return and the next crash, and of repair."""

    mtbf_s: Positive
    """Mean seconds from joining or returning to the next crash [s]."""

    repair_s: Positive
    """Mean seconds until it is back [s]."""


class FaultConfig(Section):
    """The machine goes down by plan."""

    at_s: NonNegative
    """When the machine goes down [s]."""

    down_s: Positive
    """Seconds until it is back [s]."""


class WindowsConfig(Section):
    """The silo is there in windows, as one with ``presence`` in its ``silo.yaml``; the first begins as it joins."""

    for_s: Positive
    """How long a window lasts [s]."""

    every_s: Annotated[float, Field(gt=0, le=MAX_AWAY_S)]
    """From the beginning of one to that of the next [s]."""

    @model_validator(mode="after")
    def _closes(self) -> Self:
        if self.for_s >= self.every_s:
            problem = f"for_s {self.for_s:g} is not below every_s {self.every_s:g}"
            raise ValueError(f"{problem}; leave presence out for a silo that is always there")
        return self

    def told(self, since_s: float) -> Presence:
        """What the silo says of itself, so long after it joined first."""
        begun_s = since_s % self.every_s
        if self.every_s - begun_s < 1e-9 * max(since_s, 1.0):
            begun_s = 0.0  # a window that begins now, but for rounding
        return Presence(max(self.for_s - begun_s, 0.0), self.every_s - begun_s)


class SiloConfig(Section):
    """One machine. Seconds without another word are virtual seconds since the run began.

    Virtual time simulates all of it. The local and Flower runtimes emulate ``speed``, ``curve``, ``memory_samples``,
    ``bandwidth_mbps`` and ``latency_s``.
    """

    name: Annotated[str, Field(pattern=SILO_NAME)]
    """Letters, digits, dot, dash, underscore, as of a real silo; with ``count``, the number makes it longer."""

    speed: Annotated[float, Field(gt=0, le=1e9)]
    """Samples per second [samples/s]."""

    count: Annotated[int, Field(ge=1)] | None = None
    """This many such silos, named ``name-0`` to ``name-{count - 1}``; left out, one named ``name``."""

    jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sigma of a lognormal factor a step; 0 is exact, at 2 one step in twenty takes over 26 times as long."""

    curve: CurveConfig = Field(default_factory=lambda: LinearCurveConfig(kind="linear"))
    """How a step's time follows its batch."""

    memory_samples: Annotated[int, Field(ge=1)] | None = None
    """Largest batch, if limited [samples]."""

    overhead_s: NonNegative = 0.0
    """Seconds an order costs besides training and transfer [s]."""

    bandwidth_mbps: Positive | None = None
    """Megabits per second to and from the server; left out, transfer takes no time [Mbit/s]."""

    latency_s: NonNegative = 0.0
    """Seconds that a message takes one way, besides its bytes [s]."""

    trace: str | None = None
    """CSV file with the columns ``seconds, factor``: a step function of speed multipliers."""

    contention: MarkovConfig | None = None
    """Speed that changes at random."""

    load: PeriodicConfig | None = None
    """Speed that changes with the time of day. Trace, contention and load multiply."""

    crashes: CrashesConfig | None = None
    """Goes down and returns at random. Whatever is in work then is lost; the place in its data is not."""

    faults: list[FaultConfig] = Field(default_factory=list)
    """Goes down and returns by plan. Whatever is in work then is lost; the place in its data is not."""

    presence: WindowsConfig | None = None
    """It is there in windows, and says so. Left out, it is there always."""

    joins_at_s: NonNegative = 0.0
    """Takes part from then on [s]."""

    leaves_at_s: Positive | None = None
    """Is gone from then on, for good [s]."""

    examples: Annotated[int, Field(ge=1)] = 1000
    """Training samples it claims in a timing-only run, which has no data."""

    data: dict[str, str] = Field(default_factory=dict)
    """Files of the silo by the names that a task asks for (``file: data:NAME``), as a real silo has them in
    ``silo.yaml``; relative to the silo file."""

    node_config: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """What training code of one's own finds in ``silo.node_config``, as at a real silo."""

    @model_validator(mode="after")
    def _comes_before_it_goes(self) -> Self:
        begin_s = self.joins_at_s
        if self.leaves_at_s is not None and self.leaves_at_s <= begin_s:
            raise ValueError(f"leaves_at_s {self.leaves_at_s:g} is not after joins_at_s {begin_s:g}; join earlier")
        early = [fault.at_s for fault in self.faults if fault.at_s <= begin_s]
        if early:
            raise ValueError(f"a fault at {early[0]:g} s is not after joins_at_s {begin_s:g}; join earlier")
        return self

    @model_validator(mode="after")
    def _has_names_for_all(self) -> Self:
        if self.count is not None and not re.fullmatch(SILO_NAME, f"{self.name}-{self.count - 1}"):
            raise ValueError(f"name {self.name!r} is too long for {self.count} silos to be numbered; shorten it")
        return self

    def build_curve(self) -> Curve:
        """Its curve without jitter and load."""
        return self.curve.build(self.speed)

    def expanded(self) -> list[SiloConfig]:
        """The silos that this entry stands for, each with a name of its own."""
        if self.count is None:
            return [self]
        return [self.model_copy(update={"name": f"{self.name}-{i}", "count": None}) for i in range(self.count)]


class ClusterConfig(Section):
    """All machines, each name once. Entries with a ``count`` are expanded when they are read."""

    silos: Annotated[list[SiloConfig], Field(min_length=1)]
    """The machines, each name once."""

    @model_validator(mode="after")
    def _expand(self) -> Self:
        silos: list[SiloConfig] = []
        homes: dict[str, int] = {}
        for index, entry in enumerate(self.silos):
            for silo in entry.expanded():
                first = homes.setdefault(silo.name, index)
                if first != index:
                    raise ValueError(
                        f"silos.{index}.name {silo.name!r} is taken by silos.{first}; give each silo its own name"
                    )
                silos.append(silo)
        # Frozen for everybody else; this is still its construction.
        object.__setattr__(self, "silos", silos)
        return self

    @property
    def at_start(self) -> int:
        """How many silos are there when the run begins; at least 1, which the others can be waited for."""
        return max(sum(silo.joins_at_s == 0 for silo in self.silos), 1)

    def entries(self) -> list[dict[str, Any]]:
        """The silos as plain values that read back the same.

        What has its default is left out, and alike silos in a row become one entry with a ``count``.
        """
        groups: list[list[SiloConfig]] = []
        for silo in self.silos:
            if groups and _continues(groups[-1], silo):
                groups[-1].append(silo)
            else:
                groups.append([silo])
        return [_entry(group) for group in groups]

    @classmethod
    def load(cls, name: str | Path) -> ClusterConfig:
        """Read a silo file, by path or shipped name; traces are relative to it.

        Raises:
            ConfigError: anything is wrong; names the place and the remedy.
        """
        path = locate(name, "silos")
        file = YamlFile.read(path)
        entries = file.data.get("silos")
        for index, entry in enumerate(entries if isinstance(entries, list) else []):
            if isinstance(entry, dict) and isinstance(entry.get("trace"), str):
                place = file.place(("silos", str(index), "trace"))
                trace = beside(path, entry["trace"], place)
                if not trace.is_file():
                    raise ConfigError(place, f"no file {entry['trace']!r}", "Give a path relative to the silo file")
                entry["trace"] = str(trace)
            if isinstance(entry, dict) and isinstance(entry.get("data"), dict):
                place = file.place(("silos", str(index), "data"))
                entry["data"] = {key: str(beside(path, str(name), place)) for key, name in entry["data"].items()}
        return file.validate(cls)


def silos_at_start(entries: Iterable[Mapping[str, Any]], *, virtual: bool) -> int:
    """How many silos a run began with, from the plain entries of its journal; see `ClusterConfig.at_start`.

    In the runtimes that are not virtual nobody is late.
    """
    return max(sum(entry.get("count") or 1 for entry in entries if not (virtual and entry.get("joins_at_s"))), 1)


def _continues(group: Sequence[SiloConfig], silo: SiloConfig) -> bool:
    """Whether a silo is the next of a group that one entry could stand for."""
    stem, dash, number = group[0].name.rpartition("-")
    if not (stem and dash and number == "0") or silo.name != f"{stem}-{len(group)}":
        return False
    return vars(group[0]) | {"name": silo.name} == vars(silo)


def _entry(group: Sequence[SiloConfig]) -> dict[str, Any]:
    plain = group[0].model_dump(mode="json", exclude_defaults=True)
    if len(group) > 1:
        plain |= {"name": group[0].name.removesuffix("-0"), "count": len(group)}
    return plain
