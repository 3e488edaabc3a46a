"""Silo file: the machines that are simulated in virtual time, or emulated by processes on one machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedsync.common.errors import ConfigError
from fedsync.common.names import SILO_NAME
from fedsync.config.locate import beside, locate
from fedsync.config.sections.privacy import BudgetConfig
from fedsync.config.sections.section import Section, SparingSection
from fedsync.config.yaml_file import YamlFile
from fedsync.core.orders import MAX_AWAY_S, Presence
from fedsync.core.speed.curve import Curve
from fedsync.policies.schema import NonNegative, Positive


class LinearCurveConfig(Section):
    """Step time proportional to the batch."""

    kind: Literal["linear"]


class AffineCurveConfig(Section):
    """Step time of accelerators: a constant part per step, and no gain below ``saturation`` samples."""

    kind: Literal["affine"]
    launch_s: NonNegative = 0.0
    """Constant part of a step's time, whatever its batch [s]."""

    saturation: Annotated[int, Field(ge=0)] = 0
    """Batch size below which a step does not get faster [samples]."""


CurveConfig = Annotated[LinearCurveConfig | AffineCurveConfig, Field(discriminator="kind")]


class MarkovConfig(Section):
    """Random use of the machine by others: a two-state Markov chain in continuous time."""

    kind: Literal["markov"]
    factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Factor on the speed while others use the machine."""

    on_s: Positive = 30.0
    """Mean duration of a use by others, exponentially distributed [s]."""

    off_s: Positive = 60.0
    """Mean time until the next use by others, exponentially distributed [s]."""


class CrashesConfig(Section):
    """Random crashes, with exponentially distributed times until a crash and times of repair."""

    mtbf_s: Positive
    """Mean time from joining or returning to the next crash [s]."""

    repair_s: Positive
    """Mean time of a repair [s]."""


class FaultConfig(Section):
    """A planned crash of the machine."""

    at_s: NonNegative
    """Time at which the machine goes down [s]."""

    down_s: Positive
    """Time until the machine is back [s]."""


class WindowsConfig(Section):
    """Availability windows, like ``presence`` in ``silo.yaml``; the first window begins as the silo joins."""

    for_s: Positive
    """Length of a window [s]."""

    every_s: Annotated[float, Field(gt=0, le=MAX_AWAY_S)]
    """Time from the beginning of one window to the beginning of the next [s]."""

    @model_validator(mode="after")
    def _closes(self) -> Self:
        if self.for_s >= self.every_s:
            problem = f"for_s {self.for_s:g} is not below every_s {self.every_s:g}"
            raise ValueError(f"{problem}; leave presence out for a silo that is always there")
        return self

    def told(self, since_s: float) -> Presence:
        begun_s = since_s % self.every_s
        if self.every_s - begun_s < 1e-9 * max(since_s, 1.0):
            begun_s = 0.0  # floating point put a window that begins now just before its beginning
        return Presence(max(self.for_s - begun_s, 0.0), self.every_s - begun_s)


class SiloConfig(SparingSection):
    """One machine. Unless a key says otherwise, times are virtual seconds since the run began.

    Virtual time simulates all keys. The local and Flower runtimes emulate ``speed``, ``curve``, ``memory_samples``,
    ``bandwidth_mbps`` and ``latency_s``.
    """

    features: ClassVar[tuple[str, ...]] = ("privacy",)

    name: Annotated[str, Field(pattern=SILO_NAME)]
    """Name of the silo: letters, digits, dot, dash and underscore. With ``count``, ``-NUMBER`` is appended."""

    speed: Annotated[float, Field(gt=0, le=1e9)]
    """Speed of training [samples/s]."""

    count: Annotated[int, Field(ge=1)] | None = None
    """Number of identical silos, named ``name-0`` to ``name-{count - 1}``; left out, one silo named ``name``."""

    privacy: BudgetConfig | None = None
    """Privacy budget of the silo's data, as its owner would write it in ``silo.yaml``."""

    jitter: Annotated[float, Field(ge=0, le=2)] = 0.0
    """Sigma of a lognormal factor on each step; 0 is exact. At 2, one step in twenty takes over 26 times as long."""

    curve: CurveConfig = Field(default_factory=lambda: LinearCurveConfig(kind="linear"))
    """Relation between a step's time and its batch."""

    memory_samples: Annotated[int, Field(ge=1)] | None = None
    """Largest batch that fits into memory [samples]; left out, unlimited."""

    overhead_s: NonNegative = 0.0
    """Time that an order costs besides training and transfer [s]."""

    bandwidth_mbps: Positive | None = None
    """Bandwidth to and from the server [Mbit/s]; left out, transfers take no time."""

    latency_s: NonNegative = 0.0
    """One-way delay of a message, besides the transfer of its bytes [s]."""

    trace: str | None = None
    """CSV file with the columns ``seconds, factor``: speed multipliers as a step function of time."""

    contention: MarkovConfig | None = None
    """Random changes of speed. The factors of trace and contention are multiplied."""

    crashes: CrashesConfig | None = None
    """Random crashes and returns. An order in progress is lost; the silo's position in its data is kept."""

    faults: list[FaultConfig] = Field(default_factory=list)
    """Planned crashes and returns. An order in progress is lost; the silo's position in its data is kept."""

    presence: WindowsConfig | None = None
    """Availability windows, which the silo reports to the server. Left out, the silo is always available."""

    joins_at_s: NonNegative = 0.0
    """Time at which the silo joins [s]."""

    leaves_at_s: Positive | None = None
    """Time at which the silo leaves for good [s]."""

    examples: Annotated[int, Field(ge=1)] = 1000
    """Number of training samples that the silo reports in a timing-only run, which has no data."""

    data: dict[str, str] = Field(default_factory=dict)
    """Files of the silo by the names that a task refers to (``file: data:NAME``), like ``data`` in a real silo's
    ``silo.yaml``. Paths are relative to the silo file."""

    node_config: dict[str, bool | int | float | str] = Field(default_factory=dict)
    """Values that your own training code finds in ``silo.node_config``, as at a real silo."""

    @model_validator(mode="after")
    def _is_sound(self) -> Self:
        begin_s = self.joins_at_s
        if self.leaves_at_s is not None and self.leaves_at_s <= begin_s:
            raise ValueError(f"leaves_at_s {self.leaves_at_s:g} is not after joins_at_s {begin_s:g}; join earlier")
        early = [fault.at_s for fault in self.faults if fault.at_s <= begin_s]
        if early:
            raise ValueError(f"a fault at {early[0]:g} s is not after joins_at_s {begin_s:g}; join earlier")
        if self.count is not None and not re.fullmatch(SILO_NAME, f"{self.name}-{self.count - 1}"):
            raise ValueError(f"name {self.name!r} is too long for {self.count} silos to be numbered; shorten it")
        return self

    def build_curve(self) -> Curve:
        if isinstance(self.curve, LinearCurveConfig):
            return Curve(self.speed)
        return Curve(self.speed, self.curve.launch_s, self.curve.saturation)

    def expanded(self) -> list[SiloConfig]:
        if self.count is None:
            return [self]
        return [self.model_copy(update={"name": f"{self.name}-{i}", "count": None}) for i in range(self.count)]


