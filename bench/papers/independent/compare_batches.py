"""LB-BSP's batch sizes and NARX: FedSync's against `paper_batches` and `paper_narx`."""

from __future__ import annotations

import numpy as np
import torch

from bench.papers.independent import paper_batches, paper_narx
from bench.papers.independent.finding import Finding, decisions, random_silos
from fedsync.core.actions import Dispatch
from fedsync.core.events import UpdateArrived
from fedsync.core.protocols import Bounds, MachineLoad, RoundSeen, SpeedSample
from fedsync.extras.predictors.narx import Narx
from fedsync.extras.predictors.small_network import DECAY, HUBER, Training, improve, random_parameters
from fedsync.policies.balance.without_forecast import LeaderStraggler


def cpu_sizes(cases: int, rng: np.random.Generator) -> Finding:
    """Algorithm 1 with the moving average, in whole runs of the paper's strategy file."""
    found: list[float] = []
    while len(found) < cases:
        alpha = float(rng.uniform(0.1, 1))
        sets = [f"predictor.alpha={alpha}", "balancer.rounding=largest-remainder", "local.batch_size=128"]
        speeds: dict[str, list[float]] = {}
        sizes: dict[str, int] = {}
        for entry in decisions("paper/lb-bsp", [*sets, "stop={rounds: 8}"], random_silos(rng, examples=5000)):
            for event in entry.events:
                if isinstance(event, UpdateArrived):
                    name, report = event.meta.silo, event.report
                    speeds.setdefault(name, []).append(sizes[name] / (report.compute_s / report.steps))
            given = {each.silo: each.order.batch_size for each in entry.actions if isinstance(each, Dispatch)}
            if given and speeds:
                forecasts = [paper_batches.moving_average(speeds[name], alpha) for name in given]
                wanted = paper_batches.cpu_batch_sizes(forecasts, sum(sizes.values()))
                found += [abs(got - size) for got, size in zip(given.values(), wanted, strict=True)]
            sizes.update(given)
    return Finding("LB-BSP, CPU", "LB-BSP, algorithm 1; 3.5", found, 0, "samples")


def gpu_sizes(cases: int, rng: np.random.Generator) -> Finding:
    """Algorithm 2, in runs of 50 iterations."""
    found: list[float] = []
    while len(found) < cases:
        n = int(rng.integers(2, 7))
        speed, launch = np.exp(rng.uniform(np.log(2), np.log(400), n)), rng.uniform(0, 0.5, n)
        mean = int(rng.integers(6, 40))
        paper, shipped = paper_batches.GpuBatchSizes(), LeaderStraggler()
        state, sizes = shipped.init(), [mean] * n
        names = [f"s{index}" for index in range(n)]
        bounds = Bounds(np.ones(n, np.int64), np.full(n, 10**6))
        for _ in range(50):
            times = launch + np.array(sizes) / speed * rng.uniform(0.9, 1.1, n)
            memory = rng.uniform(0.3, 1.0, n)
            memory[rng.integers(n)] = 0.5
            by_name = dict(zip(names, times.tolist(), strict=True))
            seen = RoundSeen(names, by_name, dict(zip(names, memory.tolist(), strict=True)), mean * n, bounds)
            state, _ = shipped.advance(state, seen)
            sizes = paper.update(sizes, times.tolist(), memory.tolist())
            planned = shipped.plan(state, names, mean * n, bounds)
            found.append(np.abs(planned - np.array(sizes)).max())
    return Finding("LB-BSP, GPU", "LB-BSP, algorithm 2", found, 0, "samples")


