"""Seeds are a function of (run, use, silo, round), and of nothing else."""

import itertools
import zlib

import numpy as np

from fedsync.common.rng import Stream, derive_seed, generator


def test_the_generator_is_the_one_that_the_design_names() -> None:
    expected = np.random.default_rng([7, 3, zlib.crc32(b"clinic-a"), 5]).random(4)
    np.testing.assert_array_equal(generator(7, Stream.JITTER, "clinic-a", 5).random(4), expected)


def test_streams_keep_their_numbers() -> None:
    """Renumbering one would change every run that was ever recorded."""
    first_six = {"ORDER": 1, "SAMPLER": 2, "JITTER": 3, "PARTITION": 4, "SPLIT": 5, "MODEL": 6}
    assert {name: int(Stream[name]) for name in first_six} == first_six
    assert len({int(stream) for stream in Stream}) == len(Stream)


def test_every_coordinate_gives_another_seed() -> None:
    coordinates = list(itertools.product([0, 1, 2**40], Stream, ["", "a", "b"], [0, 1, 2]))
    seeds = {derive_seed(*coordinate) for coordinate in coordinates}
    assert len(seeds) == len(coordinates)
    assert all(0 <= seed < 2**63 for seed in seeds)
