"""Steps that are cautious and go by layers' widths: by hand, in parts as in whole, and without leaps."""

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from fedsync.model.cautious_adam import KEPT, LEAST_SHARE, Cautious, Tensor, tensors_of
from fedsync.model.chunked_arrays import SPAN_BYTES, ArrayKeeper
from fedsync.model.layout import Layout
from fedsync.model.server_optimizer import Moments
from fedsync.policies.optimize.optimizer_policies import CautiousAdam
from tests.model.stores import vector
from tests.model.test_server_optimizer import walk

MEMORY = ArrayKeeper()
LAYOUT = Layout(
    ("first.weight", "first.bias", "norm.running_mean", "last.weight", "last.bias"),
    ((6, 1, 5, 5), (6,), (6,), (10, 150), (10,)),
)


def cautious(*tensors: Tensor, beta_1: float = 0.5, beta_2: float = 0.75, tau: float = 1.0) -> Cautious:
    return Cautious("adam", 1.0, beta_1, beta_2, tau, tensors=tensors or (Tensor(2**31, 1.0),))


def test_scales_go_by_inputs_and_depth() -> None:
    """5 x 5 and 150 inputs, two layers; a bias has those of its layer, and a norm's mean is no weight."""
    first, last = 1 / (2 * 5), 1 / (2 * math.sqrt(150))
    assert [each.scale for each in tensors_of(LAYOUT)] == pytest.approx([first, first, None, last, last])
    assert [each.stop for each in tensors_of(LAYOUT)] == [150, 156, 162, 1662, 1672]


def test_wide_layers_step_less_but_not_the_first_whose_inputs_are_data() -> None:
    layout = Layout(("in", "wide", "bias", "out"), ((1152, 2048), (100, 1152), (100,), (10, 512)))
    wide = 1 / (3 * math.sqrt(1152) * 1.5)
    assert [each.scale for each in tensors_of(layout)] == pytest.approx(
        [1 / (3 * math.sqrt(2048)), wide, wide, 1 / (3 * math.sqrt(512))]
    )


def test_a_model_of_single_numbers_has_a_scale_too() -> None:
    assert tensors_of(Layout(("a", "b"), ((), (3,)))) == (Tensor(1, 1.0), Tensor(4, 1.0))


def test_the_first_step_is_by_hand() -> None:
    """m = 0.5 x 4 = 2, v = 0.25 x 16 = 4: 2 / (2 + 1), times sqrt(0.25) / 0.5."""
    _, (step,) = walk(cautious(), [vector(4)])
    assert step[0] == pytest.approx(2 / 3 * math.sqrt(0.25) / 0.5)


def test_who_turns_back_stands_still_and_the_others_have_his_part() -> None:
    """Of two values the second turns: m = 0.75 x 1 - 0.25 x 2 = 0.25 > 0, change -2. The first moves twice as far."""
    _, steps = walk(cautious(beta_1=0.75), [vector(4, 4), vector(4, -2)])
    _, alone = walk(cautious(beta_1=0.75), [vector(4), vector(4)])
    assert steps[1].tolist() == [2 * alone[1][0], 0.0]


def test_momentum_that_went_too_far_is_mostly_forgotten_and_noise_does_not_end_it() -> None:
    """After a change of 4 momentum is 2. One of -1 leaves KEPT x 2 / 2 - 1 / 2, one of -3 leaves 2 / 2 - 3 / 2."""
    moments, steps = walk(cautious(), [vector(4, 4), vector(-1, -3)])
    assert moments.vectors[0].tolist() == pytest.approx([KEPT - 0.5, -0.5])
    assert (steps[1] < 0).all()


def test_the_part_of_many_who_stand_still_makes_no_leap() -> None:
    turned = np.where(np.arange(1000), -2, 4).astype(np.float32)
    _, steps = walk(cautious(beta_1=0.75), [np.full(1000, 4, np.float32), turned])
    _, alone = walk(cautious(beta_1=0.75), [vector(4), vector(4)])
    assert steps[1][0] == alone[1][0] / np.float32(LEAST_SHARE)
    assert not steps[1][1:].any()


