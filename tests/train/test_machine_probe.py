import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedsync.train.machine.resources import Resources
from fedsync.train.order_clock import MOST_WINDOWS, MachineProbe, Series

CPU = torch.device("cpu")


class Readings:
    def __init__(self, *shares: tuple[float | None, float | None]) -> None:
        self._shares = list(shares)

    def read(self, now_s: float) -> tuple[float | None, float | None]:
        return self._shares.pop(0) if self._shares else (0.5, 0.25)


def steps(series: Series, lengths: list[float], batch_size: int) -> tuple[float, int]:
    """Walk through steps of the given lengths as the trainer does; return the time and samples at the end."""
    now_s, samples = 0.0, 0
    for length in lengths:
        now_s += length
        samples += batch_size
        if now_s >= series.due_s:
            series.close(now_s, samples)
    return now_s, samples


@given(st.lists(st.floats(0.001, 0.5), max_size=400))
def test_windows_are_few_and_account_for_every_sample(lengths: list[float]) -> None:
    series = Series(Readings(), 0.0)
    windows = series.finish(*steps(series, lengths, 8))
    assert len(windows) <= MOST_WINDOWS
    assert bool(windows) == bool(lengths)
    assert all(window.cpu == pytest.approx(0.5) and window.memory == pytest.approx(0.25) for window in windows)


def test_short_steps_share_a_window_long_ones_have_their_own_and_a_short_rest_joins_its_neighbour() -> None:
    short = Series(Readings(), 0.0)
    long = Series(Readings(), 0.0)
    # 20 ms a step: the third ends past 50 ms.
    assert len(short.finish(*steps(short, [0.02] * 6, 8))) == 2
    speeds = [window.speed for window in long.finish(*steps(long, [0.1, 0.2], 8))]
    assert speeds == pytest.approx([80.0, 40.0])
    rest = Series(Readings(), 0.0)
    assert [window.speed for window in rest.finish(*steps(rest, [0.06, 0.01], 8))] == pytest.approx([16 / 0.07])


def test_merged_windows_weigh_by_time() -> None:
    series = Series(Readings((1.0, 0.4), (0.0, 0.1)), 0.0)
    # 62 more after these two reach the limit: neighbours merge.
    windows = series.finish(*steps(series, [0.3, 0.1] + [0.1] * 62, 8))
    assert len(windows) == MOST_WINDOWS // 2
    assert windows[0].speed == pytest.approx(16 / 0.4)
    assert windows[0].cpu == pytest.approx((1.0 * 0.3 + 0.0 * 0.1) / 0.4)
    assert windows[0].memory == pytest.approx((0.4 * 0.3 + 0.1 * 0.1) / 0.4)


class Shares(Resources):
    """Resources that read what they are told, and count how often they begin anew."""

    def __init__(self, *shares: float) -> None:
        self._left = list(shares)
        self.begun = 0

    def begin(self, now_s: float) -> None:
        self.begun += 1

    def read(self, now_s: float) -> tuple[float | None, float | None]:
        return self._left.pop(0), 0.5


def test_a_share_that_is_unknown_stays_so_when_windows_merge() -> None:
    series = Series(Readings((None, 0.5), (1.0, 0.5)), 0.0)
    windows = series.finish(*steps(series, [0.1] * 64, 8))
    assert [(window.cpu, window.memory) for window in windows[:2]] == [(None, 0.5), (0.5, 0.25)]


def test_the_probe_reads_shares_and_holds_the_peak() -> None:
    probe = MachineProbe(CPU, enabled=True)
    probe.start(0.0)
    cpu, memory = probe.read(0.05)
    assert cpu is not None and 0 <= cpu <= 1
    assert memory is not None and 0 < memory < 1
    assert probe.metrics()["peak_memory_bytes"] > 2**20
    off = MachineProbe(CPU, False, Shares())
    off.start(0.0)
    assert (off.read(1.0), off.metrics()) == ((None, None), {})


def test_the_probe_reads_at_most_every_50_ms() -> None:
    resources = Shares(0.3, 0.9, 0.7)
    probe = MachineProbe(CPU, True, resources)
    probe.start(0.0)
    assert [probe.read(now_s)[0] for now_s in (0.01, 0.03, 0.05)] == [0.3, 0.3, 0.3]
    assert probe.read(0.07)[0] == 0.9
    probe.start(0.08)  # just read: goes on from there
    assert probe.read(0.13)[0] == 0.7
    assert resources.begun == 1


def test_on_a_gpu_memory_is_the_gpu_s(monkeypatch: pytest.MonkeyPatch) -> None:
    forgotten = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (40, 100))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 45)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", forgotten.append)
    monkeypatch.setattr(
        torch.cuda,
        "memory_stats_as_nested_dict",
        lambda device: {"reserved_bytes": {"all": {"current": 50}}, "allocated_bytes": {"all": {"peak": 45}}},
    )
    gpu = torch.device("cuda", 0)
    probe = MachineProbe(gpu, True, Shares(0.75))
    probe.start(0.0)
    # 60 of 100 are taken, 50 of them kept by torch, of which training needed 45: 10 by others and 45.
    assert probe.read(0.05) == (0.75, 0.55)
    assert probe.metrics() == {"peak_memory_bytes": 45}
    assert forgotten == [gpu]
