"""Mutants of windows, which silos say that they are there in, and of connections that die without a word."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/core/test_availability.py",
    "tests/simulation/test_presence.py",
    "tests/silo/test_owner_limits.py",
    "tests/silo/test_owner_policy.py",
    "tests/silo/test_refusals.py",
    "tests/server/test_driver.py",
    "tests/server/test_lost_nodes.py",
    "tests/server/test_refusing_silos.py",
)

_CHANGES: Changes = {
    "core/availability.py": (
        (
            "an-update-from-after-the-window-comes-a-version-late",
            "if order.base_version != version and was_away:",
            "if False:",
        ),
        ("a-silo-that-has-gone-home-is-waited-for", "if self.away(name, view.now_s):", "if False:"),
        ("what-a-silo-says-with-its-updates-is-not-heard", "        if said is not None:\n", "        if False:\n"),
        ("one-that-says-away-for-no-time-is-asked-without-a-pause", "max(back_s, REST_S)", "back_s"),
        (
            "a-silo-may-be-away-for-ever-and-never-fail",
            "if back_s is None or not 0 <= back_s <= MAX_AWAY_S:",
            "if back_s is None:",
        ),
        ("one-that-crashes-is-expected-as-if-it-had-gone-home", "del self.windows[name]", "pass"),
        ("nobody-says-why-the-run-waits", "([] if silos else self._expected(view.now_s))", "[]"),
        (
            "nobody-is-woken-when-windows-end-or-begin",
            "for window in self.windows.values() for at_s in window if at_s > now_s",
            "for window in self.windows.values() for at_s in window if at_s < 0",
        ),
    ),
    "core/views.py": (
        ("an-order-is-given-that-cannot-end-in-time", "return order_s <= left_s", "return True"),
        (
            "what-an-order-costs-besides-training-takes-no-time",
            " + max(self.forecast.overhead_s, self.overhead_s)",
            "",
        ),
    ),
    "core/order_lifecycle.py": (
        (
            "away-is-a-failure",
            "replace(silo.failed(at_s), failures=silo.failures) if away else silo.failed(at_s)",
            "silo.failed(at_s)",
        ),
    ),
    "core/coordinator.py": (
        (
            "a-run-whose-silos-are-away-has-nobody",
            "state.closing is not None or expected or",
            "state.closing is not None or",
        ),
    ),
    "core/orders.py": (
        (
            "windows-that-no-day-has-are-believed",
            "0 <= self.left_s <= self.back_s <= MAX_AWAY_S",
            "True",
        ),
    ),
    "core/extension.py": (
        (
            "a-resumed-run-forgets-who-is-away",
            "self.own(name).restore(state)",
            "pass",
        ),
    ),
    "silo/session/service.py": (
        (
            "an-update-says-nothing-of-the-window",
            "if isinstance(reply, WorkReport) and self._owner.presence is not None:",
            "if False:",
        ),
        (
            "a-silo-joins-as-if-it-were-there-always",
            "replace(self.facts, presence=self._owner.present())",
            "self.facts",
        ),
    ),
    "server/driver.py": (
        ("the-driver-takes-away-for-a-failure", "explained(name, reply), reply.back_s)", "explained(name, reply))"),
    ),
    "simulation/machine.py": (
        ("a-simulated-window-never-closes", "    if config.presence is not None:\n", "    if False:\n"),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
