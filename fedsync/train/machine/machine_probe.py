"""Probe of a silo's machine during training; read between steps without a thread and at negligible cost."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import torch

from fedsync.core.orders import Window
from fedsync.train.machine import device as devices
from fedsync.train.machine.resources import Resources

WINDOW_S = 0.05
MOST_WINDOWS = 64

Shares = tuple[float | None, float | None]
"""Share of processors available to the trainer, and memory pressure, both 0..1; None if unknown or disabled."""


class MachineProbe:
    """Probe that reads `Shares` at most every 50 ms; a reading takes about 80 microseconds.

    Args:
        device: where training runs; on a GPU, memory means GPU memory.
        enabled: whether to measure; if not, both shares are None and there are no metrics.
        resources: source of the readings, or None for this machine.
    """

    def __init__(self, device: torch.device, enabled: bool, resources: Resources | None = None) -> None:
        self._device = device
        self._resources = (resources or Resources()) if enabled else None
        self._read_s = -math.inf
        self._shares: Shares = (None, None)
        self._peak_bytes = 0

    def start(self, now_s: float) -> None:
        """Begin an order: discard data from before, unless the last reading is less than 50 ms old."""
        if self._resources is not None and now_s - self._read_s >= WINDOW_S:
            self._resources.begin(now_s)

    def read(self, now_s: float) -> Shares:
        """Return means since the last reading; repeat the last reading if it is less than 50 ms old."""
        if self._resources is not None and now_s - self._read_s >= WINDOW_S:
            self._read_s = now_s
            cpu, memory = self._resources.read(now_s)
            self._peak_bytes = max(self._peak_bytes, devices.held_bytes(self._device))
            if self._device.type == "cuda":
                memory = devices.gpu_memory_share(self._device)
            self._shares = cpu, memory
        return self._shares

    def metrics(self) -> dict[str, float]:
        """Metrics for `WorkReport.metrics`: this process's peak memory, over all readings or, on a GPU, at any time."""
        return {"peak_memory_bytes": float(self._peak_bytes)} if self._peak_bytes else {}


class Reader(Protocol):
    """Source of `Shares` for a `Series`: a `MachineProbe`, or a stand-in."""

    def read(self, now_s: float) -> Shares: ...


@dataclass(frozen=True, slots=True)
class _Span:
    """Sums over consecutive steps; two spans merge exactly."""

    seconds: float
    samples: int
    cpu_s: float | None
    memory_s: float | None

    def merge(self, other: _Span) -> _Span:
        return _Span(
            self.seconds + other.seconds,
            self.samples + other.samples,
            _sum(self.cpu_s, other.cpu_s),
            _sum(self.memory_s, other.memory_s),
        )

    def window(self) -> Window:
        cpu, memory = (None if total is None else total / self.seconds for total in (self.cpu_s, self.memory_s))
        return Window(self.samples / self.seconds, cpu, memory)


def _sum(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None else first + second


class Series:
    """Time series of one order, with at most 64 windows.

    A window closes at the first step boundary 50 ms after it opened. At 64 windows, neighbours merge and the window
    length doubles, so any order gives a series of bounded size. The probe is read once per window.
    """

    def __init__(self, probe: Reader, now_s: float) -> None:
        self._probe = probe
        self._opened_s = now_s
        self._length_s = WINDOW_S
        self._spans: list[_Span] = []
        self._samples = 0
        self.due_s = now_s + WINDOW_S

    def close(self, now_s: float, samples: int) -> None:
        """End the current window at ``now_s``; the device is synchronised, and ``samples`` counts the whole order."""
        seconds = now_s - self._opened_s
        cpu, memory = self._probe.read(now_s)
        sums = (None if share is None else share * seconds for share in (cpu, memory))
        self._spans.append(_Span(seconds, samples - self._samples, *sums))
        if len(self._spans) == MOST_WINDOWS:
            pairs = zip(self._spans[::2], self._spans[1::2], strict=True)
            self._spans = [first.merge(second) for first, second in pairs]
            self._length_s *= 2
        self._opened_s, self._samples = now_s, samples
        self.due_s = now_s + self._length_s

    def skip(self, seconds: float) -> None:
        """Exclude time without training from the current window."""
        self._opened_s += seconds
        self.due_s += seconds

    def finish(self, now_s: float, samples: int) -> tuple[Window, ...]:
        """Return all windows; a last window shorter than half the length merges with its neighbour."""
        if samples > self._samples:
            short = now_s - self._opened_s < self._length_s / 2
            self.close(now_s, samples)
            if short and len(self._spans) > 1:
                last = self._spans.pop()
                self._spans[-1] = self._spans[-1].merge(last)
        return tuple(span.window() for span in self._spans)
