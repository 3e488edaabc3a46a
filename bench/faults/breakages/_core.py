"""The part of `deciding` that breaks `fedsync/core`."""

from __future__ import annotations

Changes = dict[str, tuple[tuple[str, str, str], ...]]
"""File under ``fedsync/`` -> (name, before, after) of its mutants."""

CORE: Changes = {
    "core/speed/sizing.py": (
        (
            "a-silo-gets-the-forecast-of-another",
            "return [silo.forecast or usual for silo in silos.values()]",
            "return [*known, *[usual] * (len(silos) - len(known))]",
        ),
    ),
    "core/orders.py": (
        ("a-batch-is-larger-than-the-silos-data", "cap = self.examples", "cap = 10**9"),
        (
            "a-batch-that-did-not-fit-comes-again",
            "for limit in (self.memory_samples, found):",
            "for limit in (self.memory_samples,):",
        ),
    ),
    "core/speed/forecasts.py": (
        (
            "all-silos-are-forecast-from-the-first-ones-speeds",
            "before = self._states.get(name)",
            "before = next(iter(self._states.values()), None)",
        ),
    ),
    "core/coordinator.py": (
        (
            "what-a-step-costs-besides-its-samples-is-never-learned",
            "policies.declared_speeds, policies.sizing.fitter)",
            "policies.declared_speeds, None)",
        ),
        (
            "an-update-is-committed-twice",
            "meta = state.pending.pop(update_id, None)",
            "meta = state.pending.get(update_id)",
        ),
        (
            "a-commit-makes-no-new-version",
            "        state.version += 1\n        state.commits += 1",
            "        state.commits += 1",
        ),
        (
            "a-rollback-makes-no-new-version",
            "            state.version += 1\n            actions.append(Rollback",
            "            actions.append(Rollback",
        ),
        (
            "a-savepoint-is-not-kept",
            "        if verdict.savepoint:\n",
            "        if verdict.savepoint and verdict.rollback:\n",
        ),
        (
            "an-update-is-discarded-without-a-word-why",
            "actions.append(Discard(update_id, verdict.reason))",
            'actions.append(Discard(update_id, ""))',
        ),
        ("an-order-that-failed-is-never-named", "                    actions.append(Discard(update_id, reason))\n", ""),
        (
            "a-duplicate-takes-the-update-with-it",
            "if order is None and meta.update_id in state.pending:",
            "if order is None and meta.update_id in state.halted:",
        ),
        ("what-is-left-at-the-end-is-not-named", "left = [*state.pending, *in_work]", "left = [*in_work]"),
        (
            "a-plan-is-kept-though-a-forecast-has-changed",
            "if self._plan is None or self._plan[0] != roster.revision:",
            "if self._plan is None or set(self._plan[1]) != set(roster):",
        ),
        (
            "a-run-in-which-nothing-happens-does-not-end-in-time",
            "            actions.insert(place, WakeAt(begun_s + seconds))\n",
            "            pass\n",
        ),
        (
            "the-wait-for-silos-is-time-of-the-run",
            "                    state.begun_s = now_s\n",
            "                    state.begun_s = 0.0\n",
        ),
        (
            "an-order-in-work-at-the-end-is-not-named",
            "left = [*state.pending, *in_work]",
            "left = [*state.pending]",
        ),
        (
            "a-silos-order-is-forgotten-but-not-named-when-it-joins-again",
            '                give_up_order(state, name, "the silo joined again", actions)\n',
            "",
        ),
    ),
    "core/order_lifecycle.py": (
        (
            "an-order-of-a-lost-silo-is-not-named",
            "        actions.append(Discard(silo.order.update_id, reason))\n",
            "",
        ),
        (
            "a-run-never-ends-if-one-joins-again-at-its-end",
            "            state.scores.end(state.version, name, None)\n        state.awaiting.discard(name)\n",
            "            state.scores.end(state.version, name, None)\n",
        ),
        (
            "one-that-comes-back-gets-the-names-of-its-old-orders",
            "    state.silos.pop(name, None)\n    state.scores.forget(name)",
            "    state.silos.pop(name, None)\n    state.issued.pop(name, None)\n    state.scores.forget(name)",
        ),
        ("a-silo-is-told-to-stop-twice", "if state.halted.get(name) != update_id:", "if update_id:"),
    ),
    "evaluation/final_evaluation.py": (
        (
            "the-last-version-of-a-sealed-run-has-no-score",
            "if policies.tally and state.commits and not known:",
            "if False:",
        ),
        (
            "more-silos-score-the-last-version-than-one-sum-takes",
            "state.pending_evaluations = set(here[: policies.tally])",
            "state.pending_evaluations = set(here)",
        ),
        (
            "silos-go-on-training-when-they-are-to-score",
            "replace(order, update_id=update_id, learning_rate=0.0, subject",
            "replace(order, update_id=update_id, subject",
        ),
        (
            "what-waits-when-a-sealed-run-ends-is-not-named",
            "in state.pending)\n        state.pending.clear()",
            "in state.awaiting)\n        state.pending.clear()",
        ),
        (
            "a-run-ends-before-the-scores-of-its-last-version-are-in",
            "_order(state, policies, plan, now_s, actions)\n            return False\n",
            "_order(state, policies, plan, now_s, actions)\n",
        ),
    ),
    "core/state.py": (
        ("no-second-alarm-is-ever-set", "while alarms and alarms[-1] <= now_s:", "while alarms and alarms[-1] < 0:"),
        (
            "every-event-sets-another-alarm",
            "if at_s is not None and not (alarms and alarms[-1] <= at_s):",
            "if at_s is not None:",
        ),
        (
            "weights-go-to-the-wrong-silos",
            "for meta, weight in zip(metas, coefficients, strict=True)",
            "for meta, weight in zip(metas, reversed(coefficients), strict=True)",
        ),
        (
            "every-order-of-a-silo-has-the-same-seed",
            "derive_seed(seed, Stream.ORDER, name, serial)",
            "derive_seed(seed, Stream.ORDER, name)",
        ),
        (
            "orders-are-the-same-whatever-the-seed",
            "derive_seed(seed, Stream.ORDER, name, serial)",
            "derive_seed(0, Stream.ORDER, name, serial)",
        ),
        ("a-barriers-budget-is-ignored", "            verdict.budget_s.get(name),\n", "            None,\n"),
        (
            "a-run-in-which-everybody-fails-goes-on-for-ever",
            "return working >= least or 0 < working == len(silos)",
            "return any(silo.failures < 10**9 for silo in silos.values())",
        ),
        (
            "an-encrypted-run-goes-on-below-what-a-sum-needs",
            "return working >= least or 0 < working == len(silos)",
            "return working >= 1",
        ),
        (
            "a-restored-run-gives-orders-their-old-names-again",
            '"found_caps", "issued", "leaders"),',
            '"found_caps", "leaders"),',
        ),
        ("a-restored-run-forgets-the-best", '"issued", "leaders"),', '"issued"),'),
        ("a-restored-run-forgets-its-alarm", '"halted", "alarms", "alarm_set"', '"halted", "alarm_set"'),
        ("a-restored-run-forgets-who-evaluated-what", '    "scores.newest": "scores._newest",\n', ""),
    ),
    "core/views.py": (
        (
            "a-success-does-not-make-failures-forgiven",
            "None, at_s, forecast, 0, done, overhead_s",
            "None, at_s, forecast, self.failures, done, overhead_s",
        ),
        ("orders-that-fail-are-not-counted", "failures=self.failures + 1", "failures=self.failures"),
        (
            "one-that-is-gone-counts-as-idle",
            "            del self._ranks[name]\n            self.idle.pop(name, None)\n",
            "            del self._ranks[name]\n",
        ),
    ),
    "core/stopping.py": (
        (
            "a-run-does-one-round-more-than-asked",
            "if self.rounds is not None and commits >= self.rounds:",
            "if self.rounds is not None and commits > self.rounds:",
        ),
        (
            "patience-is-ignored",
            "if self.patience is not None and since >= self.patience:",
            "if self.patience is not None and since >= 1e6 * self.patience:",
        ),
    ),
    "evaluation/version_scores.py": (
        (
            "a-run-that-stands-still-never-runs-out-of-patience",
            "if value > self.best else",
            "if value >= self.best else",
        ),
        (
            "what-a-silo-found-counts-after-it-has-left",
            "self._rolling.add(self._rolling.found.pop(silo), self.known, times=-1)",
            "self._rolling.found.pop(silo)",
        ),
        (
            "a-fast-silo-alone-chooses-the-best",
            "            self._newest.setdefault(silo, _FIRST)",
            "            pass",
        ),
    ),
}
