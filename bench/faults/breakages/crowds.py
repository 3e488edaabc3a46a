"""Mutants of what spares a server work that has many silos, for these tests to notice."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/evaluation/test_metric_votes.py",
    "tests/flower/test_grid_transport.py",
    "tests/server/test_nodes.py",
    "tests/server/test_outbox.py",
    "tests/config/test_user_config.py",
)

_CHANGES: Changes = {
    "flower/flower_messages.py": (
        (
            "large-messages-go-together",
            "lambda each: each.payload is None or each.payload.nbytes <= SMALL_BYTES",
            "lambda each: True",
        ),
    ),
    "server/nodes.py": (
        ("all-nodes-are-looked-at-all-the-time", "max(self._look_s, took_s + ", "min(self._look_s, took_s + "),
    ),
    "evaluation/metric_votes.py": (
        (
            "what-all-silos-say-is-kept-for-each",
            "next((other for other in said.values() if other == claim), claim)",
            "claim",
        ),
        ("the-first-lie-is-what-all-say", "if other == claim), claim)", "if other), claim)"),
    ),
    "config/run_spec.py": (
        ("more-silos-than-a-sum-holds-cannot-seal", "return min(asked, sealed.limit)", "return asked"),
        ("a-commit-has-more-than-a-sum-holds", " or most > sealed.limit:", ":"),
    ),
    "server/outbox.py": (
        (
            "what-waits-at-the-server-is-asked-for-again",
            "        for identifier in self._transport.waiting(soon):\n",
            "        for identifier in ():\n",
        ),
        (
            "what-waits-at-the-server-is-never-asked-for-again",
            "ask_s=now_s + self._patience_s(sent))\n        quiet",
            "ask_s=inf)\n        quiet",
        ),
        (
            "a-request-that-failed-counts-as-sent",
            "            if name is None:\n                lost",
            "            if name is None and not isinstance(sent.request, protocol.Train | protocol.EvaluateModel):\n"
            "                lost",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
