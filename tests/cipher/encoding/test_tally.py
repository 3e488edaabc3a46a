"""Headers add up to counts, weights, votes and scores; what cannot be a sum of headers is refused."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.encoding.packing import MAX_CAP, SLOTS, Slots
from fedsync.cipher.encoding.tally import (
    MAX_GROUPS,
    Contribution,
    Tally,
    build,
    header_slots,
    next_exponents,
    read,
    votes_spared,
)
from fedsync.core.errors import ProtocolError
from fedsync.core.orders import Evaluation

CAP = 4096


def tally_of(*contributions: Contribution, cap: int = CAP) -> Tally:
    total = sum(build(one, cap) for one in contributions)
    return read(np.asarray(total), len(contributions), cap, len(contributions[0].exponents), "server")


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


def test_nobody_evaluated() -> None:
    tally = tally_of(Contribution(1, (0,)))
    assert (tally.evaluators, tally.evaluation) == (0, None)


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(1, MAX_CAP), st.floats(1e-3, 1e4)), min_size=1, max_size=200))
def test_large_weights_add_exactly(silos: list[tuple[int, float]]) -> None:
    tally = tally_of(*(Contribution(weight, (0,), progress) for weight, progress in silos), cap=MAX_CAP)
    assert tally.weight == sum(weight for weight, _ in silos)
    assert tally.progress == pytest.approx(sum(w * p for w, p in silos), rel=1e-9, abs=1e-3)


def test_slots_stay_small_for_every_suite() -> None:
    """200 times the largest slot is below 2^33, of 47 bits that a sum may have."""
    slots = build(Contribution(MAX_CAP, (23,) * 300, 1e6, Evaluation(-1e12, 1e9, 10**12)), MAX_CAP)
    assert len(slots) == header_slots(300) == SLOTS
    assert 200 * np.abs(slots).max() < 2**33


@pytest.mark.parametrize("tensors", [1, 7, MAX_GROUPS, MAX_GROUPS + 1, 700])
def test_many_tensors_share_votes_by_neighbourhood(tensors: int) -> None:
    exponents = tuple(np.random.default_rng(tensors).integers(-40, 24, tensors).tolist())
    tally = tally_of(Contribution(1, exponents))
    chosen = next_exponents(tally, exponents)
    groups = min(tensors, MAX_GROUPS)
    for tensor in range(tensors):
        group = [exponents[t] for t in range(tensors) if t * groups // tensors == tensor * groups // tensors]
        stays = max(group) <= exponents[tensor] <= max(group) + 1
        assert chosen[tensor] == (exponents[tensor] if stays else min(max(group) + 1, 23))


@pytest.mark.parametrize(
    ("needed", "current", "expected"),
    [
        ([-5, -6, -5], -5, -5),  # just enough
        ([-6, -6, -6], -5, -5),  # one bit idle: stays, so it does not flap
        ([-7, -9, -7], -5, -6),  # two bits idle: one more than needed
        ([-5, -3, -5], -5, -2),  # too small: one more than needed
        ([23, 0, 0], 0, 23),  # never beyond the largest
        ([-40, -40, -40], 0, -39),
    ],
)
def test_next_exponents_by_hand(needed: list[int], current: int, expected: int) -> None:
    assert next_exponents(tally_of(*(Contribution(1, (e,)) for e in needed)), (current,)) == (expected,)


def test_one_bogus_vote_of_many_changes_nothing() -> None:
    tally = tally_of(*(Contribution(1, (e,)) for e in (-5,) * 22 + (8,)))
    assert next_exponents(tally, (-5,), spared=1) == (-5,)
    assert next_exponents(tally, (-5,)) == (9,), "and without that rule it makes the step 16,384 times as large"


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


def test_exponents_settle() -> None:
    """The same needs again and again change nothing after the first time."""
    tally = tally_of(*(Contribution(1, (e, e - 7)) for e in (-3, -6, -4)))
    first = next_exponents(tally, (5, 5))
    assert next_exponents(tally, first) == first


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
        read(changed(slot, by), 2, CAP, 2, "server")
    assert (caught.value.sender, caught.value.check) == ("server", check)


def test_unchanged_it_is_read() -> None:
    assert read(changed(0, 0), 2, CAP, 2, "server").weight == 30


@pytest.mark.parametrize("members", [1, 3])
def test_another_number_of_members_is_refused(members: int) -> None:
    with pytest.raises(ProtocolError, match="count"):
        read(changed(0, 0), members, CAP, 2, "server")


def test_random_slots_are_refused() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        with pytest.raises(ProtocolError):
            read(rng.integers(-(2**63), 2**63 - 1, SLOTS), 2, CAP, 2, "server")


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
