"""What a silo's machine is doing while it trains, read between steps: no thread, no cost worth measuring."""

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
"""Processors available to the trainer and memory pressure, both 0..1; None where it is not known or not told."""


class MachineProbe:
    """Reads `Shares`, at most every 50 ms: a reading takes some 80 microseconds.

    Args:
        device: where training runs; on a GPU, memory is the GPU's.
        enabled: whether to measure; if not, both shares are None and there are no metrics.
        resources: what is read, or None for this machine's.
    """

    def __init__(self, device: torch.device, enabled: bool, resources: Resources | None = None) -> None:
        self._device = device
        self._resources = (resources or Resources()) if enabled else None
        self._read_s = -math.inf
        self._shares: Shares = (None, None)
        self._peak_bytes = 0

    def start(self, now_s: float) -> None:
        """Begin an order: forget what the machine did before, unless that was just now."""
        if self._resources is not None and now_s - self._read_s >= WINDOW_S:
            self._resources.begin(now_s)

    def read(self, now_s: float) -> Shares:
        """Means since the last reading; those of the last reading if that was just now."""
        if self._resources is not None and now_s - self._read_s >= WINDOW_S:
            self._read_s = now_s
            cpu, memory = self._resources.read(now_s)
            self._peak_bytes = max(self._peak_bytes, devices.held_bytes(self._device))
            if self._device.type == "cuda":
                memory = devices.gpu_memory_share(self._device)
            self._shares = cpu, memory
        return self._shares

    def metrics(self) -> dict[str, float]:
        """Figures of the machine for `WorkReport.metrics`: the most memory that this process held at any reading.

        On a GPU, at any time.
        """
        return {"peak_memory_bytes": float(self._peak_bytes)} if self._peak_bytes else {}


class Reader(Protocol):
    """What a `Series` asks: a `MachineProbe`, or a stand-in."""

    def read(self, now_s: float) -> Shares: ...


@dataclass(frozen=True, slots=True)
class _Span:
    """Sums over consecutive steps, so that two spans merge exactly."""

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
    """Of two totals; unknown if one is."""
    return None if first is None or second is None else first + second


class Series:
    """The course of one order as at most 64 windows.

    A window closes at the first step boundary 50 ms after it opened. When there are 64, neighbours are
    merged and windows become twice as long: any order gives a series of bounded size.

    Args:
        probe: asked once a window.
        now_s: the time at which the first window opens.
    """

    def __init__(self, probe: Reader, now_s: float) -> None:
        self._probe = probe
        self._opened_s = now_s
        self._length_s = WINDOW_S
        self._spans: list[_Span] = []
        self._samples = 0
        self.due_s = now_s + WINDOW_S

    def close(self, now_s: float, samples: int) -> None:
        """End the window that is open.

        Args:
            now_s: now, with the device synchronised.
            samples: processed since the order began.
        """
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
        """So long nothing was trained that the open window is about."""
        self._opened_s += seconds
        self.due_s += seconds

    def finish(self, now_s: float, samples: int) -> tuple[Window, ...]:
        """All windows. What is left of the last one counts with its neighbour if it is short."""
        if samples > self._samples:
            short = now_s - self._opened_s < self._length_s / 2
            self.close(now_s, samples)
            if short and len(self._spans) > 1:
                last = self._spans.pop()
                self._spans[-1] = self._spans[-1].merge(last)
        return tuple(span.window() for span in self._spans)
