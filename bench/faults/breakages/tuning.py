"""Mutants of `auto` and of overlap: what is remembered, rehearsed and chosen, and who gets a second order."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/core/test_cautious.py",
    "tests/core/test_server_optimizer.py",
    "tests/policies/tuning",
    "tests/policies/barrier/wrappers/test_overlap.py",
    "tests/core/test_rehearsal.py",
    "tests/sim/test_tuned.py",
)

_CHANGES: Changes = {
    "policies/tuning/record.py": (
        (
            "a-silo-is-believed-that-it-trained-longer-than-it-had-the-order",
            "train_s = min(report.compute_s, max(seen.end_s - given_s, 1e-9))",
            "train_s = report.compute_s",
        ),
        (
            "overhead-seems-gone-where-orders-are-queued",
            "overhead_s = before[0].overhead_s if queued else seen.end_s",
            "overhead_s = seen.end_s",
        ),
        (
            "rehearsals-know-of-no-contention",
            "return RecordedMachine(curve, lengths, factors)",
            "return RecordedMachine(curve)",
        ),
    ),
    "core/cautious.py": (
        ("layers-of-any-width-step-alike", "1.0 / (depth * math.sqrt(inputs))", "1.0 / depth"),
        ("depth-does-not-count", "1.0 / (depth * math.sqrt(inputs))", "1.0 / math.sqrt(inputs)"),
        (
            "a-bias-has-inputs-of-its-own",
            "math.prod(shape[1:])) if len(shape) > 1 else inputs",
            "math.prod(shape[1:]))",
        ),
        ("norms-averages-step-as-weights-do", "None if matches(name, STATISTICS) else", ""),
        ("who-turns-back-moves-all-the-same", "made[~_agrees(moments[0], change)] = 0", "pass"),
        ("what-stands-still-is-shared-out-to-one", "/ change.size, LEAST_SHARE)", "/ change.size, 1e-9)"),
        ("what-stands-still-is-lost", "np.float32(scale / share)", "np.float32(scale)"),
        ("momentum-that-went-too-far-is-kept", "old[0] * np.float32(KEPT), old[0]", "old[0], old[0]"),
        ("noise-ends-momentum", " & (np.abs(change) < np.abs(old[0]))", ""),
        ("deep-models-lead-too", "leads=_layers(layout) <= 1", "leads=True"),
        ("no-model-leads", "leads=_layers(layout) <= 1", "leads=False"),
        ("each-step-leads-anew", " - self._lead(before, start, stop)", ""),
        ("a-lead-goes-by-no-layer", "further[here] * np.float32(scale)", "further[here]"),
        ("a-lead-is-a-whole-step", "self._factor(moments) * self.beta_1", "self._factor(moments)"),
        ("a-span-knows-only-its-own-share", "found += int(", "found = int("),
        ("what-some-processors-take-for-nothing-counts", "tiny = np.float32(TINY)", "tiny = np.float32(1e-44)"),
    ),
    "cipher/silo/replica.py": (
        (
            "lengths-are-told-of-raw-updates",
            "length = squared_norm(sealed) / progress**2 if plan.norms else 0.0",
            "length = squared_norm(sealed) if plan.norms else 0.0",
        ),
    ),
    "cipher/silo/opening.py": (
        (
            "the-length-of-the-mean-hangs-on-the-server-s-rate",
            "mean = squared_norm(change) / sent**2 if plan.norms and sane else 0.0",
            "mean = squared_norm(change) if plan.norms and sane else 0.0",
        ),
    ),
    "config/run_spec.py": (
        ("lengths-are-told-in-every-run", "norms=self.tuned and plan.seal_metrics", "norms=plan.seal_metrics"),
    ),
    "policies/tuning/elasticity.py": (
        (
            "old-updates-count-as-fresh-ones",
            "return float(steps**elasticity * split ** (elasticity - 1))",
            "return float(steps**elasticity)",
        ),
        (
            "momentum-goes-with-old-updates",
            "2 * staleness * (1 + inertia) / (1 - inertia))",
            "2 * staleness)",
        ),
        (
            "steps-that-only-turn-are-worth-all-that-may-be-noise",
            "max(updates - 1, 1), 1.0) / 4)",
            "max(updates - 1, 1), 1.0) / 2)",
        ),
        ("of-more-silos-as-much-is-noise", "/ max(updates - 1, 1), 1.0)", ", 1.0)"),
        ("steps-count-for-less-than-they-are-worth", "/ (2 * len(said)))", "/ len(said))"),
        ("by-the-loss-steps-are-nearly-all-worth-it", "return _bounded(ratio / (1 + ratio))", "return _bounded(ratio)"),
    ),
    "policies/tuning/auto.py": (
        ("what-is-tried-loses-its-cap", "map(bare.around, named)", "tuple(named)"),
        ("two-carries-are-never-compared", "barrier.inner if isinstance(barrier, Overlap) else barrier", "barrier"),
    ),
    "policies/tuning/tuner.py": (
        ("auto-changes-for-next-to-nothing", "better.rate < (1 + self.auto.gain) * now.rate", "better.rate < now.rate"),
        ("auto-takes-directions-for-lengths", "if self.by_direction else found", "if False else found"),
        ("auto-looks-at-every-commit", "(self.auto.every if state.expected_s is not None else FIRST)", "FIRST"),
        (
            "a-way-that-took-longer-than-rehearsed-is-taken-again",
            "delays[way] = max(seconds / (CHANCE * state.expected_s), 1.0)",
            "delays[way] = 1.0",
        ),
        ("a-way-that-starves-a-silo-is-kept", "starves = way != (0, 0) and ", "starves = way != way and "),
        (
            "a-way-is-taken-though-its-rehearsal-starves-a-silo",
            "return played if min(played.shares.values()) * len(played.shares) >= tuner.auto.least_share else None",
            "return played",
        ),
        (
            "a-balanced-batch-falls-below-the-least-share",
            "floor = max(sizing.floor, math.ceil(self.auto.least_share * self.work.batch_size))",
            "floor = sizing.floor",
        ),
        (
            "a-barrier-goes-on-with-the-state-of-another",
            "if before.choice.barrier == after.choice.barrier:",
            "if before.choice is not None:",
        ),
        (
            "rounds-do-not-become-longer-with-their-steps",
            "pace_s=median(curve.overhead_s for curve in curves) + choice.steps / speed)",
            "pace_s=median(curve.overhead_s for curve in curves) + 1 / speed)",
        ),
        ("steps-jump-from-one-to-64", "\nSTRIDE = 2\n", "\nSTRIDE = 64\n"),
        (
            "a-pair-of-commits-counts-as-one-and-a-half",
            "commits = 4 if tuner.barriers[choice.barrier].queues else 3",
            "commits = 3",
        ),
    ),
    "core/tuning.py": (
        (
            "what-silos-tell-of-lengths-is-not-heard",
            "if figures.norms is not None and self.tuner is not None:",
            "if False:",
        ),
        ("what-silos-found-together-is-not-heard", "            self.loss = figures.loss\n", "            pass\n"),
        ("auto-does-not-say-why", "            actions.append(Note(reason))\n", ""),
    ),
    "core/rehearsal.py": (
        (
            "a-rehearsal-counts-before-speeds-are-known",
            "if self._commits <= self._warm:",
            "if self._commits <= 1:",
        ),
    ),
    "core/kernel.py": (
        (
            "rehearsed-orders-cost-nothing-besides",
            "return machine.overhead_s + machine.transfer_s",
            "return machine.transfer_s",
        ),
    ),
    "core/backlog.py": (
        (
            "a-machine-trains-two-orders-at-once",
            "if before is None or before.last_s <= work.start_s:",
            "if before is None or place:",
        ),
        ("a-queued-order-waits-for-what-was-cut-off", "if other.course is None:", "if other is work:"),
    ),
    "policies/barrier/wrappers/overlap.py": (
        ("one-that-fails-gets-two-orders-to-fail", "wanted = 2 - bool(silo.failures) -", "wanted = 2 -"),
        (
            "what-was-sent-ahead-is-committed-a-round-early",
            "oldest.setdefault(meta.silo, meta)",
            "oldest[meta.silo] = meta",
        ),
        ("nothing-is-carried-on", "queue=tuple(queue), carry=self.carry)", "queue=tuple(queue))"),
        (
            "one-that-is-busy-with-the-next-round-counts-as-late",
            "return replace(silo, order=order, since_s=silo.queued_s, queued=None)",
            "return replace(silo, order=order, queued=None)",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