def narx_forward(cases: int, rng: np.random.Generator) -> Finding:
    """Outputs of a trained predictor for the last windows, from its exported parameters."""
    narx, found = Narx(samples=100, hidden=4, memory=200), list[float]()
    while len(found) < cases // 5:
        cpu, memory = rng.uniform(0.2, 1, 120), rng.uniform(0.1, 0.9, 120)
        speed = 100 * cpu * (1.2 - memory) + rng.normal(0, 1, 120)
        state = narx.init()
        for row in zip(speed, cpu, memory, strict=True):
            state = narx.observe(state, SpeedSample(*map(float, row)))
        while narx.unlearned(state):
            state = narx.learn(state, 5)
        assert state.model is not None
        rows = [
            paper_narx.features(speed[:k], [cpu[: k + 1].tolist(), memory[: k + 1].tolist()]) for k in range(2, 120)
        ]
        x = torch.tensor(np.array(rows))
        scale, mean = x.std(dim=0, correction=0), x.mean(dim=0)
        mean[1], scale[1] = mean[0], scale[0]  # both past speeds are one series
        network = _network(torch.tensor(state.model.parameters), 8, 4)
        wanted = paper_narx.forward((x - mean) / scale, *network) * scale[0] + mean[0]
        got = [state.model.speed(row) for row in x.tolist()]
        found += (torch.tensor(got) / wanted - 1).abs().tolist()
        # Where orders have one window, a forecast is one output, unless the moving average was better.
        load = MachineLoad(*rng.uniform(0.2, 0.9, 2).tolist())
        row = paper_narx.features(speed, [[*cpu, load.cpu], [*memory, load.memory]])
        told = paper_narx.forward((torch.tensor([row]) - mean) / scale, *network) * scale[0] + mean[0]
        forecast = narx.forecast(state, load)
        if forecast is not None and state.errors[0] <= state.errors[1]:
            found.append(abs((forecast - state.correction) / float(told) - 1))
    return Finding("NARX, forward pass", "LB-BSP, equation 4, figure 3", found, 1e-9, "of the speed")


def narx_step(cases: int, rng: np.random.Generator) -> Finding:
    """One step of Levenberg and Marquardt, with derivatives by automatic differentiation."""
    found = []
    for _ in range(max(cases // 15, 1)):
        hidden, inputs, n = int(rng.integers(1, 5)), int(rng.integers(2, 9)), 40
        x, y = rng.normal(size=(n, inputs)), rng.normal(size=n)
        begin = random_parameters(inputs, hidden, rng) + rng.normal(0, 0.2, hidden * (inputs + 2) + inputs + 1)
        got = improve(Training(x, y, x, y, hidden, begin))
        wanted = _stepped(torch.tensor(begin), torch.tensor(x), torch.tensor(y), hidden, 1e-2)
        found.append(np.abs(got.parameters - wanted.numpy()).max() / np.abs(wanted.numpy() - begin).max())
    return Finding("NARX, training step", "derivatives by autograd", found, 1e-6, "of the step")


def _network(p: torch.Tensor, inputs: int, hidden: int) -> tuple[torch.Tensor, ...]:
    """Weights of `paper_narx.forward` from FedSync's vector: hidden layer, its bias, output, direct part, constant."""
    layer, bias, out, straight, constant = torch.split(p, [inputs * hidden, hidden, hidden, inputs, 1])
    return layer.reshape(hidden, inputs).T, bias, out, constant, straight


def _stepped(begin: torch.Tensor, x: torch.Tensor, y: torch.Tensor, hidden: int, damping: float) -> torch.Tensor:
    """The step with which the loss falls: Huber's, and weight decay, with the damping raised fourfold until it does."""

    def error(p: torch.Tensor) -> torch.Tensor:
        return paper_narx.forward(x, *_network(p, x.shape[1], hidden)) - y

    limit = float(HUBER * 1.4826 * torch.quantile(error(begin).abs(), 0.5)) + 1e-9

    def loss(p: torch.Tensor) -> torch.Tensor:
        huber = torch.nn.functional.huber_loss(error(p), torch.zeros(len(y)), reduction="sum", delta=limit)
        return huber + DECAY / 2 * p @ p

    jacobian, gradient = torch.func.jacrev(error)(begin), torch.func.grad(loss)(begin)
    weight = (limit / error(begin).abs()).clamp(max=1)
    curvature = jacobian.T @ (weight[:, None] * jacobian)
    while True:
        tried = begin - torch.linalg.solve(curvature + (DECAY + damping * len(y)) * torch.eye(len(begin)), gradient)
        if loss(tried) < loss(begin):
            return tried
        damping *= 4
