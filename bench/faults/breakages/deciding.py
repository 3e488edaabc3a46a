"""Mutants of everything that decides, in `fedsync/policies` and `fedsync/core`; the laws alone are to notice them."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import CORE, Changes

# Not what sees that laws notice some of these: a breakage that is made already cannot be made there.
TESTS = ("tests/laws", "tests/extras/predictors/test_kalman.py", "--ignore=tests/laws/test_laws_bite.py")

_POLICIES: Changes = {
    "policies/barrier/kinds/bulk.py": (
        (
            "bsp-never-asks-one-again-that-failed",
            "release=view.idle, reason=reason",
            "release=tuple(n for n in view.idle if not view.silos[n].failures), reason=reason",
        ),
        (
            "bsp-leaves-updates-of-a-large-federation-behind",
            "commit=tuple(view.pending), ",
            "commit=tuple(view.pending)[:32], ",
        ),
        (
            "bsp-leaves-late-updates-out-of-every-commit",
            "commit=tuple(view.pending), ",
            "commit=tuple(u for u, m in view.pending.items() if m.base_version == view.version) or (*view.pending,), ",
        ),
        (
            "a-bsp-never-releases-one-again",
            "release=tuple(view.silos), reason=reason",
            "release=tuple(n for n, s in view.silos.items() if not s.clock or n != max(view.silos)), reason=reason",
        ),
        ("a-bsp-ignores-how-far-silos-are", "done += view.silos[name].progress_steps * order.batch_size", "done += 0"),
        ("a-bsp-wakes-up-in-the-past", "wake_at_s=again_s, reason=reason", "wake_at_s=state.asked_s, reason=reason"),
        (
            "a-bsp-asks-how-far-silos-are-with-every-event",
            "        if view.now_s < again_s:",
            "        if view.now_s < state.asked_s:",
        ),
        (
            "a-bsp-begins-before-the-halted-are-in",
            "        if not busy:\n            planned, verdict = begin(view)\n            return Absp",
            "        if not busy or (state.halted and len(view.pending) > len(busy) == view.idle_count):\n"
            "            planned, verdict = begin(view)\n            return Absp",
        ),
        ("on-time-waits-for-the-slowest", "if view.now_s >= due_s and math", "if view.now_s < 0 and math"),
        (
            "on-time-stops-silos-that-are-as-fast-as-forecast",
            "        if last_s <= right_s + slack_s < math.inf:",
            "        if last_s < right_s < math.inf:",
        ),
        (
            "on-time-takes-what-an-order-costs-besides-for-training",
            "silo.since_s - state.begun_s - silo.overhead_s",
            "silo.since_s - state.begun_s",
        ),
        (
            "on-time-goes-by-the-round-before",
            "            return OnTimeState(planned, view.now_s), verdict",
            "            return OnTimeState(planned, state.begun_s), verdict",
        ),
    ),
    "policies/barrier/kinds/ssp.py": (
        (
            "asp-never-releases-one-again",
            "        idle = view.idle\n        failures = failed(state, idle, view)\n        release",
            "        idle = tuple(n for n in view.idle if n != max(view.silos) or not view.silos[n].clock)\n"
            "        failures = failed(state, idle, view)\n        release",
        ),
        (
            "asp-never-commits-what-is-old",
            "        if view.pending:\n            return state, commit_next(view)\n        idle = view.idle\n",
            "        fresh = {u: m for u, m in view.pending.items() if m.base_version + 3 > view.version}\n"
            "        if fresh:\n            return state, commit_next(replace(view, pending=fresh))\n"
            "        idle = view.idle\n",
        ),
        (
            "ssp-lets-a-silo-run-one-order-further-ahead",
            "latest = clocks.slowest + self.staleness",
            "latest = clocks.slowest + self.staleness + 1",
        ),
        (
            "ssp-waits-for-a-silo-whose-orders-fail",
            "if silo.clock > seen.clock or silo.failures > seen.failures:",
            "if silo.clock > seen.clock:",
        ),
        (
            "ssp-waits-until-a-newcomer-has-made-up-for-its-absence",
            "name: _first(slowest, clocks.away.get(name), silo)",
            "name: _first(0, clocks.away.get(name), silo)",
        ),
        (
            "ssp-waits-for-silos-that-are-gone",
            "return Clocks(present, away, _slowest(present, slowest))",
            "return Clocks(present, away, _slowest({**present, **away}, slowest))",
        ),
        (
            "ssp-overlooks-that-the-slowest-has-come-on",
            "default=without)",
            "default=without) if not without else without",
        ),
        (
            "one-that-failed-sits-out-for-ever-while-others-work",
            "failures[name].version != view.version",
            "failures[name].version > view.version",
        ),
        (
            "one-that-fails-is-asked-again-at-once",
            "    if not failures or not view.anyone_busy:\n        return names",
            "    if names:\n        return names",
        ),
        (
            "buffered-leaves-the-oldest-for-later",
            "commit = tuple(islice(view.pending, self.size))",
            "commit = tuple(islice(reversed(view.pending), self.size))",
        ),
        (
            "buffered-holds-silos-whose-update-waits",
            "release = ready(failures, idle, view)\n        filled",
            "sent = {meta.silo for meta in view.pending.values()}\n"
            "        release = tuple(name for name in ready(failures, idle, view) if name not in sent)\n"
            "        filled",
        ),
    ),
    "policies/barrier/kinds/sampled.py": (
        (
            "sampled-draws-otherwise-in-a-replay",
            "key = derive_seed(view.seed, Stream.SAMPLE, coordinates,",
            "key = derive_seed(Random().getrandbits(32), Stream.SAMPLE, coordinates,",
        ),
        (
            "sampled-draws-the-same-whatever-the-seed",
            "key = derive_seed(view.seed, Stream.SAMPLE, coordinates,",
            "key = derive_seed(0, Stream.SAMPLE, coordinates,",
        ),
        (
            "sampled-waits-for-a-silo-that-is-gone",
            "if tick is not None and tick.ticks < least:",
            "if tick is None or tick.ticks < least:",
        ),
        (
            "sampled-holds-whoever-is-ahead-of-anybody",
            "left = _behind(names, clocks, ticks - self.staleness)",
            "left = _behind(view.names, clocks, ticks)",
        ),
        (
            "sampled-remembers-what-another-run-drew",
            "            names = self.sampling.draw(pools, self.sample_size, view, name, ticks, keeps)",
            "            known = globals().setdefault('_DRAWN', {})\n"
            "                drawn = self.sampling.draw(pools, self.sample_size, view, name, ticks, keeps)\n"
            "                names = known.setdefault((name, ticks), drawn)",
        ),
    ),
    "policies/barrier/kinds/elastic.py": (
        (
            "elastic-gives-fast-silos-the-steps-of-slow-ones",
            "for name, step in zip(idle, point.steps, strict=True)",
            "for name, step in zip(reversed(idle), point.steps, strict=True)",
        ),
    ),
    "policies/barrier/kinds/fsp.py": (
        (
            "fsp-is-not-asked-again-when-time-is-up",
            "return next((at_s for at_s in instants if at_s > now_s), None)",
            "return None",
        ),
        (
            "fsp-forgets-what-to-go-back-to",
            "            savepoint=attempt.savepoint,\n",
            "            savepoint=False,\n",
        ),
        (
            "fsp-commits-what-began-before-a-rollback",
            "fresh = view.version + 1 if attempt.rollback else state.fresh",
            "fresh = state.fresh",
        ),
        (
            "fsp-drops-what-is-in-time",
            "if meta.base_version < view.version]",
            "if meta.base_version <= view.version]",
        ),
        (
            "fsp-lets-silos-train-until-the-deadline-and-answer-after-it",
            "max(seconds - state.overheads.get(name, nothing).seconds, 0.0)",
            "max(seconds, 0.0)",
        ),
        (
            "fsp-waits-for-a-straggler-however-long",
            "if now_s >= round.patience_s and all(",
            "if now_s >= 1e9 * round.patience_s and all(",
        ),
        (
            "fsp-has-a-silo-join-a-round-again-and-again",
            "if name in round.members or forecast is None",
            "if forecast is None",
        ),
        (
            "fsp-takes-one-silos-data-for-anothers",
            "self.passes * view.silos[name].facts.examples / view",
            "self.passes * max(silo.facts.examples for silo in view.silos.values()) / view",
        ),
    ),
    "extras/compass.py": (
        ("fedcompass-waits-for-a-group-for-ever", "if at_work and view.now_s < group.latest_s:", "if at_work:"),
        (
            "fedcompass-does-not-wake-for-the-first-group",
            "wake_at_s=min((group.latest_s for group in groups), default=None)",
            "wake_at_s=max((group.latest_s for group in groups), default=None)",
        ),
        (
            "fedcompass-asks-for-more-steps-than-allowed",
            "if max(self.min_steps, most + 1) <= steps <= self.max_steps:",
            "if max(self.min_steps, most + 1) <= steps:",
        ),
        (
            "fedcompass-keeps-groups-that-are-over",
            "            else:\n                late |= at_work",
            "            else:\n                groups.append(group)\n                late |= at_work",
        ),
    ),
    "policies/barrier/wrappers/late_orders.py": (
        (
            "late-updates-that-were-to-be-dropped-are-committed",
            "discard=verdict.discard + dropped,",
            "discard=verdict.discard,",
        ),
        (
            "late-orders-are-remembered-for-ever",
            "return LateState(late & in_work, inner)",
            "return LateState(late, inner)",
        ),
        (
            "a-short-cap-strikes-off-everybody-before-anybody-has-sent",
            "and (view.pending or silo.order.base_version < view.version)",
            "and silo.order.base_version <= view.version",
        ),
        (
            "a-cap-sleeps-through-its-own-alarm",
            "view.now_s >= silo.since_s + patience_s",
            "view.now_s > silo.since_s + patience_s",
        ),
        ("a-cap-sets-alarms-in-the-past", "(at_s for at_s in times if at_s > view.now_s)", "(at_s for at_s in times)"),
        ("capped-waits-however-long", "overdue(visible, self.cap_s)", "overdue(visible, 1e6 * self.cap_s)"),
        (
            "quorum-ignores-its-share",
            "has_quorum(visible, Required(self.count, self.share or 1.0))",
            "has_quorum(visible, Required(self.count, 1.0))",
        ),
        (
            "quorum-is-content-with-fewer-than-asked",
            "math.ceil(self.share * silos - 1e-9)",
            "math.floor(self.share * silos - 1e-9)",
        ),
        ("deadline-remembers-every-order", "(*state.durations, *ended)[-self.window :]", "(*state.durations, *ended)"),
        (
            "deadline-strikes-before-its-share-is-in",
            "if limit_s is None or not has_quorum(visible, Required(share=self.share)):",
            "if limit_s is None:",
        ),
        (
            "deadline-reads-the-machines-clock",
            "dict.fromkeys(verdict.release, view.now_s)",
            "dict.fromkeys(verdict.release, view.now_s + __import__('time').time() % 1)",
        ),
    ),
    "core/views.py": (
        (
            "a-wrapper-overrules-the-alarm-of-what-it-wraps",
            "if at_s is None or (self.wake_at_s is not None and self.wake_at_s <= at_s):",
            "if at_s is None:",
        ),
    ),
    "policies/barrier/wrappers/default_wrappers.py": (
        (
            "a-run-begins-before-enough-silos-are-there",
            "if not state.started and len(view.silos) < self.silos:",
            "if not state.started and not view.silos:",
        ),
        (
            "a-run-halts-when-one-silo-leaves",
            "if not state.started and len(view.silos) < self.silos:",
            "if len(view.silos) < self.silos:",
        ),
        (
            "one-that-failed-three-times-never-works-again",
            "if rest.until_s > view.now_s and not",
            "if rest.until_s > 0 and not",
        ),
        (
            "one-whose-disk-is-full-takes-an-order-every-round",
            "        if resting:\n",
            "        if len(resting) > len(view.silos):\n",
        ),
        (
            "nobody-wakes-one-that-has-rested",
            "RestingState(rests, inner), verdict.by(ends)",
            "RestingState(rests, inner), verdict",
        ),
    ),
    "policies/aggregate/weighers.py": (
        ("weights-do-not-sum-to-one", "total = sum(amounts)", "total = max(amounts)"),
        ("fedavg-counts-work-instead-of-data", "return float(meta.examples)", "return float(meta.samples)"),
        ("the-servers-rate-is-ignored", "return [self.rate * coefficient for", "return [coefficient for"),
        (
            "stale-updates-count-in-full",
            "return [c * self.discount(staleness(meta, version)) for",
            "return [c * self.discount(0) for",
        ),
        (
            "a-fresh-update-is-discounted",
            "return version - 1 - meta.base_version",
            "return version - meta.base_version",
        ),
        ("the-staler-the-more-it-counts", "(1 + staleness) ** -self.exponent", "(1 + staleness) ** self.exponent"),
    ),
    "policies/aggregate/aggregate_kinds.py": (
        ("fednova-follows-whoever-does-most-steps", "return [share * effective / norm for", "return [share for"),
    ),
    "policies/balance/rounding.py": (
        ("a-sample-of-the-batch-goes-to-nobody", "    while left > 0:", "    while left > 1:"),
    ),
    "policies/balance/by_forecast.py": (
        (
            "slow-silos-get-the-large-batches",
            "np.array([curve.speed for curve in curves], dtype=np.float64)",
            "np.array([1.0 / curve.speed for curve in curves], dtype=np.float64)",
        ),
        (
            "equalise-goes-below-the-floor",
            "np.clip(times.largest(seconds), bounds.floor, bounds.cap)",
            "np.clip(times.largest(seconds), 0, bounds.cap)",
        ),
    ),
    "policies/balance/without_forecast.py": (
        (
            "leader-straggler-burdens-the-slowest",
            "{leader: now.sizes[leader] + step, straggler: size - step}",
            "{leader: now.sizes[leader] - step, straggler: size + step}",
        ),
        (
            "leader-straggler-remembers-every-round",
            "(*state.rounds, dict(seen.seconds))[-longest:]",
            "(*state.rounds, dict(seen.seconds))",
        ),
    ),
    "policies/predict/predictor_base.py": (
        ("ema-never-learns", "self.alpha * sample.speed + (1 - self.alpha) * state", "state"),
    ),
    "extras/predictors/kalman.py": (
        (
            "kalman-never-believes-that-a-silo-has-become-slower",
            "if state.suspect is None or (state.suspect - state.level) * error < 0:",
            "if state.suspect is None or error < 0:",
        ),
    ),
    "policies/predict/mixture.py": (
        (
            "a-mixtures-weights-do-not-sum-to-one",
            "return [weight / total for weight in weights]",
            "return [weight for weight in weights]",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in {**_POLICIES, **CORE}.items()
    for name, before, after in changes
)
