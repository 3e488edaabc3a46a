"""Shares: enough of them give the secret, fewer say nothing."""

from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedsync.cipher.masking.annex import PRIME, SECRET_BYTES, join, split


def _number(value: int, size: int = SECRET_BYTES) -> bytes:
    return value.to_bytes(size, "little")


def test_shares_are_values_of_a_polynomial_as_computed_by_hand() -> None:
    """f(x) = 5 + 3 x + 2 x^2: 10, 19, 32, 49 at 1 to 4."""
    drawn: Iterator[int] = iter([3, 2])
    shares = split(_number(5), 3, range(1, 5), lambda below: next(drawn))
    assert shares == {x: _number(value, 33) for x, value in {1: 10, 2: 19, 3: 32, 4: 49}.items()}
    # At 0, from 1, 2 and 4: 10 * 8/3 - 19 * 2 + 49 / 3 = (80 - 114 + 49) / 3 = 5.
    assert join({x: shares[x] for x in (1, 2, 4)}) == _number(5)


def test_coefficients_are_drawn_from_all_numbers_below_the_prime() -> None:
    """From fewer, one share and a guess of the rest would give the secret."""
    slopes = [int.from_bytes(split(bytes(32), 2, (1,))[1], "little") for _ in range(20)]
    assert len(set(slopes)) == 20 and max(slopes) > PRIME // 2**10


def test_the_prime_is_one() -> None:
    """Fermat to twelve bases; composites that pass all of them are unknown at this size."""
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37))


@settings(max_examples=40, deadline=None)
@given(secret=st.binary(min_size=32, max_size=32), data=st.data())
def test_any_subset_that_is_large_enough_gives_the_secret(secret: bytes, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 12))
    threshold = data.draw(st.integers(1, count))
    shares = split(secret, threshold, range(1, count + 1))
    chosen = data.draw(st.permutations(sorted(shares)))[: data.draw(st.integers(threshold, count))]
    assert join({holder: shares[holder] for holder in chosen}) == secret


@settings(max_examples=40, deadline=None)
@given(one=st.binary(min_size=32, max_size=32), other=st.binary(min_size=32, max_size=32))
def test_one_share_too_few_fits_every_secret(one: bytes, other: bytes) -> None:
    """For each secret there is a polynomial through the shares: here the coefficients that make it are computed."""
    shares = split(one, 3, (1, 2, 3))
    f1, f2 = (int.from_bytes(shares[x], "little") for x in (1, 2))
    s = int.from_bytes(other, "little")
    # a + b = f1 - s, 2 a + 4 b = f2 - s
    b = (f2 - s - 2 * (f1 - s)) * pow(2, -1, PRIME) % PRIME
    drawn = iter([(f1 - s - b) % PRIME, b])
    again = split(other, 3, (1, 2), lambda below: next(drawn))
    assert again == {x: shares[x] for x in (1, 2)}


@pytest.mark.parametrize(("secret", "threshold", "holder"), [(b"short", 2, 1), (bytes(32), 0, 1), (bytes(32), 2, 0)])
def test_what_cannot_be_shared_is_refused(secret: bytes, threshold: int, holder: int) -> None:
    with pytest.raises(ValueError, match="holders from 1 on"):
        split(secret, threshold, [holder])


def test_no_shares_are_of_no_secret() -> None:
    with pytest.raises(ValueError, match="no secret"):
        join({})
