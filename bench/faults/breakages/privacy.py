"""Mutants of differential privacy: steps of DP-SGD, the ledger of a budget, and what is entered in it."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/privacy/test_noise.py",
    "tests/privacy/test_private_trainer.py",
    "tests/privacy/test_ledger.py",
    "tests/privacy/test_guard.py",
    "tests/privacy/test_guarded_reports.py",
    "tests/privacy/test_silo_noise_runs.py",
    "tests/cipher/encoding/test_silo_noise.py",
    "tests/cipher/silo/test_noisy_updates.py",
)

_CHANGES: Changes = {
    "train/dp_sgd/private_trainer.py": (
        ("values-of-data-leave-in-a-buffer", 'self._compare(before, self._untrained(), "a buffer', 'str("a buffer'),
        ("values-of-data-leave-in-a-parameter", 'self._compare(before, now, "a parameter', 'str("a parameter'),
        (
            "untrained-parameters-that-travel-are-not-guarded",
            "[*self._model.buffers(), *others]",
            "[*self._model.buffers()]",
        ),
        ("gradients-of-rows-are-not-clipped", "max_grad_norm=settings.clip,", "max_grad_norm=1e9,"),
        (
            "the-sum-of-rows-is-clipped-and-not-each-row",
            "clipped_sums(self._clipping, of_units)",
            "clipped_sums(self._clipping, [each.sum(dim=0, keepdim=True) for each in of_units])",
        ),
        (
            "noise-comes-from-the-seed-that-the-server-knows",
            "random_of(order.seed, seeded=self._settings.seeded)",
            "random_of(order.seed, seeded=True)",
        ),
        (
            "the-divisor-tells-how-many-rows-were-drawn",
            "self._settings, self._ordered)",
            "self._settings, max(len(rows), 1))",
        ),
    ),
    "train/dp_sgd/private_step.py": (
        (
            "noise-is-divided-by-the-batch-twice",
            "(total, settings.noise * settings.clip)",
            "(total, settings.noise * settings.clip / ordered)",
        ),
        ("noise-comes-again-after-a-crash", "secret = os.urandom(_KEY)", "secret = bytes(_KEY)"),
    ),
    "cipher/encoding/silo_noise.py": (
        ("a-silo-s-update-is-not-clipped", "min(1.0, self.clip / norm if norm else 1.0)", "1.0"),
        (
            "a-silo-s-noise-can-be-drawn-again",
            "np.frombuffer(os.urandom(8 * count), np.uint64)",
            "np.zeros(count, np.uint64)",
        ),
        ("rounding-makes-an-update-longer-than-noise-hides", "> fit.longest:", "> 1 << 62:"),
    ),
    "cipher/silo/replica.py": (
        (
            "votes-tell-how-long-a-silo-s-update-is",
            " if plan.noise is None else plan.first_exponents",
            "",
        ),
    ),
    "cipher/silo/catch_up_checks.py": (
        ("a-version-with-noise-opens-in-parts", "self._plan.noise is not None and len(sums) != 1", "False"),
    ),
    "config/private_runs.py": (
        (
            "silos-that-collude-count-for-the-noise",
            "SiloNoise(privacy.clip, noise, members - colluding)",
            "SiloNoise(privacy.clip, noise, members)",
        ),
    ),
    "silo/owner/privacy_guard.py": (
        (
            "the-rate-is-that-of-usual-batches-and-not-the-order-s",
            "self.settings.release(order.batch_size)",
            "self.settings.release(min(order.batch_size, 4))",
        ),
        ("an-evaluation-is-not-counted", "        self._enter(of, self._scored())\n", ""),
        (
            "executed-steps-are-not-counted",
            "self._releases_of(order, max(report.steps, 0))",
            "self._releases_of(order, 0)",
        ),
        (
            "an-order-that-is-killed-is-forgotten",
            "        self._enter(order.update_id, self._asked(order, order.max_steps))\n        self._begun = order\n",
            "        self._begun = None\n",
        ),
        (
            "a-trainer-that-reports-less-than-nothing-gets-more-back",
            "max(report.steps, 0)",
            "report.steps",
        ),
        (
            "the-second-ledger-s-budget-is-not-looked-at",
            "for ledger in self.ledgers:\n                ledger.check(self._asked(order, order.max_steps))",
            "for ledger in self.ledgers[:1]:\n                ledger.check(self._asked(order, order.max_steps))",
        ),
    ),
    "silo/owner/audit_chain.py": (
        ("an-entry-is-not-on-disk-when-its-result-leaves", "        os.fdatasync(descriptor)\n", ""),
    ),
    "silo/owner/privacy_ledger.py": (
        (
            "an-older-ledger-may-be-put-back",
            "if n > self._n or (n and digest != self._digests[n - 1]):",
            "if False:",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
