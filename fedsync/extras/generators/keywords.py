"""Synthetic spoken words: sequences with moving formants."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.common.rng import Stream, generator
from fedsync.extras.readers.samples import DataShape, Samples, Source
from fedsync.policies.schema import NonNegative, PositiveInt, Several, register

_FORMANTS = 3
_TURNS = 4
_WIDTH = 0.06
_SPEAKERS = 40


@register("keywords")
@dataclass(frozen=True, slots=True)
class KeywordsSource(Source):
    """Synthetic spoken words, as sequences of ``frames`` of ``bands`` features.

    Sequences like log-mel features, float32 [n, frames, bands], of 40 speakers. A word is three formants; each follows
    a path with four corners over the bands. A speaker shifts all formants and changes their width. A sample has its own
    start, end, uneven pace and noise.
    """

    samples: PositiveInt = 4000
    """Number of sequences, over all silos; the words alternate."""

    words: Several = 10
    """Number of words, which are the classes."""

    frames: Several = 32
    """Number of frames in a sequence."""

    bands: Several = 20
    """Number of features of a frame."""

    noise: NonNegative = 0.3
    """Standard deviation of the noise; the peak of a formant is 1."""

    def shape(self) -> DataShape:
        return DataShape((self.frames, self.bands), self.words)

    def read(self) -> tuple[Samples, Samples | None]:
        rng = generator(0, Stream.DATA, "keywords")
        corners = rng.uniform(0.1, 0.9, (self.words, _FORMANTS, _TURNS))
        speakers = np.stack([rng.normal(0, 0.04, _SPEAKERS), rng.uniform(0.8, 1.3, _SPEAKERS)])
        labels = np.arange(self.samples) % self.words
        owners = rng.integers(_SPEAKERS, size=self.samples)
        height, breadth = speakers[:, owners]
        time, aloud = self._pace(rng)
        bands = np.linspace(0, 1, self.bands)
        sounds = np.zeros((self.samples, self.frames, self.bands))
        for formant in range(_FORMANTS):
            middle = _along(corners[labels, formant], time) + height[:, None]
            apart = (bands - middle[:, :, None]) / (_WIDTH * breadth[:, None, None])
            sounds += np.exp(-(apart**2) / 2)
        sounds = sounds * aloud[:, :, None] + rng.normal(0, self.noise, sounds.shape)
        return Samples(sounds.astype(np.float32), labels.astype(np.int64), owners.astype(np.int64)), None

    def _pace(self, rng: np.random.Generator) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """Position of each frame in its word, 0..1, and 1 while the word is spoken, both [samples, frames]."""
        begin = rng.uniform(0, 0.25, (self.samples, 1))
        end = rng.uniform(0.75, 1, (self.samples, 1))
        time = (np.linspace(0, 1, self.frames) - begin) / (end - begin)
        said = ((time >= 0) & (time <= 1)).astype(np.float64)
        return np.clip(time, 0, 1) ** rng.uniform(0.7, 1.4, (self.samples, 1)), said


def _along(corners: NDArray[np.float64], time: NDArray[np.float64]) -> NDArray[np.float64]:
    """Height of a path with evenly spaced corners, [n, corners], at times in 0..1, [n, frames]."""
    place = time * (_TURNS - 1)
    left = np.minimum(place.astype(np.int64), _TURNS - 2)
    share = place - left
    here, there = np.take_along_axis(corners, left, 1), np.take_along_axis(corners, left + 1, 1)
    return here * (1 - share) + there * share
