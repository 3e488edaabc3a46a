"""Mutants of what an operator may ask of a run that goes on."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/core/test_operator_commands.py",
    "tests/server/test_operator_requests.py",
    "tests/flower/test_checkpoint_files.py",
    "tests/laws/test_steering.py",
    "tests/extras/watch/test_absences.py",
    "tests/observe/test_run_state.py",
    "tests/extras/watch/test_live.py",
    "tests/observe/test_progress.py",
    "tests/extras/page/test_page.py",
)

_CHANGES: Changes = {
    "core/coordinator.py": (
        (
            "a-paused-run-goes-on",
            "if state.closing is None and (paused := state.extensions.paused()):",
            "if state.closing is None and (paused := state.extensions.paused()) and not state.pending:",
        ),
        (
            "a-silo-that-was-dropped-is-back-when-it-joins",
            "        if not state.extensions.admit(name, facts, at_s):\n            return\n",
            "",
        ),
    ),
    "core/operator/operator_execution.py": (
        ("too-few-silos-are-left-to-open-a-sum", "len(here) - 1 < least:", "len(here) < least:"),
        ("a-silo-that-is-readmitted-has-a-window-of-long-ago", "_moved(facts, -at_s)", "facts"),
        ("a-silo-that-joins-while-it-is-out-has-a-window-of-another-time", "else _moved(facts, at_s)", "else facts"),
        (
            "a-question-that-comes-again-is-done-again",
            "if before is not None:",
            "if before is not None and before.refused:",
        ),
        (
            "a-silo-that-is-dropped-takes-its-window-along",
            "presence = attendance.forget(name) if isinstance(attendance, Attendance) else None",
            "presence = None",
        ),
        (
            "a-changed-limit-in-seconds-wakes-nobody",
            "                state.alarm_set = False\n",
            "                pass\n",
        ),
    ),
    "server/checkpoints.py": (
        (
            "what-an-operator-was-told-is-forgotten-at-a-restart",
            "            return True  # an answer to an operator must still hold after a restart\n",
            "            pass\n",
        ),
    ),
    "extras/page/page_server.py": (
        (
            "the-link-opens-as-often-as-one-likes",
            "        self._token = None\n        return",
            "        return",
        ),
        (
            "the-cookie-alone-opens-the-page",
            "_same(cookie, self._cookie), _same(key, self._key)]",
            "_same(cookie, self._cookie)]",
        ),
        (
            "another-page-steers-the-run",
            'if origin.removeprefix("http://") not in self.hosts or not origin.startswith("http://"):',
            'if not origin.startswith("http://"):',
        ),
        (
            "any-name-that-leads-here-is-this-server",
            "ours = len(hosts) == 1 and hosts[0] in self.hosts",
            "ours = len(hosts) == 1",
        ),
    ),
    "observe/progress.py": (
        (
            "the-terminal-counts-by-the-rule-that-was",
            'ledger.steered.stop.get("rounds", self._rounds)',
            "self._rounds",
        ),
        ("the-terminal-tells-nothing-of-the-operator", "        self._show_operator(ledger)\n", ""),
    ),
    "extras/watch/absences.py": (
        ("a-pause-looks-like-waiting", "self._since_s[EVERYBODY, PAUSED] = at_s", "pass"),
        ("a-question-that-was-refused-is-drawn", "            if not refused:\n", "            if True:\n"),
        (
            "a-silo-that-was-away-looks-idle-afterwards",
            "if before is not None and before[0] < at_s",
            "if False and before",
        ),
        ("one-that-is-back-stays-away", "(until_s, min(back_s, now_s), AWAY)", "(until_s, now_s, AWAY)"),
        ("one-that-comes-late-looks-idle-before", "self._since_s[silo, GONE] = 0.0", "pass"),
        ("the-page-keeps-all-absences-for-ever", "deque(maxlen=self.keep)", "deque()"),
    ),
    "observe/run_state.py": (
        ("a-killed-run-looks-alive", "return not held(lock)", "return False"),
        ("a-living-run-looks-killed", "return not held(lock)", "return lock.exists()"),
        ("a-run-that-is-over-is-no-run", 'if summary.get("stopped_by"):', "if False:"),
    ),
    "observe/ledger.py": (
        (
            "an-order-that-an-operator-took-has-failed",
            "            self._lose(drop.silo, drop.at_s, taken=True)\n",
            "            self._lose(drop.silo, drop.at_s)\n",
        ),
    ),
    "server/operator_requests.py": (
        ("a-question-of-last-week-is-done", "if age_s > STALE_S else", "if age_s < 0 else"),
        (
            "what-cannot-be-read-is-not-answered",
            "            self._answer(OperatorAnswered(path.stem, f",
            "            path.unlink(missing_ok=True), (OperatorAnswered(path.stem, f",
        ),
        (
            "a-number-that-is-no-rule-is-asked-all-the-same",
            "    if isinstance(question, ChangeStop) and question.problem():\n        raise",
            "    if False:\n        raise",
        ),
        ("the-seventeenth-question-waits", "        if len(new) <= MOST_WAITING:\n", "        if True:\n"),
        ("a-folder-is-listed-at-each-turn", "if time.monotonic() < self._next_s:", "if False:"),
        ("a-question-is-never-read", "self._next_s = time.monotonic() + _LOOK_S", "self._next_s = 1e12"),
        ("a-question-of-the-last-moment-is-not-answered", "        self._next_s = 0.0\n        for", "        for"),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
