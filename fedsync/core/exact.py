"""Sums of floats that depend on nothing but what is in them: not on order, and not on what was taken out again."""

from __future__ import annotations

from dataclasses import dataclass

_UNIT_BITS = 1074
"""Every finite float is a multiple of two to the power of minus this."""


@dataclass(slots=True)
class ExactSum:
    """A sum of floats without any rounding, so that what is taken out of it leaves no trace.

    A running sum of floats would not do: a number far larger than the others swallows them, and takes them along when
    it goes. A whole number of the smallest unit that floats have is exact, and takes no longer for more silos.
    """

    units: int = 0

    def add(self, value: float, times: int) -> None:
        """Put a finite value in, or take it out again with ``times=-1``."""
        numerator, denominator = value.as_integer_ratio()
        self.units += times * (numerator << (_UNIT_BITS + 1 - denominator.bit_length()))

    @property
    def value(self) -> float:
        """The float nearest to the sum: what `math.fsum` makes of the same values."""
        return self.units / (1 << _UNIT_BITS)
