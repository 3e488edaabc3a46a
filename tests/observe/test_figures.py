"""How figures that silos report become one, by hand."""

import pytest

from fedsync.observe.rounds import MOST_NAMES, Figure, MetricPool, Round, SiloShare, figures


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("peak_memory_bytes", 3.0),
        ("max_gradient_norm", 3.0),
        *[(f"cost{unit}", 4.0) for unit in ("_s", "_j", "_wh", "_bytes", "_count")],
        *[(name, 1.5) for name in ("tokens_per_s", "gpu_celsius", "perplexity")],  # (1 * 30 + 3 * 10) / 40
    ],
)
def test_the_name_says_how_metrics_are_pooled(name: str, expected: float) -> None:
    pool = MetricPool()
    pool.add({name: 1.0}, 30)
    pool.add({name: 3.0}, 10)
    pool.add({"other": 9.0}, 99)  # an order without it
    assert pool.values() == {name: expected, "other": 9.0}


def test_the_largest_of_negative_figures_is_no_zero() -> None:
    pool = MetricPool()
    pool.add({"max_score": -3.0}, 1)
    assert pool.values() == {"max_score": -3.0}


def test_a_pool_keeps_so_many_names_and_no_more() -> None:
    pool = MetricPool()
    for number in range(MOST_NAMES + 5):
        pool.add({f"x{number:03}": 1.0, "x000": 1.0}, 1)
    assert len(pool.values()) == MOST_NAMES


def test_figures_of_a_round_are_listed_once_and_a_metric_takes_no_name_of_ours() -> None:
    share = SiloShare(8, 4, 32, 0.5, 0.25, 0.0, {"wait_s": 9.0, "energy_j": 2.0})
    row = Round(1, 2.0, 3.0, 0.75, {"a": share}, metrics={"loss": 9.0, "energy_j": 2.0})
    own = {"batch_size": 8, "steps": 4, "samples": 32, "compute_s": 0.5, "overhead_s": 0.25, "wait_s": 0.0}
    whole = [Figure("seconds", 3.0), Figure("loss", 0.75), Figure("energy_j", 2.0)]
    assert list(figures(row)) == [*whole, *(Figure(*each, "a") for each in {**own, "energy_j": 2.0}.items())]
