"""Header of an encrypted update: further numbers that are summed over silos and hidden from the server.

Each silo enters a 1, its weight n_i, and its weight times its progress |a_i| (FedNova; else 1). For each group of
tensors it enters a vote for the exponent (range) that its update needs. With encrypted metrics it also enters its
training loss and the sums of its evaluation, statistics included. All silos decrypt the same sums, so they compute the
same mean update and the same next exponents, also after dropouts. The server learns neither mean nor exponents.

A header is the beginning of chunk 0. Its slots are small (24 bits and a sign for each summand), so that every suite
adds them exactly:

    0          count: 1 from each silo
    1          silos that evaluated
    2 .. 5     sum of n_i
    6 .. 9     sum of n_i |a_i|, in units of 2^-20
    10 .. 13   evaluation: summed loss, in units of 2^-20
    14 .. 17   evaluation: correct predictions, in units of 2^-20
    18 .. 21   evaluation: samples
    22 .. 25   mean training loss per sample, in units of 2^-20
    26         silos whose evaluation has samples
    27, 28     subject and split of the evaluation: index into `QUESTIONS`, and its square, to detect unequal indices
    29         silos that report a training loss
    30, 31     silos that report the loss, and the score, of an evaluation with samples
    32 ..      votes: one counter of 8 bits per group and exponent, four in a slot
    then       sums of each statistic: a count takes one slot, any other number takes six, in units of 2^-64

A number that takes several slots is cut into limbs of 24 bits, lowest first; the highest limb carries the sign.
Statistics have a finer unit than losses: their owner chooses the unit of measurement, and the sums may be small in it.

A loss or a score counts only if all silos that could report it do: a mean over some silos would disclose which silos.
An impossible sum of evaluations is dropped, and the rest of the header counts: wrong metrics of one silo must not make
the updates of all silos unusable.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from fedsync.cipher.encoding.packing import MAX_CAP, MAX_EXPONENT, MIN_EXPONENT, SLOTS, Slots
from fedsync.cipher.encoding.sums import fault_of, figure, fixed, get, number, put, sealable, slots_of, summed
from fedsync.common.errors import ProtocolError
from fedsync.core.orders import Evaluation, Split, Subject
from fedsync.evaluation.metrics.metric_types import Statistic

BINS = MAX_EXPONENT - MIN_EXPONENT + 1
MAX_COUNT = 255  # silos that an 8-bit counter can count

Question = tuple[Subject, Split]

QUESTIONS: tuple[Question, ...] = tuple((subject, split) for subject in Subject for split in Split)
ROUNDS: Question = (Subject.LAST, Split.VALIDATION)  # subject and split of the evaluations during rounds

MOST_SUMS = 3072
"""Slots of a header that statistics may take: three quarters of a chunk, so that votes of tensors have room, too."""

_VOTES, _PER_SLOT, _COUNTER = 32, 4, 8


@dataclass(frozen=True)
class HeaderForm:
    """Dimensions of a header, the same at all silos of a run. Silos vote on one exponent for each of ``groups`` of
    tensors. Statistics take at most `MOST_SUMS` slots. `header_form` derives each form once.
    """

    tensors: int
    statistics: tuple[Statistic, ...] = ()

    @cached_property
    def groups(self) -> int:
        return min(self.tensors, (SLOTS - _VOTES - self.sums) * _PER_SLOT // BINS)

    @cached_property
    def sums(self) -> int:
        return sum(map(slots_of, self.statistics))

    @cached_property
    def slots(self) -> int:
        return self._behind_votes + self.sums

    @cached_property
    def places(self) -> tuple[tuple[Statistic, slice], ...]:
        ends = list(accumulate(map(slots_of, self.statistics), initial=self._behind_votes))
        return tuple(zip(self.statistics, map(slice, ends, ends[1:]), strict=True))

    @cached_property
    def _behind_votes(self) -> int:
        return _VOTES + -(-self.groups * BINS // _PER_SLOT)


header_form = lru_cache(maxsize=64)(HeaderForm)
_COUNT, _EVALUATED, _WEIGHT, _PROGRESS, _LOSS, _CORRECT, _SAMPLES, _TRAINING = 0, 1, 2, 6, 10, 14, 18, 22
_HOLDERS, _QUESTION, _SQUARE, _TELL_TRAINING, _TELL_LOSS, _TELL_CORRECT = 26, 27, 28, 29, 30, 31


@dataclass(frozen=True, slots=True)
class Contribution:
    """Numbers that one silo puts into a header. ``weight`` is n_i, 1..cap. ``exponents`` has the exponent that each
    tensor's values need. ``progress`` is |a_i| of FedNova, or 1. ``loss`` is the mean training loss per sample; None if
    the silo's own training code reports none.
    """

    weight: int
    exponents: tuple[int, ...]
    progress: float = 1.0
    evaluation: Evaluation | None = None
    loss: float | None = None
    question: Question = ROUNDS


@dataclass(frozen=True, slots=True)
class Tally:
    """Sum of the headers of ``count`` silos: ``weight`` is the sum of n_i, ``progress`` the sum of n_i |a_i|.

    Args:
        votes: number of silos that voted for each exponent, int64 [groups, BINS].
        tensors: tensors of the layout; group g has those with ``t * groups // tensors == g``.
        evaluators: silos that reported an evaluation, of which ``holders`` have samples.
        evaluation: sum of their evaluations; None if there is none, or ``fault`` says why it is dropped.
        loss: sum of all mean training losses; None where not all silos report a loss.
    """

    count: int
    weight: int
    progress: float
    votes: NDArray[np.int64]
    tensors: int
    evaluators: int
    evaluation: Evaluation | None
    loss: float | None = None
    fault: str = ""
    holders: int = 0
    question: Question = ROUNDS

    @property
    def effective_progress(self) -> float:
        """tau_eff of FedNova, sum of p_i |a_i| with p_i = n_i / sum of n_i."""
        return self.progress / self.weight

    def mean_factor(self, cap: int, *, normalised: bool = False) -> float:
        """Factor that turns the sum of integers, times the step, into the weighted mean of updates.

        ``cap`` is the largest weight; ``normalised``: silos divided updates by |a_i| before sending (FedNova).
        """
        return cap / self.weight * (self.effective_progress if normalised else 1.0)


def together(tallies: Sequence[Tally]) -> Tally:
    """Merge tallies of one layout: sums on several grids of one commit, or several commits."""
    first = tallies[0]
    asked = {tally.question for tally in tallies if tally.evaluators}
    # Without the dropped evaluation of one tally, those of the others would pass for one of all silos.
    dropped = any(tally.evaluators and tally.evaluation is None for tally in tallies)
    found = [] if dropped or len(asked) > 1 else [each.evaluation for each in tallies if each.evaluation is not None]
    return Tally(
        count=sum(tally.count for tally in tallies),
        weight=sum(tally.weight for tally in tallies),
        progress=sum(tally.progress for tally in tallies),
        votes=np.sum([tally.votes for tally in tallies], axis=0),
        tensors=first.tensors,
        evaluators=sum(tally.evaluators for tally in tallies),
        evaluation=evaluations_together(found) if found else None,
        loss=total(tally.loss for tally in tallies),
        fault="; ".join(tally.fault for tally in tallies if tally.fault),
        holders=sum(tally.holders for tally in tallies),
        question=asked.pop() if len(asked) == 1 else ROUNDS,
    )


def evaluations_together(found: Sequence[Evaluation]) -> Evaluation:
    return Evaluation(
        total(each.loss for each in found),
        total(each.correct for each in found),
        sum(each.samples for each in found),
        sums={key: tuple(map(sum, zip(*(each.sums[key] for each in found), strict=True))) for key in found[0].sums},
    )


def total(numbers: Iterable[float | None]) -> float | None:
    found = list(numbers)
    return None if None in found else math.fsum(number for number in found if number is not None)


def build(own: Contribution, cap: int, form: HeaderForm | None = None) -> Slots:
    """Build one silo's header, int64 [form.slots]; `ValueError` if a number is out of range. The default form has no
    statistics. An evaluation with samples must have the sums of all statistics of the form.
    """
    if not 1 <= own.weight <= cap <= MAX_CAP:
        raise ValueError(f"weight {own.weight} lies outside 1..{cap}")
    if not (math.isfinite(own.progress) and own.progress > 0):
        raise ValueError(f"progress {own.progress} is not a positive number")
    form = form or header_form(len(own.exponents))
    slots = np.zeros(form.slots, dtype=np.int64)
    slots[_COUNT] = 1
    put(slots, _WEIGHT, own.weight)
    put(slots, _PROGRESS, fixed(own.weight * own.progress))
    _tell(slots, _TELL_TRAINING, _TRAINING, own.loss)
    if own.evaluation is not None:
        slots[_EVALUATED], slots[_HOLDERS] = 1, own.evaluation.samples > 0
        slots[_QUESTION] = QUESTIONS.index(own.question)
        slots[_SQUARE] = slots[_QUESTION] ** 2
        put(slots, _SAMPLES, own.evaluation.samples)
        if own.evaluation.samples:
            _tell(slots, _TELL_LOSS, _LOSS, own.evaluation.loss)
            _tell(slots, _TELL_CORRECT, _CORRECT, own.evaluation.correct)
            for statistic, place in form.places:
                slots[place] = sealable(statistic, own.evaluation.sums[statistic.key])
    for group, exponent in enumerate(_grouped(own.exponents, form.groups)):
        counter = group * BINS + exponent - MIN_EXPONENT
        slots[_VOTES + counter // _PER_SLOT] += 1 << (_COUNTER * (counter % _PER_SLOT))
    return slots


def read(slots: Slots, members: int, cap: int, form: HeaderForm, sender: str) -> Tally:
    """Read the sum of ``members`` headers from opened slots, int64 [at least form.slots]: chunk 0, or its beginning.
    Raise `ProtocolError` if the numbers cannot be a sum of so many headers.
    """
    flat = slots.reshape(-1)[: form.slots]
    count, weight, evaluators = int(flat[_COUNT]), get(flat, _WEIGHT), int(flat[_EVALUATED])
    if count != members or not 1 <= count <= MAX_COUNT:
        raise ProtocolError(sender, "count", f"{count} silos are in the sum, {members} are named")
    if not count <= weight <= count * cap:
        raise ProtocolError(sender, "weights", f"{count} silos weigh {weight}, each at most {cap}")
    progress = number(flat, _PROGRESS)
    if not progress > 0:
        raise ProtocolError(sender, "progress", f"{count} silos have a progress of {progress:g}")
    votes = _votes(flat, form)
    if votes is None or (votes.sum(axis=1) != count).any():
        raise ProtocolError(sender, "votes", f"not {count} votes for each of {form.groups} groups of tensors")
    samples = get(flat, _SAMPLES)
    if not 0 <= evaluators <= count or samples < 0 or (evaluators == 0 and samples):
        raise ProtocolError(sender, "evaluation", f"{evaluators} of {count} silos evaluated {samples} samples")
    evaluation, fault, question, holders = None, "", ROUNDS, int(flat[_HOLDERS])
    if evaluators:
        question, fault = _asked(flat, evaluators)
        sums = {one.key: summed(one, flat[place]) for one, place in form.places}
        found = _told(flat, _TELL_LOSS, _LOSS, holders), _told(flat, _TELL_CORRECT, _CORRECT, holders)
        evaluation = Evaluation(*found, samples, sums=sums)
        fault = fault or fault_of(evaluation, evaluators, form.statistics)
    loss = _told(flat, _TELL_TRAINING, _TRAINING, count)
    sound = None if fault else evaluation
    return Tally(count, weight, progress, votes, form.tensors, evaluators, sound, loss, fault, holders, question)


def next_exponents(tally: Tally, current: Sequence[int], spared: int = 0, headroom: int = 1) -> tuple[int, ...]:
    """Exponents that all silos use next, in the layout's order; a pure function of the sum, so all silos agree.

    The needed exponent is the largest vote after the ``spared`` largest votes. Those may be lies; the update of an
    honest outlier is clipped. All exponents stay while each is 0 to ``2 * headroom`` above the needed exponent: so many
    bits are idle. Otherwise all become ``headroom`` above it, because the next update may be larger. So grids change
    rarely, and most late updates have the grid of their commit. `ValueError` if ``spared`` or the number of exponents
    is wrong.
    """
    if not 0 <= spared < tally.count or len(current) != tally.tensors:
        told = f"{len(current)} exponents for {tally.tensors} tensors"
        raise ValueError(f"{spared} of {tally.count} votes spared, {told}")
    enough = np.cumsum(tally.votes, axis=1) >= tally.count - spared
    needed = np.argmax(enough, axis=1) + MIN_EXPONENT
    needs = [int(needed[tensor * len(needed) // tally.tensors]) for tensor in range(tally.tensors)]
    if all(0 <= exponent - need <= 2 * headroom for exponent, need in zip(current, needs, strict=True)):
        return tuple(current)
    return tuple(min(need + headroom, MAX_EXPONENT) for need in needs)


def votes_spared(voters: Mapping[str, int], colluding: int) -> int:
    """Number of votes that ``colluding`` silos may have cast together, and that must not change the exponents.

    A silo votes with each update, so the silos with most votes count. The liars are assumed to be a minority of the
    voters: nobody could tell a lying majority from an honest majority.
    """
    lying = min(colluding, (len(voters) - 1) // 2)
    return sum(sorted(voters.values(), reverse=True)[:lying])


def _tell(slots: Slots, teller: int, at: int, value: float | None) -> None:
    if value is not None:
        slots[teller] = 1
        put(slots, at, figure(value))


def _told(flat: NDArray[np.int64], teller: int, at: int, silos: int) -> float | None:
    return number(flat, at) if int(flat[teller]) == silos else None


def _grouped(exponents: Sequence[int], groups: int) -> list[int]:
    largest = [MIN_EXPONENT] * groups
    for tensor, exponent in enumerate(exponents):
        if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
            raise ValueError(f"exponent {exponent} lies outside {MIN_EXPONENT}..{MAX_EXPONENT}")
        group = tensor * groups // len(exponents)
        largest[group] = max(largest[group], exponent)
    return largest


def _votes(flat: NDArray[np.int64], form: HeaderForm) -> NDArray[np.int64] | None:
    """Counters, int64 [groups, BINS]; None if the slots are no sums of counters."""
    packed = flat[_VOTES : form.slots - form.sums]
    if (packed < 0).any() or (packed >> (_COUNTER * _PER_SLOT)).any():
        return None
    shifts = np.arange(_PER_SLOT, dtype=np.int64) * _COUNTER
    counters = (packed[:, np.newaxis] >> shifts) & ((1 << _COUNTER) - 1)
    return counters.reshape(-1)[: form.groups * BINS].reshape(form.groups, BINS)


def _asked(flat: NDArray[np.int64], evaluators: int) -> tuple[Question, str]:
    asked, rest = divmod(int(flat[_QUESTION]), evaluators)
    if rest or not 0 <= asked < len(QUESTIONS) or int(flat[_SQUARE]) != evaluators * asked**2:
        return ROUNDS, "silos evaluated different models, or on different splits"
    if not 0 <= int(flat[_HOLDERS]) <= evaluators:
        return ROUNDS, f"{int(flat[_HOLDERS])} of {evaluators} silos have samples"
    return QUESTIONS[asked], ""
