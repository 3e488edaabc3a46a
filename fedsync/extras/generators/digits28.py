"""Handwritten digits of 28 x 28 without a download: scikit-learn's digits, enlarged and distorted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fedsync.common.errors import not_installed
from fedsync.common.rng import Stream, generator
from fedsync.extras.readers.samples import DataShape, Samples, Source
from fedsync.policies.schema import PositiveInt, register

SIDE = 28
_TEST_SHARE = 0.2
_AT_A_TIME = 1000
_ROTATION = 0.25
_SHEAR = 0.15
_SCALE = 0.15
_SHIFT = 2.0
_BEND = 34.0
_SMOOTH = 5.0


@register("digits28")
@dataclass(frozen=True, slots=True)
class Digits28Source(Source):
    """Scikit-learn's digits, enlarged to 28 x 28 and randomly distorted: any number of images, without a download.

    Grey images, uint8 [n, 1, 28, 28], of the digits 0 to 9 in about equal numbers. Every sample is one of
    scikit-learn's 1,797 digits of 8 x 8. It is enlarged with cubic splines, rotated by up to 14 degrees, sheared,
    scaled, shifted by up to 2 pixels, and bent by a smooth random field. A fifth of the originals is reserved for test
    samples and never used for training samples.

    Source: elastic distortions: Simard, Steinkraus and Platt 2003.
    """

    libraries = ("scipy.ndimage", "sklearn.datasets")
    samples: PositiveInt = 6000
    """Number of training images, over all silos."""

    test_samples: PositiveInt = 1000
    """Number of test images."""

    def shape(self) -> DataShape:
        return DataShape((1, SIDE, SIDE), 10)

    def read(self) -> tuple[Samples, Samples | None]:
        images, labels = _originals()
        rng = generator(0, Stream.DATA, "digits28")
        order = rng.permutation(len(labels))
        cut = round(_TEST_SHARE * len(labels))
        return (
            _variants(images, labels, order[cut:], self.samples, rng),
            _variants(images, labels, order[:cut], self.test_samples, rng),
        )


def _originals() -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """All digits in 0..1, float64 [1797, 28, 28], and their classes, int64 [1797]."""
    try:
        from scipy import ndimage
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise not_installed("task.data.kind", "scikit-learn, which ships the digits,", "sim") from error
    pixels, labels = load_digits(return_X_y=True)
    # A margin of one small pixel, so that rotation keeps the digit inside the image.
    small = np.pad(pixels.reshape(-1, 8, 8) / 16, ((0, 0), (1, 1), (1, 1)))
    # Spline interpolation is linear: one interpolation of the unit vectors serves all images.
    spline = ndimage.zoom(np.eye(10), (SIDE / 10, 1), order=3, grid_mode=True, mode="grid-constant")
    return np.clip(spline @ small @ spline.T, 0, 1), labels.astype(np.int64)


def _variants(
    images: NDArray[np.float64],
    labels: NDArray[np.int64],
    chosen: NDArray[np.int64],
    count: int,
    rng: np.random.Generator,
) -> Samples:
    """Make ``count`` variants of the originals ``chosen``; counts per original differ by at most one."""
    rows = np.resize(chosen, count)
    pieces = [_bend(images[rows[start : start + _AT_A_TIME]], rng) for start in range(0, count, _AT_A_TIME)]
    return Samples(np.concatenate(pieces)[:, None], labels[rows])


def _bend(images: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Distort each image by its own affine and elastic transformation, uint8 [n, 28, 28]."""
    from scipy import ndimage

    count = len(images)
    angle, shear = rng.uniform(-_ROTATION, _ROTATION, count), rng.uniform(-_SHEAR, _SHEAR, count)
    scale = rng.uniform(1 - _SCALE, 1 + _SCALE, (2, count))
    shift = rng.uniform(-_SHIFT, _SHIFT, (2, count, 1, 1))
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    slant = np.array([[np.ones(count), shear], [np.zeros(count), np.ones(count)]])
    matrix = np.einsum("ijn,jkn,kn->nik", turn, slant, scale)
    centre = (SIDE - 1) / 2
    grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij")) - centre
    places = np.einsum("nik,kyx->inyx", matrix, grid) + centre + shift
    field = rng.uniform(-1, 1, (2, count, SIDE, SIDE))
    places += _BEND * ndimage.gaussian_filter(field, (0, 0, _SMOOTH, _SMOOTH), mode="constant") / 2
    which = np.broadcast_to(np.arange(count)[:, None, None], places.shape[1:])
    bent = ndimage.map_coordinates(images, np.stack([which, *places]), order=1, mode="constant")
    return np.asarray(np.rint(np.clip(bent, 0, 1) * 255), dtype=np.uint8)
