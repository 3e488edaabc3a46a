"""Masks (secure aggregation) below the encryption: server and k silos together see only the other silos' sum.

Before encryption, silo i of a roster (silos that mask) applies two kinds of masks to its slots. Its *own mask* comes
from a seed b_i, drawn for this update. A *pair mask* for each other silo j comes from a seed s_ij that only i and j can
compute. Silo i adds it if i < j, and else subtracts it. So pair masks cancel in the sum of the whole roster.
*Survivors* are the silos whose updates arrived. They reveal the seeds of their own masks, and of their pair masks with
silos that dropped out. A lost survivor's seeds come from shares at other silos. See
`docs/internals/cryptography/masks.md`.

| part | protects against |
|---|---|
| context (`mask_round`) | a server that gives other silos work without effect, or different lists, rosters or runs |
| pairs made for one run (`mask_roster`) | an attacker who obtains the long-lived keys afterwards |
| bound of work (`masked_work`) | a server that gives other silos almost no work, so that the sum is nearly one update |
| own masks | a server that has a silo's update and claims that the silo dropped out |
| one list, t signatures (`mask_round`) | a server that shows two lists, to remove both kinds of a silo's masks |
| shares, commitments (`annex`) | silos that are lost before they reveal; silos that reveal false seeds |
| log of used masks (`mask_log`) | a server that repeats an order, and disks that are restored to an older state |

Source: Bonawitz et al. 2017, "Practical secure aggregation for privacy-preserving machine learning", sections 4 and
6.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fedsync.cipher.encoding.fields import annex_digest, pack_frames, pack_named, unpack_frames, unpack_named
from fedsync.cipher.encoding.packing import Slots
from fedsync.cipher.masking.annex import Annex, Seeds
from fedsync.cipher.masking.mask_round import masked
from fedsync.cipher.suites.suite import Member, Sealer, Words
from fedsync.common.errors import SERVER, ProtocolError


class Unmasker:
    """Remover of the masks of a sum, with the seeds that came with the sum (``opening``, see `pack_opening`).

    The tag of the sum must have been checked: it covers the digests of the annexes of ``members``. `ProtocolError` if
    an annex or a seed is missing, a seed differs from its commitment, or contexts differ.
    """

    def __init__(self, opening: bytes, members: Sequence[Member]) -> None:
        entries = {name: unpack_frames(data, SERVER, 2) for name, data in unpack_named(opening, SERVER).items()}
        digests = {member.update_id.rpartition("/")[0]: member.annex for member in members}
        if entries.keys() != digests.keys() or len(digests) != len(members):
            raise ProtocolError(SERVER, "members", "seeds of other silos than are in the sum")
        if any(annex_digest(annex) != digests[name] for name, (annex, _) in entries.items()):
            raise ProtocolError(SERVER, "reveals", "an annex is not the one that its silo sealed")
        annexes = {name: Annex.unpack(annex, name, SERVER) for name, (annex, _) in entries.items()}
        rosters = {(one.context, frozenset(one.pairs.keys() | {name})) for name, one in annexes.items()}
        if len(rosters) != 1:
            raise ProtocolError(SERVER, "reveals", "updates under masks of different contexts")
        dropped = set(rosters.pop()[1] - entries.keys())
        # Masks with the opposite sign: an added mask is subtracted.
        self._masks: list[tuple[bytes, bool]] = []
        for name, (_, data) in entries.items():
            seeds = Seeds.unpack(data, SERVER)
            annexes[name].check(seeds, dropped, SERVER)
            self._masks.append((seeds.own, False))
            self._masks += [(seed, name > other) for other, seed in seeds.pairs.items()]

    def unmask(self, slots: Slots, first: int = 0) -> Slots:
        """Remove the masks from sums of slots, int64 [chunks, 4096]; the result lies within +-t/2."""
        return masked(slots, self._masks, first)


def pack_opening(annexes: Mapping[str, bytes], seeds: Mapping[str, Seeds]) -> bytes:
    return pack_named({name: pack_frames([annex, seeds[name].pack()]) for name, annex in annexes.items()})


def own_seeds(opening: bytes) -> dict[str, bytes]:
    """Seeds of the survivors' own masks, by name, from the bytes of `pack_opening`."""
    entries = {name: unpack_frames(data, SERVER, 2) for name, data in unpack_named(opening, SERVER).items()}
    return {name: Seeds.unpack(seeds, SERVER).own for name, (_, seeds) in entries.items()}


class Masked:
    """Sealer with masks: ``change`` is `MaskRound.mask` for what it seals, or `Unmasker.unmask` for what it opens."""

    def __init__(self, inner: Sealer, change: Callable[[Slots, int], Slots]) -> None:
        self._inner, self._change = inner, change

    def seal(self, slots: Slots, member: Member, first: int = 0) -> Words:
        return self._inner.seal(self._change(slots, first), member, first)

    def open(self, words: Words, members: Sequence[Member], first: int = 0, sender: str = "server") -> Slots:
        return self._change(self._inner.open(words, members, first, sender), first)