def test_each_tensor_steps_by_its_scale_and_statistics_by_the_change() -> None:
    change = np.full(LAYOUT.size, 0.25, np.float32)
    _, (step,) = walk(CautiousAdam(rate=2.0).build().fitted(LAYOUT), [change])
    one = 2.0 / (1 + 1e-8 / 0.25)  # m / sqrt(v) of a first change, whatever it is
    for (start, stop), scale in zip(
        ((0, 156), (156, 162), (162, 1672)), (0.1, None, 1 / (2 * math.sqrt(150))), strict=True
    ):
        np.testing.assert_allclose(step[start:stop], 0.25 if scale is None else one * scale, rtol=1e-5)


def led(*changes: np.ndarray, leads: bool = True) -> list[np.ndarray]:
    """Where three steps bring a model from 0, of one layer or of more."""
    scales = cautious(Tensor(2, 0.5), Tensor(3, None), beta_1=0.5, beta_2=0.75, tau=1e-8)
    optimizer = replace(scales, statistics=((2, 3),), leads=leads)
    return np.cumsum(walk(optimizer, list(changes))[1], axis=0)


def test_a_model_of_one_layer_is_ahead_by_what_momentum_makes_of_the_next_two_steps() -> None:
    """Changes of 4 are steps of 0.5 by the scale, and twice half of one ahead; of the statistics nothing is."""
    ahead, behind = led(*[vector(4, -4, 4)] * 3), led(*[vector(4, -4, 4)] * 3, leads=False)
    np.testing.assert_allclose(behind, [[0.5, -0.5, 4], [1, -1, 8], [1.5, -1.5, 12]], rtol=1e-6)
    np.testing.assert_allclose(ahead - behind, [[0.5, -0.5, 0]] * 3, rtol=1e-6, atol=1e-7)


def test_where_momentum_falls_the_model_comes_back() -> None:
    """Momentum of 2, over a root of 1 / 4 of 16 and corrected, is 1; then a change of 0.1 leaves it at 1.05 of 1.5."""
    changes = vector(4, 4, 0), vector(0.1, 4, 0)
    further = np.diff(led(*changes) - led(*changes, leads=False), axis=0)[0]
    now = 0.5 * (1.05 / 0.75) / math.sqrt((3 + 0.0025) / (1 - 0.75**2))
    assert further == pytest.approx([2 * 0.5 * (now - 0.5), 0, 0], abs=1e-6)


def test_models_of_one_layer_lead_and_keep_their_rate() -> None:
    one, mean = Layout(("weight", "bias"), ((2, 13), (2,))), Layout(("mean",), ((3,),))
    fitted = [CautiousAdam().build().fitted(layout) for layout in (one, mean, LAYOUT)]
    assert [(each.leads, each.growth) for each in fitted] == [(True, 1.0), (True, 1.0), (False, 16.0)]


def test_steps_of_one_layer_are_shorter_by_the_root_of_the_versions_that_updates_were_made_beside() -> None:
    one, deep = CautiousAdam().build().fitted(Layout(("mean",), ((3,),))), CautiousAdam().build().fitted(LAYOUT)
    assert [one.pace(each) for each in ([], [0, 0], [3, 3], [0, 3])] == [1.0, 1.0, 0.5, 0.75]
    assert deep.pace([3, 3]) == 1.0
    assert replace(one, grace=1).pace([3]) == 1 / 3  # what the file says goes before


@pytest.mark.parametrize("largest", [1.0, 5.0, 16.0])
def test_the_rate_grows_while_values_keep_their_direction_and_falls_back_to_what_was_set(largest: float) -> None:
    """From the second commit on, p is 1, 1, 1/2, 3/4 and 1/4. A value that does not move does not count."""
    agreeing, half, most = vector(4, 4, 4, 4, 0), vector(4, 4, -9, -9, 4), vector(4, 4, -9, 9, 0)
    optimizer = replace(cautious(), growth=largest)
    changes, found = [agreeing, agreeing, agreeing, half, most, -100 * agreeing], []
    for count in range(1, len(changes) + 1):
        moments, steps = walk(optimizer, changes[:count])
        fixed = walk(cautious(), changes[:count])[1][-1]
        found.append(moments.powers[2])
        np.testing.assert_allclose(steps[-1], found[-1] * fixed, rtol=1e-6)
    grown = [min(each, largest) for each in (1, 2.59, 2.59**2)]
    grown += [max(0.99 * grown[-1], 1.0)]
    grown += [min(1.59 * grown[-1], largest)]
    assert found == pytest.approx([*grown, max(0.19 * grown[-1], 1.0)])


