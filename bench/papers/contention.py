"""Traces of a shared machine: training speed while other tasks come and go, and the readings of a probe.

The events of each step (one iteration of training, some seconds):

- *Tasks* arrive with probability ``arrivals`` a step and stay for an exponentially distributed number of steps. Each
  wants a share of the processors and of the memory, fluctuates around it, and uses memory bandwidth, which no
  probe sees.
- *Processors*: training gets what the tasks leave, but at least a fair share: one of ``tasks + 1`` equal parts.
- *Memory*: beyond ``swap_at`` the machine swaps, and speed falls with every page that does not fit. The probe shows at
  most 1, so the degree of overcommitment stays hidden. A task that would raise the total above ``memory_limit`` is
  rejected, as by a scheduler.
- *Garbage collection*: with probability ``spikes`` a step, speed drops to 0.3 to 0.7 for one step, unannounced.
- *Frequency*: a slow, invisible drift (heat, neighbours on the same host): AR(1) in the logarithm.
- *Measurement*: the probe reads both shares with noise, and speed is measured with noise.

So speed depends on the two columns, on the past, and on hidden causes.

Source: the environments of LB-BSP, sections 2.1 (transient and lasting stragglers), 5.3 (tasks of a production
trace) and 5.4.1 (spikes, available processors and memory); the numbers are ours.
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedsync.common.rng import Stream, generator

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Contention:
    """What happens on a shared machine.

    Args:
        speed: of training on the idle machine [samples/s].
        arrivals: probability that a task arrives, a step.
        stay: mean steps that a task stays.
        cpu: least and most share of the processors that a task wants.
        memory: least and most share of the memory that a task wants.
        bandwidth: most share of training's speed that a task's use of memory bandwidth costs; hidden.
        own_memory: share of the memory in use without any task.
        swap_at: share of the memory beyond which the machine swaps.
        swap: at 10 % of the memory overcommitted, speed is divided by 1 + this.
        memory_limit: share of the memory beyond which no task is let in.
        spikes: probability of a garbage collection, a step.
        drift: standard deviation of the logarithm of the hidden frequency.
        noise: standard deviation of the logarithm of a measured speed.
        reading: standard deviation of a reading of the processors; of the memory a quarter of it.
    """

    speed: float = 100.0
    arrivals: float = 0.03
    stay: float = 50.0
    cpu: tuple[float, float] = (0.1, 0.6)
    memory: tuple[float, float] = (0.05, 0.35)
    bandwidth: float = 0.1
    own_memory: float = 0.3
    swap_at: float = 0.9
    swap: float = 2.0
    memory_limit: float = 1.1
    spikes: float = 0.02
    drift: float = 0.03
    noise: float = 0.03
    reading: float = 0.02


@dataclass(frozen=True, slots=True)
class ContentionTrace:
    """One value a step, each float64 [steps].

    Args:
        speed: measured [samples/s].
        cpu: share of the processors that training could have, as read, 0..1.
        memory: share of the memory in use, as read, 0..1.
    """

    speed: Floats
    cpu: Floats
    memory: Floats

    def write(self, path: Path) -> None:
        """Write a CSV file with the columns that `bench.papers.backtest` reads."""
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(["step", "speed", "cpu", "memory"])
            rows = zip(self.speed.tolist(), self.cpu.tolist(), self.memory.tolist(), strict=True)
            writer.writerows([step, f"{v:.6g}", f"{c:.4f}", f"{m:.4f}"] for step, (v, c, m) in enumerate(rows))


@dataclass(frozen=True, slots=True)
class _Task:
    until: int
    cpu: float
    memory: float
    bandwidth: float


def contention_trace(config: Contention, steps: int, seed: int, silo: str = "") -> ContentionTrace:
    """A trace of so many steps; the same for the same arguments."""
    draw = generator(seed, Stream.CONTENTION, f"trace/{silo}")
    tasks: list[_Task] = []
    columns = np.empty((3, steps))
    frequency, keeps = draw.normal(0.0, config.drift), 0.99
    for step in range(steps):
        tasks = [task for task in tasks if task.until > step]
        if draw.random() < config.arrivals:
            task = _arrival(config, step, draw)
            if config.own_memory + sum(other.memory for other in (*tasks, task)) <= config.memory_limit:
                tasks.append(task)
        wobble = draw.normal(1.0, 0.05)
        wanted = wobble * sum(task.cpu for task in tasks)
        available = max(1.0 - wanted, 1.0 / (len(tasks) + 1))
        used = config.own_memory + sum(task.memory for task in tasks)
        swapping = 1.0 + config.swap * max(used - config.swap_at, 0.0) / 0.1
        bandwidth = float(np.prod([1.0 - task.bandwidth for task in tasks]))
        frequency = keeps * frequency + draw.normal(0.0, config.drift * np.sqrt(1 - keeps**2))
        spike = draw.uniform(0.3, 0.7) if draw.random() < config.spikes else 1.0
        speed = config.speed * available * bandwidth * spike / swapping
        columns[0, step] = speed * np.exp(frequency + draw.normal(0.0, config.noise))
        columns[1, step] = available + draw.normal(0.0, config.reading)
        columns[2, step] = used + draw.normal(0.0, config.reading / 4)
    return ContentionTrace(columns[0], np.clip(columns[1], 0.0, 1.0), np.clip(columns[2], 0.0, 1.0))


def _arrival(config: Contention, step: int, draw: np.random.Generator) -> _Task:
    return _Task(
        until=step + 1 + int(draw.exponential(config.stay)),
        cpu=draw.uniform(*config.cpu),
        memory=draw.uniform(*config.memory),
        bandwidth=draw.uniform(0.0, config.bandwidth),
    )
