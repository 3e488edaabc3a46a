"""Mutants of relays: sums of regions, for their tests to notice."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/cipher/server/test_region.py",
    "tests/model/test_region.py",
    "tests/attacks/test_lying_relay.py",
    "tests/attacks/test_lying_region_member.py",
    "tests/attacks/test_lying_relay_messages.py",
    "tests/silo/test_relay.py",
    "tests/server/test_region_clients.py",
    "tests/server/test_nodes.py",
    "tests/flower/test_relay_app.py",
    "tests/ops/test_run_watchdog.py",
    "tests/extras/doctor/test_doctor.py",
)

_CHANGES: Changes = {
    "extras/relays/relay.py": (
        (
            "a-slow-silo-keeps-its-region-waiting",
            "ready = run.ready_s is not None and (not run.waiting or",
            "ready = run.ready_s is not None and (not run.waiting and",
        ),
        ("a-relay-answers-each-silo-alone", "(not run.waiting or now_s >= run.ready_s)", "True"),
        (
            "a-bad-report-spoils-its-region",
            "            check_report(silo, order, meta, report)\n",
            "            pass\n",
        ),
        (
            "an-old-server-s-questions-are-answered-to-a-new-one",
            "if run is None or run.session != request.session:",
            "if run is None:",
        ),
        ("what-was-collected-is-added-unchecked", "order is None or ask.update_id", "ask.update_id"),
        ("a-silo-s-words-have-no-end", "        if len(came.text) > waiting.most:\n", "        if False:\n"),
        ("an-answer-goes-where-there-is-no-room", "other.most > mine.most for", "False for"),
        ("all-answers-come-together", "        if told and length > MOST_TEXT:\n", "        if False:\n"),
        (
            "what-could-not-be-added-is-added-for-ever",
            "run.kept = {update_id: number for update_id, number in run.kept.items() if update_id not in kept}",
            "pass",
        ),
        (
            "orders-without-answer-fill-memory",
            "                while len(run.orders) > _ORDERS:\n",
            "                while False:\n",
        ),
        ("a-silo-that-went-is-waited-for", "                self._forget_gone()\n", ""),
        ("silos-that-come-are-told-late", "return ready or run.told != self._here", "return ready"),
    ),
    "extras/relays/relay_line.py": (
        (
            "what-is-asked-meanwhile-is-forgotten",
            "            return self._silos.receive()",
            "            self._silos.keep(most)\n            return self._silos.receive()",
        ),
    ),
    "silo/agent/answers.py": (
        (
            "a-relay-s-node-refuses-as-a-silo-does",
            "return write_reply(Refused(code_of(error))), None",
            "return refusal(error), None",
        ),
        ("an-app-that-is-started-again-is-a-stack-trace", "exc_info=None if known else error", "exc_info=error"),
    ),
    "ops/run_watchdog.py": (
        (
            "a-run-without-versions-is-resumed-at-one",
            'at = "" if version is None else f" at version {version}"',
            'at = f" at version {version}"',
        ),
    ),
    "server/outbox.py": (
        (
            "what-was-in-no-sum-is-asked-for-some-time",
            "ask_s=-inf)\n        return answer.again",
            "ask_s=inf)\n        return answer.again",
        ),
    ),
    "extras/relays/region_clients.py": (
        (
            "a-sum-that-is-none-fails-its-orders",
            "again = bool(summed.get(answer.number)) and not answer.problem",
            "again = False",
        ),
        ("what-was-in-no-sum-is-added-again", "self.adds and not apart else", "self.adds else"),
        (
            "there-is-room-for-what-was-asked-before",
            "for number, bytes_ in relay.room.items() if number in relay.here",
            "for bytes_ in ()",
        ),
        (
            "a-mean-has-the-room-of-updates",
            "most, room = max(letter.most, letter.in_sum),",
            "most, room = letter.most,",
        ),
        (
            "a-part-of-an-answer-counts",
            "            piece_of(pieces, number, relay.name)  # validate",
            "            pass  # validate",
        ),
        ("silos-that-went-stay-in-memory", "        if len(relay.numbers) > MAX_SILOS:\n", "        if False:\n"),
        (
            "a-relay-with-nothing-to-say-is-asked-at-once",
            "            relay.quiet_s = now_s + max(pause_s, _REST * (now_s - begun_s))\n",
            "            pass\n",
        ),
        ("a-sum-is-of-whom-a-relay-says", 'known != members.update_ids or "" in known', "False"),
        ("who-is-behind-a-relay-that-went-stays", "                self._forget(node)\n", "                pass\n"),
        ("a-model-goes-to-each-silo-of-a-region", "        if piece is payload:\n", "        if False:\n"),
        (
            "what-could-not-be-read-is-never-asked-again",
            "            pause_s = _PAUSES.pause_s(relay.refused)\n",
            "            raise\n",
        ),
    ),
    "server/nodes.py": (
        (
            "any-silo-may-be-a-relay",
            "if name not in regions if regions is not None else self._registered_only:",
            "if False:",
        ),
        ("a-relay-is-a-silo", "if name in (self._admission.regions or {}) and not self.is_relayed(node):", "if False:"),
        ("a-relay-has-silos-of-others", "if region is not None and name not in region:", "if False:"),
    ),
    "extras/doctor/preflight.py": (
        ("nobody-looks-at-what-is-above-a-relay", "    if config.upstream is not None:\n", "    if False:\n"),
        (
            "a-relay-s-way-up-is-not-tried",
            "    yield from _check_way(lambda: way_to(upstream.server",
            "    yield from () and _check_way(lambda: way_to(upstream.server",
        ),
    ),
    "config/compatibility.py": (
        (
            "what-a-commit-takes-in-part-is-added-up",
            "return weighed and config.barrier.innermost.most_updates is None",
            "return weighed",
        ),
    ),
    "extras/relays/sealed_sum.py": (
        (
            "members-are-whoever-a-relay-names",
            "wire.read_slip(payload[at : at + length], wanted)",
            "wire.read_slip(payload[at : at + length], __import__('dataclasses').replace(wanted, public=None))",
        ),
        ("the-tag-of-a-region-is-that-of-one", "tag = added(tag, slip.tag, first.form)", "pass"),
        ("words-of-a-region-are-any-numbers", "    if fault is not None:\n        raise fault\n", ""),
    ),
    "cipher/server/chain.py": (
        (
            "members-of-regions-are-named-in-another-order",
            "return members if alone else tuple(sorted(members, key=lambda member: member.update_id))",
            "return members",
        ),
    ),
    "cipher/server/inbox.py": (
        (
            "a-region-counts-in-the-clear-as-one-silo",
            "weight = sum(weights[update_id] for update_id in update.update_ids)",
            "weight = weights[update.update_ids[0]]",
        ),
        (
            "a-region-is-added-once-for-each-member",
            "apart = list(dict.fromkeys(updates.values()))",
            "apart = list(updates.values())",
        ),
        (
            "a-part-of-a-region-s-sum-counts",
            "if not set(members) <= set(named)]",
            "if False]",
        ),
        (
            "a-sum-with-a-discarded-update-counts",
            "        self._spoil(update_id)\n        self._spoiled.discard(update_id)",
            "        self._pending.pop(update_id, None)\n        self._spoiled.discard(update_id)",
        ),
        (
            "what-was-spoiled-comes-again-alone",
            "if update_id not in self._ordered or update_id in self._spoiled:",
            "if update_id not in self._ordered:",
        ),
    ),
    "extras/relays/sealed_region.py": (
        (
            "a-relay-adds-up-what-is-on-other-grids",
            "return head.round, head.attempt, head.grid, head.members[0].chain, names",
            "return (names,)",
        ),
        (
            "a-relay-keeps-what-nobody-signed",
            "None, plan.chunks, update_id, public,",
            "None, plan.chunks, update_id, None,",
        ),
    ),
    "model/commit_updates.py": (
        ("a-region-counts-as-one-silo", "first: sum(weights[member] for member in whole)", "first: weights[first]"),
        (
            "a-part-of-a-region-s-mean-counts",
            "not weights.keys() >= set(whole)",
            "False",
        ),
        ("nothing-makes-up-for-a-region-that-does-not-count", "if left_out and own:", "if False:"),
    ),
    "extras/relays/plain_region.py": (
        ("a-relay-weighs-all-silos-the-same", "np.float32(share / whole)", "np.float32(1 / len(updates))"),
        ("a-relay-adds-up-updates-of-other-versions", "by_base.setdefault(base, {})", "by_base.setdefault(0, {})"),
    ),
    "model/plain_aggregator.py": (
        ("sums-of-regions-are-in-no-checkpoint", '    "sums": "_waiting.sums",\n', ""),
        (
            "a-mean-of-other-versions-is-taken",
            "if len({self._bases[update_id][0] if update_id in self._bases else -1 for update_id in update_ids}) != 1:",
            "if False:",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
