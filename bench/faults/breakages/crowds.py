"""Mutants of what spares a server work that has many silos, for `tests/flower` to notice."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/common/test_allocation.py",
    "tests/flower/internals/test_heartbeats.py",
    "tests/flower/internals/test_known_runs.py",
    "tests/flower/internals/test_leftovers.py",
    "tests/flower/internals/test_answering.py",
    "tests/flower/internals/test_quota.py",
    "tests/flower/internals/test_answer_looks.py",
    "tests/flower/internals/test_one_transaction.py",
    "tests/flower/internals/test_app_tasks.py",
    "tests/core/test_claims.py",
    "tests/flower/internals/test_node_proof.py",
    "tests/flower/internals/test_serving.py",
    "tests/flower/internals/test_registration.py",
    "tests/flower/internals/test_turns.py",
    "tests/flower/internals/test_bundles.py",
    "tests/flower/test_outbox.py",
    "tests/config/test_user_config.py",
)

_CHANGES: Changes = {
    "common/allocation.py": (
        ("what-connections-had-is-kept", "        tune(_M_MMAP_THRESHOLD, MAPPED_BYTES)\n", "        pass\n"),
        ("modules-are-looked-through-again-and-again", "    gc.freeze()\n", ""),
    ),
    "flower/messages.py": (
        ("large-messages-go-together", "lambda each: not each.content.array_records", "lambda each: True"),
    ),
    "flower/internals/heartbeats.py": (
        ("who-beats-without-end-goes-first", "if node_id in self._went:", "if False:"),
        ("who-has-beaten-once-never-goes-first-again", ">= PROMPT_S:", ">= 3600.0:"),
        (
            "what-was-heard-is-never-written",
            "            heard, self._heard = self._heard, {}\n",
            "            return\n",
        ),
        (
            "a-node-that-went-is-brought-back-by-what-was-heard",
            '.where(Node.node_id == bindparam("which"), Node.status == NodeStatus.ONLINE)',
            '.where(Node.node_id == bindparam("which")).values(status=NodeStatus.ONLINE)',
        ),
        ("a-node-expires-between-two-looks", "ends_s > now_s + RISK_S", "ends_s > now_s"),
        (
            "a-node-that-looks-expires-all-the-same",
            "if due or ends_s <= now_s + RISK_S:",
            "if due or ends_s <= now_s - 1e3:",
        ),
        ("what-looks-say-is-never-written", "if due or ends_s <=", "if ends_s <="),
        (
            "a-node-that-went-is-taken-for-online",
            "                self._written.pop(node, None)\n            return change",
            "            return change",
        ),
    ),
    "flower/internals/known_runs.py": (
        ("each-node-reads-a-run-by-itself", "            if due_s <= self._clock():\n", "            if True:\n"),
        ("a-run-that-ended-runs-for-ever", "if due_s <= self._clock():", "if what not in self._known:"),
        (
            "a-node-asks-in-anothers-name",
            "fleet_handlers.get_fab(fab, state) if fab.node.node_id == node else None",
            "fleet_handlers.get_fab(fab, state)",
        ),
        ("what-is-refused-is-asked-without-a-body", '"body": body,', '"body": b"",'),
        ("all-runs-that-anybody-named-are-kept", "len(self._known) >= _MOST", "len(self._known) >= 10**6"),
    ),
    "flower/internals/leftovers.py": (
        (
            "what-a-dead-run-left-stays-for-ever",
            "                state.cleanup_run(run.run_id)\n",
            "                pass\n",
        ),
        (
            "a-run-that-begins-empties-the-others",
            "state.get_run_info(statuses=[Status.FINISHED])",
            "state.get_run_info()",
        ),
        ("a-log-grows-with-its-run", "if next(pieces) % _SELDOM == 0:", "if False:"),
        ("a-run-s-log-takes-another-s-away", "WHERE task_id = :task AND timestamp <=", "WHERE timestamp <="),
        ("an-earlier-piece-of-a-log-stays-than-the-newest", "ORDER BY timestamp DESC", "ORDER BY timestamp"),
    ),
    "flower/internals/answering.py": (
        ("a-supernode-keeps-a-task-of-each-message", "        make_no_tasks(state)\n", ""),
    ),
    "flower/internals/access_middleware.py": (
        ("nobody-looks-for-what-dead-runs-left", "    forget_runs_that_are_over(state)\n", ""),
        ("nobody-shortens-logs", "    forget_old_logs(state)\n", ""),
    ),
    "flower/internals/answer_looks.py": (
        ("an-answer-that-flower-makes-up-is-never-found", "now_s - at_s >= max(", "at_s == -inf and now_s >= max("),
        ("an-app-that-was-started-again-is-told-nothing", "before != token or ", ""),
        (
            "answers-beyond-a-look-are-forgotten",
            "                self._stored[run] = later\n",
            "                pass\n",
        ),
    ),
    "flower/internals/replies.py": (
        (
            "a-part-is-counted-by-a-look-at-all-silos",
            "if self._owners.get(session, node) != node:",
            "if any(session in each.sessions for who, each in list(self._silos.items()) if who != node):",
        ),
        ("an-answer-that-is-announced-again-counts-twice", "                self._drop(node, before)\n", ""),
        ("what-was-fetched-still-fills-a-silo-s-room", "            self.parts -= waiting.parts\n", ""),
        ("a-silo-has-room-for-one-answer-more", "len(own.sessions) - again <", "len(own.sessions) - again <="),
    ),
    "flower/internals/bundle_routes.py": (
        (
            "a-silo-is-kept-alive-by-another",
            "        if told.node.node_id != node:\n            raise NoParcel(401",
            "        if False:\n            raise NoParcel(401",
        ),
        (
            "an-answer-is-no-heartbeat",
            "answers=True)\n            await self._lives(node)\n",
            "answers=True)\n",
        ),
        ("a-look-is-no-heartbeat", "if not self._hear(node):", "if self._hear(node) is None:"),
        ("a-heartbeat-waits-for-all-nodes", "self._beat, node, beat, first=", "self._beat, node, beat, answers="),
    ),
    "flower/internals/bundle_client.py": (
        (
            "a-silo-that-looks-in-vain-sends-no-heartbeats",
            "_NEVER if frames is None else time.monotonic()",
            "time.monotonic()",
        ),
        (
            "a-silo-that-answers-sends-heartbeats-too",
            "        self._heard_s = time.monotonic()\n        answer =",
            "        answer =",
        ),
        ("a-silo-that-looks-sends-heartbeats-too", "< HEARD_S:", "< 0.0:"),
        ("an-answer-that-is-here-is-fetched-by-threads", "return 0 < parts == len(", "return 0 < parts < len("),
    ),
    "flower/nodes.py": (
        ("all-nodes-are-looked-at-all-the-time", "max(self._look_s, took_s + ", "min(self._look_s, took_s + "),
    ),
    "core/claims.py": (
        (
            "what-all-silos-say-is-kept-for-each",
            "next((other for other in said.values() if other == claim), claim)",
            "claim",
        ),
        ("the-first-lie-is-what-all-say", "if other == claim), claim)", "if other), claim)"),
    ),
    "flower/internals/app_tasks.py": (
        ("an-app-that-died-asks-on", "if now_s - each[1] < CLEAN_UP_S}", "if True}"),
        (
            "each-request-of-an-app-asks-who-it-is",
            "            self._known[token] = task, now_s\n        return self._known[token][0]",
            "            return task\n        return self._known[token][0]",
        ),
    ),
    "flower/internals/node_proof.py": (
        ("a-proof-is-used-for-ever", "if not 0.0 <= clock() - made_s < PROOF_S:", "if not made_s >= 0.0:"),
        ("a-proof-outlives-a-clock-that-was-set", "not 0.0 <= clock() - made_s", "not clock() - made_s"),
        (
            "each-request-is-signed",
            "            proof, kept = headers, (headers, made_s)\n",
            "            proof = headers\n",
        ),
    ),
    "flower/internals/callers.py": (
        (
            "a-signature-that-was-seen-proves-any-time",
            "self._proved.get(signature) == (key, message) or",
            "signature in self._proved or",
        ),
        (
            "each-proof-is-checked-each-time",
            "self._proved.get(signature) == (key, message) or verify",
            "verify",
        ),
    ),
    "flower/internals/serving.py": (
        (
            "a-superlink-says-nothing-however-much-is-asked",
            ", default=0) or logging.DEBUG",
            ", default=0) and logging.INFO",
        ),
    ),
    "flower/internals/bundle_objects.py": (
        (
            "parts-that-others-have-go-with-a-message",
            ' AND ref_count > 0", [child])\n            self.delete(child)',
            '", [child])\n            self._do("DELETE FROM objects WHERE object_id = ?", [child])',
        ),
        ("a-part-is-not-what-its-name-says", "                _check(name, content)\n", ""),
    ),
    "flower/internals/one_transaction.py": (
        ("all-parts-are-looked-at-for-one-that-goes", '"run_objects": "object_id"', '"run_objects": "run_id"'),
        ("all-messages-are-looked-at-for-one-node", '"dst_node_id, delivered_at"}', '"ttl"}'),
        ("answers-of-nodes-that-are-gone-count", "len(here) < len(nodes) or any", "any"),
        ("answers-that-are-too-old-count", "<= time.timestamp() for row in rows", "<= 0.0 for row in rows"),
        ("an-app-gets-answers-of-another-run", ' or any(row["run_id"] != run for row in asked)', ""),
        ("an-answer-is-handed-out-again", """there = f"delivered_at = '' AND reply_to""", 'there = f"reply_to'),
        (
            "bytes-are-counted-once-a-bundle",
            "        self._took[run_id][1] += bytes_recv",
            "        self._took[run_id][1] = bytes_recv",
        ),
        ("what-is-too-old-is-answered", 'row["created_at"] + row["ttl"] > late_s and', ""),
        (
            "who-finds-nothing-writes",
            "        time, node = now(), uint64_to_int64(node_id)\n",
            '        time, node = now(), uint64_to_int64(node_id)\n        self._do("DELETE FROM run WHERE 0", [])\n',
        ),
    ),
    "flower/internals/turns.py": (
        (
            "the-app-waits-for-all-nodes",
            "kinds = (self._first, *nodes) if",
            "kinds = (*nodes, self._first) if",
        ),
        ("an-app-without-end-keeps-all-others-waiting", "if self._in_a_row < MOST_FIRST else", "if True else"),
        (
            "one-turn-of-a-node-ends-the-apps-preference",
            "            self._in_a_row = 0\n            self._answered",
            "            self._answered",
        ),
        (
            "what-goes-first-puts-answers-before-looks",
            "            self._in_a_row += 1\n",
            "            self._in_a_row += 1\n            self._answered = False\n",
        ),
        ("answers-wait-for-all-that-look", "self._answered = waiting is self._answers", "self._answered = True"),
        ("answers-keep-all-from-their-orders", "self._answered = waiting is self._answers", "self._answered = False"),
        (
            "who-goes-away-takes-the-turn-along",
            "                    self._pass_on()\n                raise",
            "                    pass\n                raise",
        ),
    ),
    "flower/internals/registration.py": (
        (
            "each-key-asks-for-all-that-there-are",
            "                    if registry is None:\n",
            "                    if True:\n",
        ),
    ),
    "flower/internals/waiting.py": (
        ("an-order-that-is-fetched-waits-for-ever", "    delivered_at = ''\n", "    1\n"),
        ("an-answer-that-waits-is-lost", "reply_to_message_id = message_ins.message_id AND", "0 AND"),
        ("an-app-hears-of-others-messages", "WHERE run_id = ? AND", "WHERE ? AND"),
    ),
    "config/run_spec.py": (
        ("more-silos-than-a-sum-holds-cannot-seal", "return min(asked, sealed.limit)", "return asked"),
        ("a-commit-has-more-than-a-sum-holds", " or most > sealed.limit:", ":"),
    ),
    "flower/outbox.py": (
        (
            "what-waits-at-the-server-is-asked-for-again",
            "        for identifier in self._arrivals.waiting(soon):\n",
            "        for identifier in ():\n",
        ),
        (
            "what-waits-at-the-server-is-never-asked-for-again",
            "ask_s=now_s + self._patience_s(sent))\n        quiet",
            "ask_s=inf)\n        quiet",
        ),
        (
            "a-request-that-failed-counts-as-sent",
            "                if identifier:\n                    self._sent",
            "                if identifier or sent.works:\n                    self._sent",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
