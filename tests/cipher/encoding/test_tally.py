"""Headers add up to counts, weights, votes and scores; what cannot be a sum of headers is refused."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.packing import MAX_CAP, SLOTS, Slots
from fedsync.cipher.encoding.sums import MAX_CELL
from fedsync.cipher.encoding.tally import (
    MOST_SUMS,
    QUESTIONS,
    Contribution,
    HeaderForm,
    Tally,
    build,
    next_exponents,
    read,
    together,
    votes_spared,
)
from fedsync.common.errors import ProtocolError
from fedsync.core.orders import Evaluation
from fedsync.evaluation.metrics.metric_types import Statistic, statistics_of
from fedsync.evaluation.metrics.moments import BlockSums
from fedsync.evaluation.metrics.named import classification, regression, segmentation
from fedsync.evaluation.metrics.score_histograms import ScoreCounts

CAP = 4096
MAX_GROUPS = HeaderForm(10**6).groups
SCORES, ERRORS = ScoreCounts(resolution=16), BlockSums("errors", 2)


def tally_of(*contributions: Contribution, cap: int = CAP, statistics: tuple[Statistic, ...] = ()) -> Tally:
    total = sum(build(one, cap, HeaderForm(len(one.exponents), statistics)) for one in contributions)
    form = HeaderForm(len(contributions[0].exponents), statistics)
    return read(np.asarray(total), len(contributions), cap, form, "server")


def test_sums_by_hand() -> None:
    tally = tally_of(
        Contribution(100, (0, -3), 2.5, Evaluation(12.5, 30.0, 40)),
        Contribution(300, (0, -4), 1.5),
        Contribution(4096, (1, -4), 1.0, Evaluation(-2.25, 5.5, 10)),
    )
    assert (tally.count, tally.weight) == (3, 4496)
    assert tally.progress == 100 * 2.5 + 300 * 1.5 + 4096
    assert (tally.evaluators, tally.evaluation) == (2, Evaluation(10.25, 35.5, 50))
    votes = [[(int(e) - 40, int(n)) for e, n in enumerate(row) if n] for row in tally.votes]
    assert votes == [[(0, 2), (1, 1)], [(-4, 2), (-3, 1)]]
    assert tally.mean_factor(CAP) == 4096 / 4496
    assert tally.mean_factor(CAP, normalised=True) == pytest.approx(4096 / 4496 * 4796 / 4496)


@pytest.mark.parametrize(("losses", "found"), [((0.5, 0.0), 0.5), ((0.5, None), None), ((None, None), None)])
def test_a_figure_that_one_silo_does_not_tell_is_unknown(losses: Sequence[float | None], found: float | None) -> None:
    """A mean of the others would be that of few, or of one."""
    training = [Contribution(1, (0,), loss=loss) for loss in losses]
    assert tally_of(*training).loss == found
    for name in ("loss", "correct"):
        known = [replace(Evaluation(1.0, 2.0, 4), **{name: loss}) for loss in losses]  # type: ignore[arg-type]
        nothing = Contribution(1, (0,), 1.0, Evaluation(0.0, 0.0, 0))
        tally = tally_of(*(Contribution(1, (0,), 1.0, each) for each in known), nothing)
        assert tally.evaluation == replace(Evaluation(2.0, 4.0, 8), **{name: found})  # type: ignore[arg-type]
        assert together([tally, tally]).evaluation is not None


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, MAX_CAP), st.floats(1e-3, 1e4)), min_size=1, max_size=200))
def test_large_weights_add_exactly(silos: list[tuple[int, float]]) -> None:
    tally = tally_of(*(Contribution(weight, (0,), progress) for weight, progress in silos), cap=MAX_CAP)
    assert tally.weight == sum(weight for weight, _ in silos)
    assert tally.progress == pytest.approx(sum(w * p for w, p in silos), rel=1e-9, abs=1e-3)


def test_slots_stay_small_for_every_suite() -> None:
    """200 times the largest slot is below 2^33, of 47 bits that a sum may have."""
    slots = build(Contribution(MAX_CAP, (23,) * 300, 1e6, Evaluation(-1e12, 1e9, 10**12)), MAX_CAP)
    assert len(slots) == HeaderForm(300).slots == SLOTS
    assert 200 * np.abs(slots).max() < 2**33


@pytest.mark.parametrize("tensors", [1, 7, MAX_GROUPS, MAX_GROUPS + 1, 700])
def test_many_tensors_share_votes_by_neighbourhood(tensors: int) -> None:
    exponents = tuple(np.random.default_rng(tensors).integers(-40, 24, tensors).tolist())
    tally = tally_of(Contribution(1, exponents))
    chosen = next_exponents(tally, (*exponents[:-1], -41))
    groups = min(tensors, MAX_GROUPS)
    for tensor in range(tensors):
        group = [exponents[t] for t in range(tensors) if t * groups // tensors == tensor * groups // tensors]
        assert chosen[tensor] == min(max(group) + 1, 23)
    assert next_exponents(tally, chosen) == chosen


@pytest.mark.parametrize(
    ("needed", "current", "expected"),
    [
        ([-5, -6, -5], -5, -5),  # just enough
        ([-7, -9, -7], -5, -5),  # two bits idle: stays, so grids change rarely
        ([-8, -9, -8], -5, -7),  # three bits idle: one more than needed
        ([-5, -3, -5], -5, -2),  # too small: one more than needed
        ([23, 0, 0], 0, 23),  # never beyond the largest
        ([-40, -40, -40], 0, -39),
    ],
)
def test_next_exponents_by_hand(needed: list[int], current: int, expected: int) -> None:
    assert next_exponents(tally_of(*(Contribution(1, (e,)) for e in needed)), (current,)) == (expected,)


def test_exponents_change_together() -> None:
    """The third needs a larger one: the second gets its headroom, too, and the first loses a bit."""
    assert next_exponents(tally_of(Contribution(1, (-7, -5, -2))), (-5, -5, -3)) == (-6, -4, -1)


@pytest.mark.parametrize(
    ("needed", "spared", "expected"),
    [([-9, -7, -5], 1, -6), ([-9, -7, -5], 2, -8), ([-9, -5, -5], 1, -4), ([-9], 0, -8)],
)
def test_the_largest_votes_are_spared(needed: list[int], spared: int, expected: int) -> None:
    tally = tally_of(*(Contribution(1, (e,)) for e in needed))
    assert next_exponents(tally, (10,), spared) == (expected,)


def test_somebody_s_vote_must_count() -> None:
    with pytest.raises(ValueError, match="2 of 2 votes spared"):
        next_exponents(tally_of(Contribution(1, (0,)), Contribution(1, (1,))), (0,), spared=2)


@pytest.mark.parametrize(
    ("voters", "colluding", "expected"),
    [
        ({"a": 1, "b": 1}, 1, 0),
        ({"a": 1, "b": 1, "c": 1}, 1, 1),
        ({"a": 1, "b": 9, "c": 2}, 1, 9),  # a fast silo votes often
        ({"a": 1, "b": 9, "c": 2, "d": 3}, 2, 9),  # of four one may lie
        ({"a": 1, "b": 9, "c": 2, "d": 3, "e": 1}, 2, 12),
        ({"a": 1, "b": 1, "c": 1}, 5, 1),
    ],
)
def test_votes_that_colluding_silos_may_have_cast(voters: dict[str, int], colluding: int, expected: int) -> None:
    assert votes_spared(voters, colluding) == expected


def changed(slot: int, by: int) -> Slots:
    slots = build(Contribution(10, (0, 0)), CAP) + build(Contribution(20, (1, 0)), CAP)
    slots[slot] += by
    return slots


@pytest.mark.parametrize(
    ("slot", "by", "check"),
    [
        (0, 1, "count"),
        (0, -2, "count"),
        (2, -29, "weights"),  # less than one each
        (2, 2 * CAP, "weights"),
        (5, -1, "weights"),
        (9, -1, "progress"),
        (1, 3, "evaluation"),
        (18, 1, "evaluation"),
        (18, -1, "evaluation"),
        (32, 1, "votes"),
        (32 + 10, -1, "votes"),
        (32 + 10, 2**40, "votes"),
    ],
)
def test_what_is_no_sum_of_headers_is_refused(slot: int, by: int, check: str) -> None:
    with pytest.raises(ProtocolError) as caught:
        read(changed(slot, by), 2, CAP, HeaderForm(2), "server")
    assert (caught.value.sender, caught.value.check) == ("server", check)


@pytest.mark.parametrize("members", [1, 3])
def test_another_number_of_members_is_refused(members: int) -> None:
    tally = read(changed(0, 0), 2, CAP, HeaderForm(2), "server")
    assert (tally.weight, tally.evaluators, tally.evaluation) == (30, 0, None), "unchanged it is read"
    with pytest.raises(ProtocolError, match="count"):
        read(changed(0, 0), members, CAP, HeaderForm(2), "server")


@pytest.mark.parametrize(
    "change",
    [
        {"weight": 0},
        {"weight": CAP + 1},
        {"progress": 0.0},
        {"progress": float("nan")},
        {"progress": 1e300},
        {"evaluation": Evaluation(float("inf"), 0, 1)},
        {"exponents": (24,)},
        {"exponents": (-41,)},
    ],
)
def test_numbers_that_cannot_be_sent_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        build(replace(Contribution(1, (0,)), **change), CAP)  # type: ignore[arg-type]  # one change at a time


def found(samples: int, seed: int = 0, *, scale: float = 1.0) -> Evaluation:
    """What a silo finds on so many samples: a histogram of their scores, and sums of their errors."""
    rng = np.random.default_rng(seed)
    scores = np.bincount(rng.integers(0, SCORES.size, samples), minlength=SCORES.size).astype(np.float64)
    blocks = np.zeros((16, 2))
    np.add.at(blocks, (np.arange(samples) % 16, 0), 1.0)
    np.add.at(blocks, (np.arange(samples) % 16, 1), rng.normal(size=samples) * scale)
    sums = {SCORES.key: tuple(scores.tolist()), ERRORS.key: tuple(blocks.reshape(-1).tolist())}
    return Evaluation(1.5 * samples, samples / 2, samples, sums=sums)


STATISTICS: tuple[Statistic, ...] = (ERRORS, SCORES)


@pytest.mark.parametrize("tensors", [1, 62, 300])
def test_sums_of_statistics_add_exactly(tensors: int) -> None:
    own = [found(17 + index, index) for index in range(5)]
    tally = tally_of(*(Contribution(1, (0,) * tensors, 1.0, each) for each in own), statistics=STATISTICS)
    assert tally.evaluation is not None and tally.evaluators == 5 and not tally.fault
    for one in STATISTICS:
        expected = [math.fsum(values) for values in zip(*(each.sums[one.key] for each in own), strict=True)]
        np.testing.assert_allclose(tally.evaluation.sums[one.key], expected, rtol=1e-15, atol=5 * 2.0**-64)
    whole = HeaderForm(tensors, STATISTICS)
    assert whole.sums == SCORES.size + 6 * ERRORS.size and whole.slots <= SLOTS


@pytest.mark.parametrize("scale", [1e-12, 1e-3, 1e3, 1e18])
def test_sums_keep_their_digits_in_whatever_unit_they_are(scale: float) -> None:
    own = found(50, 3, scale=scale)
    tally = tally_of(Contribution(1, (0,), 1.0, own), statistics=STATISTICS)
    assert tally.evaluation is not None
    np.testing.assert_allclose(tally.evaluation.sums[ERRORS.key], own.sums[ERRORS.key], rtol=1e-6)


def test_sums_larger_than_a_header_holds_are_the_largest_that_it_does() -> None:
    tally = tally_of(Contribution(1, (0,), 1.0, found(50, 3, scale=1e40)), statistics=STATISTICS)
    assert tally.evaluation is not None
    assert max(map(abs, tally.evaluation.sums[ERRORS.key])) == pytest.approx(2.0**79, rel=1e-6)


def test_whoever_found_nothing_adds_nothing() -> None:
    own, nothing = found(20), Evaluation(0.0, 0.0, 0)
    contributions = [Contribution(1, (0,), 1.0, each) for each in (own, nothing)]
    tally = tally_of(*contributions, statistics=STATISTICS)
    assert tally.evaluation is not None and tally.evaluators == 2
    assert tally.evaluation.sums[SCORES.key] == own.sums[SCORES.key]


@pytest.mark.parametrize("asked", [(0, 1), (0, 2), (1, 3), (0, 1, 2)])
def test_silos_that_answer_different_questions_have_no_figures_together(asked: tuple[int, ...]) -> None:
    """Also where the mean of their questions' numbers is a question's number."""
    own = [Contribution(1, (0,), 1.0, Evaluation(2.0, 3.0, 4), question=QUESTIONS[each]) for each in asked]
    tally = tally_of(*own)
    assert tally.evaluation is None and "different" in tally.fault
    assert tally_of(*own[:1] * len(own)).question == own[0].question


def test_sums_of_several_tallies_are_one() -> None:
    tallies = [tally_of(Contribution(1, (0,), 1.0, found(n)), statistics=STATISTICS) for n in (4, 9)]
    sums = together(tallies).evaluation
    assert sums is not None and sum(sums.sums[SCORES.key]) == sums.samples == 13


@pytest.mark.parametrize("count", [-1.0, 0.5, MAX_CELL + 1.0, float("nan")])
def test_counts_that_cannot_be_sent_are_refused(count: float) -> None:
    own = found(20)
    sums = {**own.sums, SCORES.key: (count, *own.sums[SCORES.key][1:])}
    with pytest.raises(ValueError, match="counts that are not whole"):
        build(Contribution(1, (0,), 1.0, replace(own, sums=sums)), CAP, HeaderForm(1, STATISTICS))
    assert 200 * MAX_CELL < 2**33, "as all slots, of 47 bits that a sum may have"


def spoiled(slot: int, by: int, statistic: int) -> Tally:
    """Of two silos, one of which adds this to the slot of a statistic."""
    form = HeaderForm(2, STATISTICS)
    slots = sum(build(Contribution(1, (0, 0), 1.0, found(30, seed)), CAP, form) for seed in range(2))
    _, place = list(form.places)[statistic]
    slots[place.start + slot] += by  # type: ignore[index]  # no sum of nothing
    return read(np.asarray(slots), 2, CAP, form, "server")


@pytest.mark.parametrize(
    ("slot", "by", "statistic", "fault"),
    [
        (3, -40, 1, "larger than"),  # a negative count
        (3, 2**40, 1, "larger than"),
        (3, 1, 1, "samples"),  # a sample that nobody has
        (2, 1, 0, "none"),  # 2^-16 of a sample
        (6 + 5, 2**40, 0, "larger than"),
    ],
)
def test_impossible_figures_bring_nothing_and_the_rest_counts(slot: int, by: int, statistic: int, fault: str) -> None:
    tally = spoiled(slot, by, statistic)
    assert fault in tally.fault and tally.evaluation is None
    assert (tally.count, tally.weight, tally.votes.sum()) == (2, 2, 4)


def test_figures_of_some_silos_do_not_pass_for_those_of_all_where_the_others_were_dropped() -> None:
    """Two sums of one version: one silo on an older grid, and two of whose figures one is impossible."""
    one = tally_of(Contribution(1, (0, 0), 1.0, found(30)), statistics=STATISTICS)
    both = together([one, spoiled(3, 2**40, 1)])
    assert (both.count, both.evaluators, both.evaluation) == (3, 3, None) and "are larger than 2 silos" in both.fault


def test_statistics_leave_room_for_votes() -> None:
    """Three quarters of a chunk for statistics, and a vote for each of 62 groups of tensors."""
    form = HeaderForm(1000, (ScoreCounts(resolution=MOST_SUMS // 4),))
    assert (form.sums, form.groups, form.slots) == (MOST_SUMS, 62, SLOTS)
    assert HeaderForm(3, form.statistics).slots == 32 + 3 * 16 + MOST_SUMS


@pytest.mark.parametrize("classes", [2, 3, 10, 32, 33, 1000])
def test_what_tasks_measure_without_asking_has_room(classes: int) -> None:
    """Else encrypted runs of many classes, which need nobody's consent, would be refused."""
    for metrics in (classification(classes), regression(), segmentation()):
        assert HeaderForm(1, tuple(statistics_of(metrics).values())).sums <= MOST_SUMS
