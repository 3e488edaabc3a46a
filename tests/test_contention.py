"""The generator of contention traces: what it promises, without noise, by hand."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from bench.papers.backtest import read_trace
from bench.papers.contention import Contention, contention_trace


def test_a_task_that_stays_takes_its_share_but_never_more_than_is_fair() -> None:
    """One a step arrives and stays: k tasks leave 1 / (k + 1) at least, and swapping begins beyond 0.9."""
    config = Contention(80.0, 1.0, 1e9, (2.0, 2.0), (0.2, 0.2), 0.0, memory_limit=1.2, spikes=0.0, drift=0.0, noise=0.0)
    trace = contention_trace(replace(config, reading=0.0), 6, 1)
    # Two tasks that want all there is leave a third to each; the fifth step's task would need 1.3 of the memory.
    np.testing.assert_allclose(trace.cpu, [1 / 2, 1 / 3, 1 / 4, 1 / 5, 1 / 5, 1 / 5])
    np.testing.assert_allclose(trace.memory, [0.5, 0.7, 0.9, 1.0, 1.0, 1.0], atol=1e-12)
    # 1.1 of the memory: 0.2 too much; at 10 % speed is divided by 3, so here by 5.
    np.testing.assert_allclose(trace.speed, [40.0, 80 / 3, 20.0, 16 / 5, 16 / 5, 16 / 5], rtol=1e-9)


def test_spikes_are_as_frequent_as_told_and_no_column_shows_them() -> None:
    config = Contention(80.0, 0.0, spikes=0.1, drift=0.0, noise=0.0, reading=0.0)
    trace = contention_trace(config, 4000, 2)
    slow = trace.speed < 79.0
    assert 0.085 < slow.mean() < 0.115  # three standard deviations of a binomial: 0.014
    assert np.all((trace.speed[slow] >= 0.3 * 80) & (trace.speed[slow] <= 0.7 * 80))
    assert np.ptp(trace.cpu) == 0


def test_a_trace_repeats_for_a_seed_and_reads_back(tmp_path: Path) -> None:
    first, second, other = (contention_trace(Contention(), 50, seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.speed, second.speed)
    assert not np.array_equal(first.speed, other.speed)
    first.write(tmp_path / "trace.csv")
    steps = read_trace(tmp_path / "trace.csv")
    np.testing.assert_allclose([step.speed for step in steps], first.speed, rtol=1e-5)
    np.testing.assert_allclose([step.cpu for step in steps], first.cpu, atol=1e-4)
