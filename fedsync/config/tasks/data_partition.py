"""How one data set is dealt to silos."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedsync.config.sections.section import Section

if TYPE_CHECKING:
    from fedsync.tasks.partition import Partition

Positive = Annotated[float, Field(gt=0)]


class IidConfig(Section):
    """Every silo gets a random share."""

    kind: Literal["iid"]

    def build(self) -> Partition:
        from fedsync.tasks.partition import Iid

        return Iid()


class DirichletConfig(Section):
    """Class shares drawn from a Dirichlet distribution."""

    kind: Literal["dirichlet"]
    alpha: Positive = 0.5
    """Concentration; 0.1 is very uneven, 100 nearly i.i.d."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import Dirichlet

        return Dirichlet(self.alpha)


class DualDirichletConfig(Section):
    """Two draws: how much data each silo has (``size_alpha``), and of which classes (``class_alpha``)."""

    kind: Literal["dual-dirichlet"]
    size_alpha: Positive = 2.0
    """Concentration of the sizes; large makes silos of one size."""

    class_alpha: Positive = 0.5
    """Concentration of the classes; small leaves each silo few."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import DualDirichlet

        return DualDirichlet(self.size_alpha, self.class_alpha)


class PathologicalConfig(Section):
    """Every silo holds ``classes_per_silo`` classes only; two, as in LB-BSP, section 5.5."""

    kind: Literal["pathological"]
    classes_per_silo: Annotated[int, Field(ge=1)] = 2
    """Classes that each silo holds."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import Pathological

        return Pathological(self.classes_per_silo)


class ShardsConfig(Section):
    """Samples sorted by class are cut to shards, of which every silo gets some; two, as in PSP, section 10.6.1."""

    kind: Literal["shards"]
    shards_per_silo: Annotated[int, Field(ge=1)] = 2
    """Shards that each silo gets."""

    def build(self) -> Partition:
        from fedsync.tasks.partition import Shards

        return Shards(self.shards_per_silo)


class NaturalConfig(Section):
    """Whole writers, speakers or other owners of samples go to silos; only for data that name them."""

    kind: Literal["natural"]

    def build(self) -> Partition:
        from fedsync.tasks.partition import ByOwner

        return ByOwner()


class OwnConfig(Section):
    """Nothing is dealt: every silo trains on all that the data's path holds on its own machine."""

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
    """The partition where none is named."""
    return IidConfig(kind="iid")
