"""The header: what silos must add up besides their updates, and the server must not see.

Each silo puts in a 1, its weight n_i, its weight times its progress |a_i|, one vote a group of tensors for the
exponent that its update needs and, where figures are sealed, its training loss and the sums of its evaluation. All
silos decrypt the same sums, so all come to the same mean and the same next exponents, whoever dropped out, and the
server learns neither.

A header is the beginning of chunk 0. Its slots are small (24 bits and a sign a summand), so that every suite adds
them exactly:

    0          count: 1 from each silo
    1          silos that evaluated
    2 .. 5     sum of n_i
    6 .. 9     sum of n_i |a_i|, in units of 2^-20
    10 .. 13   summed loss, in units of 2^-20
    14 .. 17   correct predictions, in units of 2^-20
    18 .. 21   samples evaluated
    22 .. 25   mean training loss a sample, in units of 2^-20
    32 ..      votes: one counter of 8 bits a group and exponent, four to a slot

A number that takes four slots is cut to limbs of 24 bits, lowest first; the highest carries the sign.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.packing import MAX_CAP, MAX_EXPONENT, MIN_EXPONENT, SLOTS, Slots
from fedsync.core.errors import ProtocolError
from fedsync.core.orders import Evaluation

BINS = MAX_EXPONENT - MIN_EXPONENT + 1
"""Exponents to vote for."""

MAX_COUNT = 255
"""Silos that one header's counters can count."""

_VOTES, _PER_SLOT, _COUNTER = 32, 4, 8
MAX_GROUPS = (SLOTS - _VOTES) * _PER_SLOT // BINS
"""Groups of tensors that can have an exponent of their own."""


def vote_groups(tensors: int) -> int:
    """Groups of tensors that silos vote on."""
    return min(tensors, MAX_GROUPS)


