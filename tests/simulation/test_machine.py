"""How long a machine takes: jitter, traces, and trace files that are no use."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedsync.common.errors import ConfigError
from fedsync.common.rng import Stream, generator
from fedsync.core.orders import WorkOrder
from fedsync.simulation.machine import Load, Machine, Trace, speed_windows
from tests.simulation.fake import machines

STALL = Trace(np.array([0.0, 10.0, 20.0]), np.array([1.0, 0.0, 0.5]))


def order(number: int = 1, batch_size: int = 20, steps: int = 5) -> WorkOrder:
    return WorkOrder(f"a/{number}", 0, number, batch_size, steps, learning_rate=0.1, seed=1)


def machine(seed: int = 7, **silo: Any) -> Machine:
    return Machine(machines({"speed": 100.0, **silo})[0], seed)


def test_jitter_is_a_lognormal_factor_a_step_drawn_for_silo_and_order() -> None:
    """exp(N(0, 0.3)) from the generator that the design names."""
    factors = np.exp(generator(7, Stream.JITTER, "a", 2).normal(0.0, 0.3, 5))
    expected = np.cumsum(0.2 * factors)
    np.testing.assert_allclose(machine(jitter=0.3).course(order(2), 0.0).ends, expected, rtol=1e-14)


@pytest.mark.parametrize(
    ("start_s", "work_s", "end_s"),
    [
        (0, 8, 8),
        (0, 10, 10),  # done as the standstill begins
        (0, 12, 24),  # 10 until 10, none until 20, 2 at half speed
        (5, 5, 10),
        (5, 6, 22),
        (10, 1, 22),
        (15, 1, 22),  # begun in the standstill
        (20, 1, 22),
        (25, 3, 31),
        (1000, 1, 1002),  # the last factor holds for ever
    ],
)
def test_a_trace_by_hand(start_s: float, work_s: float, end_s: float) -> None:
    np.testing.assert_allclose(
        Load([STALL.pieces()]).ends(start_s, np.array([work_s], dtype=float)), [end_s], rtol=1e-15
    )


factors = st.lists(st.sampled_from([0.0, 0.25, 1.0, 3.0]), min_size=0, max_size=6)


@given(factors, st.floats(0, 20), st.floats(0.01, 50))
def test_the_integral_of_the_factor_is_the_work(middle: list[float], start_s: float, work_s: float) -> None:
    """Between start and end, computed piece by piece; and nothing was left to do before the end."""
    values = [*middle, 0.5]
    trace = Trace(np.arange(len(values)) * 3.0, np.array(values))
    end_s = float(Load([trace.pieces()]).ends(start_s, np.array([work_s]))[0])

    def work_until(now_s: float) -> float:
        edges = [*np.clip(trace.seconds, start_s, now_s), now_s]
        return sum(f * (right - left) for f, left, right in zip(values, edges[:-1], edges[1:], strict=True))

    assert end_s > start_s
    assert work_until(end_s) == pytest.approx(work_s, rel=1e-9)
    assert work_until(end_s - 1e-6) < work_s


# Files.


def load(folder: Path, text: str | bytes) -> Trace:
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return Trace.load(path)


def test_a_file_gives_seconds_and_factors(tmp_path: Path) -> None:
    trace = load(tmp_path, "factor,seconds,comment\n1,0,x\n0.5,2.5,y\n")
    np.testing.assert_array_equal(trace.seconds, [0, 2.5])
    np.testing.assert_array_equal(trace.factors, [1, 0.5])


@pytest.mark.parametrize("header", ["seconds, factor", "\N{BYTE ORDER MARK}seconds,factor"])
def test_the_header_may_have_spaces_as_in_its_error_or_a_mark_as_in_spreadsheets(tmp_path: Path, header: str) -> None:
    np.testing.assert_array_equal(load(tmp_path, f"{header}\n0, 0.5\n").factors, [0.5])


def test_the_first_factor_holds_before_its_time(tmp_path: Path) -> None:
    """0.5 from 0 to 10 although the file begins at 4; then 1."""
    np.testing.assert_allclose(
        Load([load(tmp_path, "seconds,factor\n4,0.5\n10,1\n").pieces()]).ends(0.0, np.array([6.0])), [11.0]
    )


@pytest.mark.parametrize(
    ("text", "place", "problem"),
    [
        ("", "trace.csv", "columns are not `seconds, factor`"),
        ("time,speed\n0,1\n", "trace.csv", "columns are not `seconds, factor`"),
        ("seconds,factor\n", "trace.csv", "no row|standstill"),
        ("seconds,factor\n0,1\n5,0\n", "trace.csv", "ends at a standstill"),
        ("seconds,factor\n0,1\n5,fast\n", "line 3", "not two numbers"),
        ("seconds,factor\n0,1\n5\n", "line 3", "not two numbers"),
        ("seconds,factor\n0,1\n,1\n", "line 3", "not two numbers"),
        ("seconds,factor\n0,-1\n", "line 2", "out of range"),
        ("seconds,factor\n0,nan\n", "line 2", "out of range"),
        ("seconds,factor\n0,inf\n", "line 2", "out of range"),
        ("seconds,factor\n0,1\n5,1001\n", "line 3", "out of range"),
        ("seconds,factor\nnan,1\n", "line 2", "out of range"),
        ("seconds,factor\n-5,1\n-3,1\n10,1\n", "line 2", "out of range"),  # before the run began
        ("seconds,factor\n0,1\n5,1\n5,2\n", "line 4", "does not follow"),
        ("seconds,factor\n0,1\n5,1\n4,2\n", "line 4", "does not follow"),
        (b"seconds,factor\n0,1\n\xff\xfe,2\n", "trace.csv", "."),
    ],
)
def test_a_useless_file_is_refused_by_line(tmp_path: Path, text: str | bytes, place: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"{place}.*({problem})"):
        load(tmp_path, text)


def test_windows_are_means_of_equal_parts() -> None:
    """Steps of 1 s and then of 2 s: 10 samples a step are 10 and 5 a second."""
    windows = speed_windows(10, 100.0, 100.0 + np.array([1.0, 2.0, 4.0, 6.0]))
    assert [window.speed for window in windows] == [10, 10, 5, 5]
