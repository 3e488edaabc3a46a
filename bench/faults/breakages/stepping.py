"""Mutants of the server optimizer `cautious-adam`, of virtual machines, and of models that silos train alone."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/evaluation/test_local_baselines.py",
    "tests/model/test_cautious_adam.py",
    "tests/model/test_server_optimizer.py",
    "tests/simulation/test_engine.py",
)

_CHANGES: Changes = {
    "evaluation/local_baselines.py": (
        (
            "alone-a-silo-trains-less-than-it-did-in-the-run",
            "max(-(-self.processed.get(name, 0) // each), 1)",
            "1",
        ),
        ("what-fails-apart-is-tried-for-ever", " or self.failed.get(name, 0) >= MOST_FAILURES", ""),
    ),
    "model/cautious_adam.py": (
        ("layers-of-any-width-step-alike", "1.0 / (depth * root)", "1.0 / depth"),
        ("depth-does-not-count", "1.0 / (depth * root)", "1.0 / root"),
        ("a-bias-has-inputs-of-its-own", "if len(shape) > 1:", "if True:"),
        ("wide-layers-step-as-narrow-ones", " * max(1.0, inputs / wide)", ""),
        ("inputs-that-are-data-shorten-steps", "1.0, math.inf, []", "1.0, WIDE, []"),
        ("norms-averages-step-as-weights-do", "None if is_statistic(name, layout) else", ""),
        ("who-turns-back-moves-all-the-same", "made[~_agrees(moments[0], change)] = 0", "pass"),
        ("what-stands-still-is-shared-out-to-one", "/ change.size, LEAST_SHARE)", "/ change.size, 1e-9)"),
        ("what-stands-still-is-lost", "np.float32(scale / share)", "np.float32(scale)"),
        ("momentum-that-went-too-far-is-kept", "old[0] * np.float32(KEPT), old[0]", "old[0], old[0]"),
        ("noise-ends-momentum", " & (np.abs(change) < np.abs(old[0]))", ""),
        ("deep-models-lead-too", "if _layers(layout) <= 1 else", "if True else"),
        ("no-model-leads", "if _layers(layout) <= 1 else", "if False else"),
        ("a-rate-grows-without-end", "if oldest else self.growth)", "if oldest else grown)"),
        ("late-updates-raise-a-rate", "before.powers[2] if oldest else self.growth", "self.growth"),
        ("a-rate-falls-below-what-was-set", "min(max(grown, 1.0), before", "min(grown, before"),
        ("a-rate-grows-from-one-each-time", "before.powers[2] * (1 -", "1.0 * (1 -"),
        ("a-growing-rate-moves-nothing-further", "rate=self.rate * growth", "rate=self.rate"),
        ("who-does-not-move-disagrees", "agree / (agree + disagree) if", "agree / change.size if"),
        ("noise-keeps-a-rate-that-grew", "(1 - FADES + GAIN", "(1 + GAIN"),
        ("a-rate-never-falls-back", " + min(share - SHRINKS, 0.0)", ""),
        ("each-step-leads-anew", " - self._lead(before, start, stop)", ""),
        ("a-lead-goes-by-no-layer", "further[here] * np.float32(scale)", "further[here]"),
        ("a-lead-is-a-whole-step", "self._factor(moments) * self.beta_1", "self._factor(moments)"),
        ("a-span-knows-only-its-own-share", "found += int(", "found = int("),
        ("what-some-processors-take-for-nothing-counts", "tiny = np.float32(TINY)", "tiny = np.float32(1e-44)"),
    ),
    "simulation/engine.py": (
        (
            "virtual-orders-cost-nothing-besides",
            "return machine.overhead_s + machine.transfer_s",
            "return machine.transfer_s",
        ),
    ),
    "simulation/orders_in_work.py": (
        (
            "a-halted-order-arrives-when-it-would-have-without",
            "if self._works.get(work.silo) is not work:",
            "if False:",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