class ClusterConfig(Section):
    """All machines of a silo file. Entries with a ``count`` are expanded when the file is read."""

    silos: Annotated[list[SiloConfig], Field(min_length=1)]
    """The machines; each name may occur once."""

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
        # The model is frozen for all other code; this validator is still part of construction.
        object.__setattr__(self, "silos", silos)
        return self

    @property
    def at_start(self) -> int:
        """Number of silos present when the run begins; at least 1, so that a run can wait for late silos."""
        return max(sum(silo.joins_at_s == 0 for silo in self.silos), 1)

    def entries(self) -> list[dict[str, Any]]:
        """Return the silos as plain values that read back the same; consecutive identical silos get a ``count``."""
        groups: list[list[SiloConfig]] = []
        for silo in self.silos:
            if groups and _continues(groups[-1], silo):
                groups[-1].append(silo)
            else:
                groups.append([silo])
        return [_entry(group) for group in groups]

    @classmethod
    def load(cls, name: str | Path) -> ClusterConfig:
        """Read a silo file, by path or shipped name. Paths of traces and data are relative to the file.

        Raises `ConfigError` with place and remedy if the file is invalid, or a trace does not exist.
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
    """Number of silos that a run began with, from its journal; only in virtual time do silos join later."""
    return max(sum(entry.get("count") or 1 for entry in entries if not (virtual and entry.get("joins_at_s"))), 1)


def _continues(group: Sequence[SiloConfig], silo: SiloConfig) -> bool:
    stem, dash, number = group[0].name.rpartition("-")
    if not (stem and dash and number == "0") or silo.name != f"{stem}-{len(group)}":
        return False
    return vars(group[0]) | {"name": silo.name} == vars(silo)


def _entry(group: Sequence[SiloConfig]) -> dict[str, Any]:
    plain = group[0].model_dump(mode="json", exclude_defaults=True)
    if len(group) > 1:
        plain |= {"name": group[0].name.removesuffix("-0"), "count": len(group)}
    return plain