def test_late_updates_cannot_raise_the_rate_and_can_lower_it() -> None:
    optimizer = replace(cautious(), growth=16.0)
    moments, _ = walk(optimizer, [vector(4, 4)] * 3)
    for change, expected in ((vector(4, 4), moments.powers[2]), (vector(-9, -9), 1.0)):
        advanced = optimizer.advance(moments, change, [0, 1], MEMORY)
        assert advanced is not None and advanced[0].powers[2] == expected < 16.0


def test_a_step_is_as_long_for_a_short_change_as_for_a_long_one() -> None:
    """What it is for: rates need not follow the size of gradients."""
    rng = np.random.default_rng(1)
    changes = [rng.normal(size=LAYOUT.size).astype(np.float32) for _ in range(5)]
    optimizer = Cautious("adam", 0.3, 0.8, 0.95, 1e-9, tensors=(Tensor(2**31, 0.1),))
    long, short = (walk(optimizer, [size * each for each in changes])[1] for size in (1, 0.001))
    np.testing.assert_allclose(long, short, rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("leads", [False, True])
def test_parts_have_the_bits_of_the_whole(leads: bool) -> None:
    """The share that agrees is of all values, though steps are made in spans, and tensors end within them."""
    rng = np.random.default_rng(2)
    size = SPAN_BYTES // 4 + 1000
    optimizer = cautious(
        Tensor(500, 0.5), Tensor(700, None), Tensor(SPAN_BYTES // 4 + 3, 0.25), Tensor(size, 2.0), beta_1=0.5
    )
    optimizer = replace(optimizer, statistics=((500, 700),), leads=leads)
    moments, changes = optimizer.begin(size, MEMORY), [rng.normal(size=size).astype(np.float32) for _ in range(2)]
    for change in changes:
        advanced = optimizer.advance(moments, change, (), MEMORY)
        assert advanced is not None
        moments, step = advanced
    whole = step(0, size)
    cuts = [0, 1, 499, 600, 701, 4096, SPAN_BYTES // 4, size]
    parts = [step(start, stop) for start, stop in pairwise(cuts)]
    np.testing.assert_array_equal(np.concatenate(parts), whole)
    half = changes[0] / 2
    overshot = (half * changes[1] < 0) & (np.abs(changes[1]) < np.abs(half))
    agrees = (np.where(overshot, KEPT * half, half) + changes[1]) * changes[1] > 0
    if not leads:
        np.testing.assert_array_equal(whole[700:] != 0, agrees[700:])
    np.testing.assert_array_equal(whole[500:700], changes[1][500:700])


def test_what_stands_still_is_shared_out_over_all_spans() -> None:
    size = SPAN_BYTES // 4 + 100_000
    turned = np.full(size, -2, np.float32)
    turned[: SPAN_BYTES // 4] = 4
    _, steps = walk(cautious(beta_1=0.75), [np.full(size, 4, np.float32), turned])
    _, alone = walk(cautious(beta_1=0.75), [vector(4), vector(4)])
    assert steps[1][0] == pytest.approx(alone[1][0] * size / (SPAN_BYTES // 4))


def test_powers_that_no_decay_comes_to_are_refused() -> None:
    optimizer = cautious()
    optimizer.check(optimizer.begin(3, MEMORY))
    moments, _ = walk(optimizer, [vector(1, 2)])
    optimizer.check(moments)
    for powers in ((1.5, 0.5, 1), (-0.1, 0.5, 1), (0.5, 0.5), (math.nan, 0.5, 1), (0.5, 0.5, 0.9), (0.5, 0.5, 1.1)):
        with pytest.raises(ValueError, match="powers"):
            optimizer.check(Moments(1, powers, moments.vectors))
