"""New models from updates: FedBuff, FedAsync, FedNova and SCAFFOLD against `paper_averaging`."""

from __future__ import annotations

import numpy as np

from bench.papers.independent import paper_averaging
from bench.papers.independent.finding import Finding, decisions, random_silos
from fedsync.core.actions import Commit
from fedsync.core.events import UpdateArrived
from fedsync.core.orders import UpdateMeta, WorkOrder
from fedsync.core.silo_weight import Solver
from fedsync.model.control_variates import ControlledModel, ControlVariates, key_of
from fedsync.model.plain_aggregator import PlainAggregator
from fedsync.policies.aggregate.aggregate_kinds import FedAsync, FedNova
from fedsync.policies.aggregate.weighers import Constant, Hinge, Polynomial
from fedsync.silo.session.own_variate import OwnVariate


def fedbuff(cases: int, rng: np.random.Generator) -> Finding:
    """Updates of each commit of whole runs, and their coefficients."""
    found: list[float] = []
    while len(found) < cases:
        size, rate = int(rng.integers(1, 6)), float(rng.uniform(0.1, 2))
        sets = [f"barrier.size={size}", f"aggregation.server_rate={rate}", "stop={rounds: 60}"]
        buffer: list[UpdateMeta] = []
        for entry in decisions("fedbuff", sets, random_silos(rng)):
            buffer += [event.meta for event in entry.events if isinstance(event, UpdateArrived)]
            commits = [action for action in entry.actions if isinstance(action, Commit)]
            for commit in commits:
                taken, buffer = buffer[:size], buffer[size:]
                wanted = paper_averaging.fedbuff([commit.version - 1 - meta.base_version for meta in taken], rate)
                by_id = dict(zip([meta.update_id for meta in taken], wanted, strict=True))
                same = commit.weights.keys() == by_id.keys()
                found += [abs(commit.weights[name] / by_id[name] - 1) if same else np.inf for name in by_id]
            found += [np.inf] * (len(buffer) >= size)  # a full buffer without a commit
    return Finding("FedBuff", "arXiv 2106.06639, algorithm 1", found, 1e-12, "of a coefficient")


def fedasync(cases: int, rng: np.random.Generator) -> Finding:
    """Models that the server mixes from stale silos' models, with the three discounts; FedSync's are float32."""
    found, versions = list[float](), 20
    while len(found) < cases // versions:
        a, b, alpha = float(rng.uniform(0.2, 3)), int(rng.integers(0, 5)), float(rng.uniform(0.1, 0.9))
        discounts = {"constant": Constant(), "polynomial": Polynomial(a), "hinge": Hinge(a, b)}
        start, moves = rng.normal(size=5), rng.normal(size=(versions, 5))
        bases = [int(rng.integers(max(0, version - 9), version + 1)) for version in range(versions)]
        for kind, discount in discounts.items():
            weigher = FedAsync(alpha, discount).weigher(Solver())
            aggregator = PlainAggregator(start.astype(np.float32))
            for version in range(versions):
                for later in np.flatnonzero(np.array(bases) == version):
                    aggregator.begin(f"s/{later}")
                meta = UpdateMeta(f"s/{version}", "s", bases[version], 4, 32, 100, 20)
                aggregator.put("s", meta.update_id, moves[version].astype(np.float32))
                (rate,) = weigher.coefficients([meta], version + 1)
                aggregator.commit(Commit(version + 1, {meta.update_id: rate}, weigher.toward))
            rates = [paper_averaging.fedasync(v - base, alpha, kind, a, b) for v, base in enumerate(bases)]
            wanted = paper_averaging.fedasync_model(start, list(moves), bases, rates)
            found.append(np.abs(aggregator.model - wanted[-1]).max())
    return Finding(
        "FedAsync", "arXiv 1903.03934, algorithm 1, 5.2", found, 1e-5, "of values near 1", versions * len(found)
    )


def fednova(cases: int, rng: np.random.Generator) -> Finding:
    """Coefficients for unequal steps: plain SGD, momentum, a proximal term, and both."""
    found: list[float] = []
    for case in range(cases):
        momentum = float(rng.uniform(0.1, 0.95)) if case % 4 in (1, 3) else 0.0
        decay = float(rng.uniform(0.001, 0.5)) if case % 4 in (2, 3) else 0.0
        steps, examples = rng.integers(1, 40, 5).tolist(), rng.integers(10, 1000, 5).tolist()
        metas = [
            UpdateMeta(f"s{i}/1", f"s{i}", 0, tau, 8 * tau, count, 40)
            for i, (tau, count) in enumerate(zip(steps, examples, strict=True))
        ]
        got = FedNova().weigher(Solver(momentum, decay)).coefficients(metas, 1)
        norms = [paper_averaging.local_norm(tau, momentum, decay) for tau in steps]
        wanted = paper_averaging.fednova([count / sum(examples) for count in examples], norms)
        found.append(np.abs(np.array(got) / wanted - 1).max())
    return Finding("FedNova", "arXiv 2007.07481, section 4", found, 1e-9, "of a coefficient")


def scaffold(cases: int, rng: np.random.Generator) -> Finding:
    """Models and the server's control variate on quadratics, with all silos first and some silos then."""
    found, size = list[float](), 4
    while len(found) < max(cases // 10, 10):
        n, steps, rate, server_rate = int(rng.integers(2, 6)), int(rng.integers(1, 9)), 0.05, float(rng.uniform(0.3, 1))
        curved, best = rng.uniform(0.3, 4, (n, size)), rng.normal(size=(n, size))
        gradients = [lambda w, c=c, b=b: c * (w - b) for c, b in zip(curved, best, strict=True)]
        rounds = [list(range(n))] + [
            sorted(rng.choice(n, int(rng.integers(1, n + 1)), replace=False).tolist()) for _ in range(9)
        ]
        start = rng.normal(size=size).astype(np.float32)
        models, control = paper_averaging.scaffold(
            gradients, start.astype(np.float64), steps, rate, server_rate, rounds
        )
        aggregator = PlainAggregator(start, optimizer=ControlVariates(server_rate))
        own = [OwnVariate.begin(size, None) for _ in range(n)]
        for number, (clients, wanted) in enumerate(zip(rounds, models, strict=True), start=1):
            ids = [f"s{client}/{number}" for client in clients]
            for client, update_id in zip(clients, ids, strict=True):
                aggregator.begin(update_id)
                sent = ControlledModel.decode(aggregator.outgoing(f"s{client}"), size)
                own[client] = own[client].settled(sent.counted.get(key_of(f"s{client}"), 0))
                correction, local = own[client].correction(sent.control, rate), sent.model.copy()
                for _ in range(steps):
                    local -= np.float32(rate) * (gradients[client](local).astype(np.float32) + correction)
                order = WorkOrder(update_id, number - 1, number, 8, steps, rate, 1)
                own[client] = own[client].proposing(order, sent.control, local - sent.model, steps)
                aggregator.put(f"s{client}", update_id, local - sent.model)
            weights = dict.fromkeys(ids, 1 / len(ids))
            aggregator.commit(Commit(number, weights, steps=float(steps), stands_for=len(ids)))
            found.append(np.abs(aggregator.model - wanted).max())
        stored = ControlledModel.decode(aggregator.outgoing("s0"), size).control  # m = -eta c
        found.append(np.abs(stored / -rate - control).max())
    return Finding("SCAFFOLD", "arXiv 1910.06378, algorithm 1", found, 1e-4, "of values near 1")
