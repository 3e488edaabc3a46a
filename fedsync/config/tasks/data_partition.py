"""Configuration of the distribution of one data set among silos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedsync.config.sections.section import Section

if TYPE_CHECKING:
    from fedsync.tasks.partition import Partition

Positive = Annotated[float, Field(gt=0)]


class IidConfig(Section):
    """A random share of the samples for every silo."""

    kind: Literal["iid"]

    def build(self) -> Partition:
        from fedsync.tasks.partition import Iid

        return Iid()


class DirichletConfig(Section):
    """Shares of classes drawn from a Dirichlet distribution."""

    kind: Literal["dirichlet"]
    alpha: Positive = 0.5
    """Concentration; 0.1 is very uneven, 100 is nearly i.i.d."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import Dirichlet

        return Dirichlet(self.alpha)


class DualDirichletConfig(Section):
    """Two Dirichlet draws: the amount of data of each silo (``size_alpha``), and its classes (``class_alpha``)."""

    kind: Literal["dual-dirichlet"]
    size_alpha: Positive = 2.0
    """Concentration of the sizes; a large value makes silos of equal size."""

    class_alpha: Positive = 0.5
    """Concentration of the classes; a small value leaves each silo few classes."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import DualDirichlet

        return DualDirichlet(self.size_alpha, self.class_alpha)


class PathologicalConfig(Section):
    """Only ``classes_per_silo`` classes at every silo; two, as in LB-BSP, section 5.5."""

    kind: Literal["pathological"]
    classes_per_silo: Annotated[int, Field(ge=1)] = 2
    """Number of classes at each silo."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import Pathological

        return Pathological(self.classes_per_silo)


class ShardsConfig(Section):
    """Shards of the samples, sorted by class; every silo gets several, by default two, as in PSP, section 10.6.1."""

    kind: Literal["shards"]
    shards_per_silo: Annotated[int, Field(ge=1)] = 2
    """Number of shards at each silo."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import Shards

        return Shards(self.shards_per_silo)


class NaturalConfig(Section):
    """Whole writers, speakers or other owners of samples for each silo; only for data that name owners."""

    kind: Literal["natural"]

    def build(self) -> Partition:
        from fedsync.tasks.partition import ByOwner

        return ByOwner()


class OwnConfig(Section):
    """No distribution: every silo trains on all samples at the data's path on its own machine."""

    kind: Literal["own"]

    def build(self) -> None: ...


PartitionConfig = Annotated[
    IidConfig | DirichletConfig | DualDirichletConfig | PathologicalConfig | ShardsConfig, Field(discriminator="kind")
]
SourcePartitionConfig = Annotated[
    IidConfig | DirichletConfig | DualDirichletConfig | PathologicalConfig | ShardsConfig | NaturalConfig | OwnConfig,
    Field(discriminator="kind"),
]


def iid() -> IidConfig:
    return IidConfig(kind="iid")
