"""Mutants of control variates (SCAFFOLD): silos', the server's, and how they stay together."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/model/test_control_variates.py",
    "tests/model/test_server_optimizer.py",
    "tests/model/test_stepping.py",
    "tests/silo/test_own_variate.py",
    "tests/cipher/silo/test_optimizer.py",
    "tests/simulation/test_control_variates.py",
)

_CHANGES: Changes = {
    "model/control_variates.py": (
        ("who-stays-away-is-forgotten-by-the-mean", "kept=(total - weight) / following", "kept=0.0"),
        (
            "the-mean-goes-by-sums-not-steps",
            "gained=weight / (following * backing.steps)",
            "gained=weight / following",
        ),
        ("newcomers-do-not-add-to-the-weight", "weight * backing.newcomers / backing.updates", "0.0"),
        ("weights-of-no-silos-pass-for-some", "return len(powers) == 1 and 0 <= powers[0] <= LARGEST", "return True"),
        (
            "variates-that-are-no-numbers-are-followed",
            "        check_values(FP32, values, SERVER, control)\n",
            "",
        ),
        (
            "part-of-a-table-counts",
            "check_length(payload, length +",
            "check_length(payload, payload.nbytes + 0 * length + 0 *",
        ),
    ),
    "core/state.py": (
        (
            "a-commit-is-worth-steps-unweighted",
            "sum(weights[meta.update_id] * meta.steps for meta in metas)",
            "sum(meta.steps for meta in metas) / len(metas)",
        ),
    ),
    "model/plain_aggregator.py": (
        (
            "discarded-updates-count-for-silos",
            "        self._waiting.discard(update_id)\n",
            "        self._waiting.discard(update_id)\n        self._counted.update([serial_of(update_id)])\n",
        ),
        (
            "a-silo-is-sent-an-old-mean",
            "if self._controlled is None or self._controlled[0] != self._public.version:",
            "if self._controlled is None:",
        ),
        ("who-counted-is-not-in-a-checkpoint", '    "counted": "_counted",\n', ""),
    ),
    "silo/session/own_variate.py": (
        ("a-discarded-update-moves-a-variate", "self.proposed_serial == counted:", "self.proposed_serial:"),
        (
            "a-committed-update-moves-no-variate",
            "return OwnVariate(self.proposed, counted)",
            "return OwnVariate(self.own, counted)",
        ),
        ("steps-are-corrected-the-wrong-way", "made = self.own - control\n", "made = control - self.own\n"),
        ("the-rate-counts-twice-in-a-correction", "made /= np.float32(learning_rate)", "pass"),
        ("a-variate-is-of-a-sum-not-a-mean", "per_step = np.float32(1 / steps)", "per_step = np.float32(1)"),
        ("a-variate-does-not-outlive-its-process", "self._variate = self._variate.save(self._file)", "pass"),
        ("a-lost-variate-is-not-told", "if self.serial != counted:", "if False:"),
        ("an-order-that-scores-proposes", "if order.scores_only or control is None:", "if control is None:"),
    ),
    "train/loop.py": (
        (
            "corrections-are-clipped-away",
            "            for parameter, correction in self._corrections:",
            "            for parameter, correction in self._corrections[:0]:",
        ),
    ),
    "cipher/silo/replica.py": (
        (
            "a-sealed-variate-goes-by-what-was-not-rounded",
            "return self._plan.unite(grid.rounded(sealed, factor, self._rounding(order)), clear)",
            "return update",
        ),
    ),
    "cipher/silo/opening.py": (
        ("stale-updates-move-the-mean", "any(m.round != state.version for m in one.head.members)", "False"),
        (
            "sealed-commits-are-worth-one-step",
            "steps = self._plan.weighting.rate * opened.tally.effective_progress",
            "steps = self._plan.weighting.rate",
        ),
        (
            "spoiled-updates-count-for-silos",
            "moments=moments, counted=counted)",
            "moments=moments, counted={**counted, **{m.silo: 99 for m in members}})",
        ),
    ),
    "cipher/silo/replica_state.py": (
        ("silos-agree-without-who-counted", "        if self.counted:\n", "        if False:\n"),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