def header_slots(tensors: int) -> int:
    """Slots of a header for a model of so many tensors, at most a chunk."""
    return _VOTES + -(-vote_groups(tensors) * BINS // _PER_SLOT)


_COUNT, _EVALUATED, _WEIGHT, _PROGRESS, _LOSS, _CORRECT, _SAMPLES, _TRAINING = 0, 1, 2, 6, 10, 14, 18, 22
_LIMB, _LIMBS, _POINT = 24, 4, 20
# The highest limb of a summand stays within its 24 bits.
_LARGEST = 1 << (_LIMB * _LIMBS - 1)


@dataclass(frozen=True, slots=True)
class Contribution:
    """What one silo puts into a header.

    Args:
        weight: n_i, 1..cap.
        exponents: what each tensor's values need, in the layout's order; see `needed_exponents`.
        progress: |a_i| of FedNova, more than 0; 1 where updates are not normalised.
        evaluation: of the base model, if the silo is to report it encrypted.
        loss: mean training loss a sample, likewise; 0 if not.
    """

    weight: int
    exponents: tuple[int, ...]
    progress: float = 1.0
    evaluation: Evaluation | None = None
    loss: float = 0.0


@dataclass(frozen=True, slots=True)
class Tally:
    """The sum of headers.

    Args:
        count: silos in it.
        weight: sum of n_i.
        progress: sum of n_i |a_i|.
        votes: how many silos voted for each exponent, int64 [groups, BINS].
        tensors: tensors of the layout; group g has those with ``t * groups // tensors == g``.
        evaluators: silos that reported an evaluation.
        evaluation: their sums, or None if there are none.
        loss: sum of all mean training losses.
    """

    count: int
    weight: int
    progress: float
    votes: NDArray[np.int64]
    tensors: int
    evaluators: int
    evaluation: Evaluation | None
    loss: float = 0.0

    @property
    def effective_progress(self) -> float:
        """tau_eff of FedNova, sum of p_i |a_i| with p_i = n_i / sum of n_i."""
        return self.progress / self.weight

    def mean_factor(self, cap: int, *, normalised: bool = False) -> float:
        """What turns the sum of integers, times the step, into the weighted mean of updates.

        Args:
            cap: largest weight, as in `Grid`.
            normalised: FedNova: updates were sent divided by |a_i|.
        """
        return cap / self.weight * (self.effective_progress if normalised else 1.0)


def together(tallies: Sequence[Tally]) -> Tally:
    """Tallies of one layout as one, for sums on several grids that make one commit, or for several commits."""
    first = tallies[0]
    found = [tally.evaluation for tally in tallies if tally.evaluation is not None]
    return Tally(
        count=sum(tally.count for tally in tallies),
        weight=sum(tally.weight for tally in tallies),
        progress=sum(tally.progress for tally in tallies),
        votes=np.sum([tally.votes for tally in tallies], axis=0),
        tensors=first.tensors,
        evaluators=sum(tally.evaluators for tally in tallies),
        evaluation=Evaluation(
            sum(e.loss or 0.0 for e in found), sum(e.correct or 0.0 for e in found), sum(e.samples for e in found)
        )
        if found
        else None,
        loss=sum(tally.loss for tally in tallies),
    )


def build(own: Contribution, cap: int) -> Slots:
    """One silo's header, int64 [header_slots(tensors)].

    Raises:
        ValueError: a number is out of range or not finite.
    """
    if not 1 <= own.weight <= cap <= MAX_CAP:
        raise ValueError(f"weight {own.weight} lies outside 1..{cap}")
    if not (math.isfinite(own.progress) and own.progress > 0):
        raise ValueError(f"progress {own.progress} is not a positive number")
    slots = np.zeros(header_slots(len(own.exponents)), dtype=np.int64)
    slots[_COUNT] = 1
    _put(slots, _WEIGHT, own.weight)
    _put(slots, _PROGRESS, _fixed(own.weight * own.progress))
    _put(slots, _TRAINING, _figure(own.loss))
    if own.evaluation is not None:
        slots[_EVALUATED] = 1
        _put(slots, _LOSS, _figure(own.evaluation.loss or 0.0))
        _put(slots, _CORRECT, _figure(own.evaluation.correct or 0.0))
        _put(slots, _SAMPLES, own.evaluation.samples)
    for group, exponent in enumerate(_grouped(own.exponents)):
        counter = group * BINS + exponent - MIN_EXPONENT
        slots[_VOTES + counter // _PER_SLOT] += 1 << (_COUNTER * (counter % _PER_SLOT))
    return slots


def read(slots: Slots, members: int, cap: int, tensors: int, sender: str) -> Tally:
    """The sum of ``members`` headers, after a check that it can be one.

    Args:
        slots: opened, int64 [at least header_slots(tensors)]: the beginning of chunk 0, or all of it.
        members: silos that the aggregate is said to hold.
        cap: largest weight.
        tensors: of the layout.
        sender: who sent the aggregate, for errors.

    Raises:
        ProtocolError: another count than ``members``, weights that so many silos cannot have, or slots that no sum
            of headers has.
    """
    flat = slots.reshape(-1)[: header_slots(tensors)]
    count, weight, evaluators = int(flat[_COUNT]), _get(flat, _WEIGHT), int(flat[_EVALUATED])
    if count != members or not 1 <= count <= MAX_COUNT:
        raise ProtocolError(sender, "count", f"{count} silos are in the sum, {members} are named")
    if not count <= weight <= count * cap:
        raise ProtocolError(sender, "weights", f"{count} silos weigh {weight}, each at most {cap}")
    progress = _number(flat, _PROGRESS)
    if not progress > 0:
        raise ProtocolError(sender, "progress", f"{count} silos made a progress of {progress:g}")
    groups = vote_groups(tensors)
    votes = _votes(flat, groups)
    if votes is None or (votes.sum(axis=1) != count).any():
        raise ProtocolError(sender, "votes", f"not {count} votes for each of {groups} groups of tensors")
    samples = _get(flat, _SAMPLES)
    if not 0 <= evaluators <= count or samples < 0 or (evaluators == 0 and samples):
        raise ProtocolError(sender, "evaluation", f"{evaluators} of {count} silos evaluated {samples} samples")
    evaluation = None
    if evaluators:
        evaluation = Evaluation(_number(flat, _LOSS), _number(flat, _CORRECT), samples)
    return Tally(count, weight, progress, votes, tensors, evaluators, evaluation, _number(flat, _TRAINING))


def next_exponents(tally: Tally, current: Sequence[int], spared: int = 0, headroom: int = 1) -> tuple[int, ...]:
    """Exponents that all silos use next, in the layout's order. A pure function of the sum, so all agree.

    What the silos needed is the largest vote but for the ``spared`` largest, which may be lies: an honest outlier is
    clipped then. A tensor's exponent stays while it is that or at most ``headroom`` more: so it does not flap, and at
    most so many bits are idle. Otherwise it becomes ``headroom`` more than needed, for the next update may be larger.

    Args:
        tally: the sum of headers.
        current: exponents in use.
        spared: votes that are to change nothing, fewer than there are.
        headroom: bits to spare, at least 1.

    Raises:
        ValueError: ``spared`` out of range, or another number of exponents than tensors.
    """
    if not 0 <= spared < tally.count or len(current) != tally.tensors:
        raise ValueError(
            f"{spared} of {tally.count} votes spared, {len(current)} exponents for {tally.tensors} tensors"
        )
    enough = np.cumsum(tally.votes, axis=1) >= tally.count - spared
    needed = np.argmax(enough, axis=1) + MIN_EXPONENT
    chosen = []
    for tensor, exponent in enumerate(current):
        need = int(needed[tensor * len(needed) // tally.tensors])
        chosen.append(exponent if need <= exponent <= need + headroom else min(need + headroom, MAX_EXPONENT))
    return tuple(chosen)


def votes_spared(voters: Mapping[str, int], colluding: int) -> int:
    """Votes that so many silos may have cast together, and that must change nothing: those of the busiest.

    A silo votes with each update. With fewer than three silos nobody can say who lies; of five at most two may.

    Args:
        voters: votes of each silo.
        colluding: silos that may lie.
    """
    lying = min(colluding, (len(voters) - 1) // 2)
    return sum(sorted(voters.values(), reverse=True)[:lying])


def _grouped(exponents: Sequence[int]) -> list[int]:
    """The exponent that each group of neighbouring tensors needs: the largest among them."""
    groups = vote_groups(len(exponents))
    largest = [MIN_EXPONENT] * groups
    for tensor, exponent in enumerate(exponents):
        if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
            raise ValueError(f"exponent {exponent} lies outside {MIN_EXPONENT}..{MAX_EXPONENT}")
        group = tensor * groups // len(exponents)
        largest[group] = max(largest[group], exponent)
    return largest


def _votes(flat: NDArray[np.int64], groups: int) -> NDArray[np.int64] | None:
    """Counters, int64 [groups, BINS], or None if these are no sums of counters."""
    packed = flat[_VOTES:]
    if (packed < 0).any() or (packed >> (_COUNTER * _PER_SLOT)).any():
        return None
    shifts = np.arange(_PER_SLOT, dtype=np.int64) * _COUNTER
    counters = (packed[:, np.newaxis] >> shifts) & ((1 << _COUNTER) - 1)
    return counters.reshape(-1)[: groups * BINS].reshape(groups, BINS)


def _fixed(number: float) -> int:
    if not math.isfinite(number):
        raise ValueError(f"{number} cannot be sent")
    return round(math.ldexp(number, _POINT))


def _figure(number: float) -> int:
    """As `_fixed`, or the nearest that can be sent: no decision about the model hangs on a figure."""
    return min(max(_fixed(number), 1 - _LARGEST), _LARGEST - 1)


def _put(slots: NDArray[np.int64], at: int, number: int) -> None:
    if not -_LARGEST <= number < _LARGEST:
        raise ValueError(f"{number} is too large to be sent")
    mask = (1 << _LIMB) - 1
    for limb in range(_LIMBS - 1):
        slots[at + limb] = (number >> (_LIMB * limb)) & mask
    slots[at + _LIMBS - 1] = number >> (_LIMB * (_LIMBS - 1))


def _number(slots: NDArray[np.int64], at: int) -> float:
    return math.ldexp(_get(slots, at), -_POINT)


def _get(slots: NDArray[np.int64], at: int) -> int:
    return sum(int(slots[at + limb]) << (_LIMB * limb) for limb in range(_LIMBS))
