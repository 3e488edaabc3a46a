"""What a silo's machine is doing while it trains, read between steps: no thread, no cost worth measuring."""

from __future__ import annotations

import math
from dataclasses import dataclass

import psutil
import torch

from fedsync.core.orders import Window
from fedsync.train import device as devices

WINDOW_S = 0.05
MOST_WINDOWS = 64


class Probe:
    """Reads processor and memory use, at most every 50 ms: a reading takes some 50 microseconds.

    Processor use is the mean since the reading before, over the whole machine, so that other programs
    which slow training down show. `peak_bytes` is the most that this process held at any reading; on a
    GPU, at any time.

    Args:
        device: where training runs; on a GPU, memory is the GPU's.
        enabled: whether to measure; if not, every reading is 0.
    """

    def __init__(self, device: torch.device, enabled: bool) -> None:
        self._device = device
        self._enabled = enabled
        self._process = psutil.Process()
        self._read_s = -math.inf
        self._shares = (0.0, 0.0)
        self.peak_bytes = 0

    def start(self, now_s: float) -> None:
        """Begin an order: forget what the machine did before, unless that was just now."""
        if self._enabled and now_s - self._read_s >= WINDOW_S:
            psutil.cpu_percent(None)

    def read(self, now_s: float) -> tuple[float, float]:
        """Shares (cpu, memory) in use, both 0..1; those of the last reading if that was just now."""
        if self._enabled and now_s - self._read_s >= WINDOW_S:
            self._read_s = now_s
            self._shares = psutil.cpu_percent(None) / 100.0, devices.memory_share(self._device)
            self.peak_bytes = max(self.peak_bytes, devices.held_bytes(self._device, self._process))
        return self._shares


@dataclass(frozen=True, slots=True)
class _Span:
    """Sums over consecutive steps, so that two spans merge exactly."""

    seconds: float
    samples: int
    cpu_s: float
    memory_s: float

    def merge(self, other: _Span) -> _Span:
        return _Span(
            self.seconds + other.seconds,
            self.samples + other.samples,
            self.cpu_s + other.cpu_s,
            self.memory_s + other.memory_s,
        )


class Series:
    """The course of one order as at most 64 windows.

    A window closes at the first step boundary 50 ms after it opened. When there are 64, neighbours are
    merged and windows become twice as long: any order gives a series of bounded size.

    Args:
        probe: asked once a window.
        now_s: the time at which the first window opens.
    """

    def __init__(self, probe: Probe, now_s: float) -> None:
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
        self._spans.append(_Span(seconds, samples - self._samples, cpu * seconds, memory * seconds))
        if len(self._spans) == MOST_WINDOWS:
            pairs = zip(self._spans[::2], self._spans[1::2], strict=True)
            self._spans = [first.merge(second) for first, second in pairs]
            self._length_s *= 2
        self._opened_s, self._samples = now_s, samples
        self.due_s = now_s + self._length_s

    def finish(self, now_s: float, samples: int) -> tuple[Window, ...]:
        """All windows. What is left of the last one counts with its neighbour if it is short."""
        if samples > self._samples:
            short = now_s - self._opened_s < self._length_s / 2
            self.close(now_s, samples)
            if short and len(self._spans) > 1:
                last = self._spans.pop()
                self._spans[-1] = self._spans[-1].merge(last)
        return tuple(
            Window(span.samples / span.seconds, span.cpu_s / span.seconds, span.memory_s / span.seconds)
            for span in self._spans
        )
