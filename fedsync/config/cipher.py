"""The kinds of encryption that exist, and what each can be told."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from fedsync.common.errors import ConfigError
from fedsync.config.sections.section import Section
from fedsync.core.report_checks import MAX_EXAMPLES
from fedsync.policies.aggregate.aggregate_base import AggregationPolicy

if TYPE_CHECKING:
    from fedsync.cipher.plan import EncryptionPlan
    from fedsync.core.weighting import Solver, Weighting
    from fedsync.evaluation.best_version import Selection
    from fedsync.evaluation.metrics.metric_types import AnyMetric
    from fedsync.model.layout import Layout

Bits = Literal[8, 12, 16]


class PlainConfig(Section):
    """No encryption: the server sees every update."""

    kind: Literal["plain"]


class _SealedConfig(Section):
    """What all suites can be told."""

    bits: Bits = 16
    """Bits of each value after stochastic rounding."""

    only: list[str] = Field(default_factory=list)
    """Patterns of names of tensors to seal; the rest travels in the clear. Empty seals all."""

    metrics: Literal["plain", "sealed"] = "sealed"
    """``sealed``: losses and accuracies travel with the updates, and the server learns the mean over silos, a commit
    late. It does not learn how many samples a silo has, and other figures that silos measure are not sent. ``plain``:
    every silo tells the server its own, if its owner allows that."""

    examples: Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] | None = None
    """With sealed metrics, how many training samples every silo counts as having: a number that you choose, about the
    usual one. Needed where rounds or stop rules go by passes over the data. No batch is larger."""

    members: Annotated[int, Field(ge=1)] | None = None
    """Updates that a version must add at least, for silos to open it. Left out, it is the number of silos that the run
    begins with if the barrier waits for all of them (``bsp``, ``on-time``, ``a-bsp``, ``elastic``), and else the fewest
    silos of whom the barrier commits updates. At 1, each silo's update can be handed to the others."""

    colluding: Annotated[int, Field(ge=1)] = 1
    """Silos that may lie together: so many votes on how to round change nothing."""

    kept_versions: Annotated[int, Field(ge=0)] = 8
    """Versions whose updates the server keeps one by one, sealed as they came, in the run's folder, so that a majority
    of the silos' owners can have it examined who spoiled one. 0 keeps none."""

    kept_bytes: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Most that these may take of the server's disk [bytes]; older ones go first."""

    kind: str

    @property
    def limit(self) -> int:
        """Updates that one sum may hold."""
        from fedsync.cipher.encoding.packing import Packing
        from fedsync.cipher.suites.suite import form_of

        form = form_of(self.kind)
        return form.limit(Packing(self.bits, form.slot_bits))

    def check_sums(self, metrics: tuple[AnyMetric, ...]) -> None:
        """See that a header has room for what these are worked out of; raises `ConfigError` if not."""
        from fedsync.cipher.plan import check_sums

        check_sums(metrics)

    def plan(
        self,
        layout: Layout,
        weighting: Weighting,
        quorum: int,
        metrics: tuple[AnyMetric, ...],
        selection: Selection | None,
    ) -> EncryptionPlan:
        """How updates of a model with this layout are sealed.

        Raises:
            ConfigError: the options do not fit the model or the number of silos.
        """
        from fedsync.cipher.plan import EncryptionPlan

        judged = (metrics, selection) if self.metrics == "sealed" else ()
        return EncryptionPlan(
            *(self.kind, self.bits, layout, weighting, quorum, tuple(self.only), self.metrics == "sealed"),
            *(self.members or 1, self.colluding, self.examples or MAX_EXAMPLES, *judged),
        )


class BfvConfig(_SealedConfig):
    """Homomorphic encryption, exact: the server adds what it cannot read. The usual choice."""

    kind: Literal["bfv"]


class PadConfig(_SealedConfig):
    """One-time pads from a key that the silos share: the smallest and fastest, under the same trust as ``bfv``."""

    kind: Literal["pad"]


class MaskedConfig(Section):
    """Masks inside ``bfv``, which come off whole sums only: server and one silo together see no single update.

    A sum needs three silos at least, all of whose updates began with one version, and two more questions to each.
    """

    kind: Literal["masked"]
    inner: BfvConfig = Field(default_factory=lambda: BfvConfig(kind="bfv"))
    """The encryption inside which masks are added."""

    work_ratio: Annotated[float, Field(ge=1, le=1000)] = 4.0
    """Largest ratio of the work of two silos in one sum, in steps and in samples. Balancers keep
    to it, and silos open no other sum: one update that is much more work than the others stands out in it. No silo's
    owner need allow more than 4 (``seal.work_ratio``)."""

    def plan(
        self,
        layout: Layout,
        weighting: Weighting,
        quorum: int,
        metrics: tuple[AnyMetric, ...],
        selection: Selection | None,
    ) -> EncryptionPlan:
        """As ``inner``, with masks."""
        plan = self.inner.plan(layout, weighting, quorum, metrics, selection)
        return replace(plan, kind=self.kind, work_ratio=self.work_ratio)


def sealing(cipher: CipherConfig) -> BfvConfig | PadConfig | None:
    """The options of the suite that seals; None in the clear."""
    cipher = cipher.inner if isinstance(cipher, MaskedConfig) else cipher
    return None if isinstance(cipher, PlainConfig) else cipher


def sealed_metrics(cipher: CipherConfig) -> BfvConfig | PadConfig | None:
    """The options of a cipher that seals figures; None where silos tell the server their own."""
    sealed = sealing(cipher)
    return None if sealed is None or sealed.metrics == "plain" else sealed


def with_members(cipher: CipherConfig, members: int) -> CipherConfig:
    """The cipher, with so many members of a version unless it says how many."""
    if isinstance(cipher, MaskedConfig):
        return cipher.model_copy(update={"inner": with_members(cipher.inner, members)})
    if isinstance(cipher, PlainConfig) or cipher.members is not None:
        return cipher
    return cipher.model_copy(update={"members": members})


CipherConfig = Annotated[PlainConfig | BfvConfig | PadConfig | MaskedConfig, Field(discriminator="kind")]


def least_silos(cipher: CipherConfig) -> int:
    """Silos that a run needs at least, for silos to open what they sum up; masks come off sums of two honest ones."""
    sealed = sealing(cipher)
    if sealed is None:
        return 1
    return max(sealed.members or 1, sealed.colluding + 2 if isinstance(cipher, MaskedConfig) else 1)


def encryption_plan(
    cipher: CipherConfig,
    aggregation: AggregationPolicy,
    solver: Solver,
    layout: Layout,
    quorum: int,
    metrics: tuple[AnyMetric, ...] = (),
    selection: Selection | None = None,
) -> EncryptionPlan | None:
    """How updates of a model with this layout are sealed; None in the clear.

    Args:
        cipher: how.
        aggregation: how a commit weighs updates, of which silos do their part before they seal.
        solver: how silos train.
        layout: of the model.
        quorum: updates after which silos agree on how to round the next ones.
        metrics: what silos work out together where figures are sealed.
        selection: by what they know then which version is the best.

    Raises:
        ConfigError: the options do not fit the model, the aggregation or the number of silos.
    """
    if isinstance(cipher, PlainConfig):
        return None
    weighting = aggregation.weigher(solver).weighting
    if weighting is None:
        raise ConfigError(
            "aggregation.kind",
            f"{aggregation.kind!r} as configured needs a server that sees the updates",
            "Choose fedavg, fednova or fedbuff with constant staleness",
        )
    return cipher.plan(layout, weighting, quorum, metrics, selection)
