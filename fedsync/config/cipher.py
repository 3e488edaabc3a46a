"""Configuration of the encryption suites."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from fedsync.config.sections.section import Section
from fedsync.core.report_checks import MAX_EXAMPLES

Bits = Literal[8, 12, 16]


class PlainConfig(Section):
    """No encryption: the server sees every update."""

    kind: Literal["plain"]


class _SealedConfig(Section):
    """Options that all encryption suites share."""

    bits: Bits = 16
    """Bits per value after stochastic rounding."""

    only: list[str] = Field(default_factory=list)
    """Name patterns of the tensors to encrypt; all other tensors travel in the clear. Empty: all are encrypted."""

    metrics: Literal["plain", "sealed"] = "sealed"
    """``sealed``: losses and accuracies are encrypted with the updates, and the server learns only their mean over the
    silos, one commit late. The server does not learn how many samples a silo has, and silos send no other metrics.
    ``plain``: every silo sends its own values to the server, if its owner allows it."""

    examples: Annotated[int, Field(ge=1, le=MAX_EXAMPLES)] | None = None
    """With sealed metrics, the number of training samples that every silo is assumed to hold. Choose a number close to
    the usual count. Required where rounds count passes over the data. No batch is larger."""

    members: Annotated[int, Field(ge=1)] | None = None
    """Minimum number of updates in a version that silos decrypt. Left out, it depends on the barrier. If the barrier
    waits for all silos (``bsp``, ``on-time``, ``a-bsp``, ``elastic``), it is the number of silos at the start of the
    run. Otherwise it is the smallest number of silos whose updates the barrier commits. With 1, a silo's single update
    can be disclosed to the other silos."""

    colluding: Annotated[int, Field(ge=1)] = 1
    """Number of silos that may collude and lie: that many votes on how to round updates change nothing."""

    kept_versions: Annotated[int, Field(ge=0)] = 8
    """Number of versions for which the server keeps every silo's encrypted update in the run's folder. A majority of
    the silos' owners can then have it examined which silo spoiled a version. 0 keeps none."""

    kept_bytes: Annotated[int, Field(ge=0)] = 1_000_000_000
    """Maximum disk space of these kept updates at the server [bytes]; the oldest are deleted first."""

    kind: str

    @property
    def limit(self) -> int:
        from fedsync.cipher.encoding.packing import Packing
        from fedsync.cipher.suites.suite import form_of

        form = form_of(self.kind)
        return form.limit(Packing(self.bits, form.slot_bits))


class BfvConfig(_SealedConfig):
    """Exact homomorphic encryption (BFV): the server adds updates that it cannot read. The usual choice."""

    kind: Literal["bfv"]


class PadConfig(_SealedConfig):
    """One-time pads from a key that all silos share: smallest and fastest, with the same trust as ``bfv``."""

    kind: Literal["pad"]


class MaskedConfig(Section):
    """Masks inside ``bfv`` that cancel only in whole sums: server and one silo together cannot read a single update.

    A sum needs at least three silos whose updates all began with the same version, and two more requests to each silo.
    """

    kind: Literal["masked"]
    inner: BfvConfig = Field(default_factory=lambda: BfvConfig(kind="bfv"))
    """Options of the encryption around the masked updates."""

    work_ratio: Annotated[float, Field(ge=1, le=1000)] = 4.0
    """Largest ratio between the work of two silos in one sum, in steps and in samples. Balancers keep this ratio, and
    silos decrypt no other sum: an update with much more work than the others stands out in the sum. Silos refuse more
    than 4 unless their owners allow it (``seal.work_ratio``)."""


def sealing(cipher: CipherConfig) -> BfvConfig | PadConfig | None:
    cipher = cipher.inner if isinstance(cipher, MaskedConfig) else cipher
    return None if isinstance(cipher, PlainConfig) else cipher


def sealed_metrics(cipher: CipherConfig) -> BfvConfig | PadConfig | None:
    sealed = sealing(cipher)
    return None if sealed is None or sealed.metrics == "plain" else sealed


def with_members(cipher: CipherConfig, members: int) -> CipherConfig:
    if isinstance(cipher, MaskedConfig):
        return cipher.model_copy(update={"inner": with_members(cipher.inner, members)})
    if isinstance(cipher, PlainConfig) or cipher.members is not None:
        return cipher
    return cipher.model_copy(update={"members": members})


CipherConfig = Annotated[PlainConfig | BfvConfig | PadConfig | MaskedConfig, Field(discriminator="kind")]


def least_silos(cipher: CipherConfig) -> int:
    """Minimum number of silos with which sums can be decrypted; masks cancel only in sums of two honest silos."""
    sealed = sealing(cipher)
    if sealed is None:
        return 1
    return max(sealed.members or 1, sealed.colluding + 2 if isinstance(cipher, MaskedConfig) else 1)
