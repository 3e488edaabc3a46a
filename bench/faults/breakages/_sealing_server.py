"""The part of `sealing` that breaks the server without a key, and what a silo's owner allows."""

from __future__ import annotations

from bench.faults.breakages._core import Changes

SERVER: Changes = {
    "cipher/server/sealed_aggregator.py": (
        (
            "greetings-are-more-than-a-sum-holds",
            "self._total(usual[: self._plan.limit], 0, 1)",
            "self._total(usual, 0, 1)",
        ),
        (
            "a-calibration-of-too-few",
            "if len(self._calibrations) < self._plan.members:",
            "if False:",
        ),
        (
            "a-sum-of-too-few-goes-out",
            "if silos < least:",
            "if False:",
        ),
        (
            "a-snapshot-of-any-size-is-kept",
            "if snapshot.dtype != np.uint8 or len(snapshot) > self.snapshot_bytes:",
            "if snapshot.dtype != np.uint8:",
        ),
    ),
    "cipher/server/chain.py": (
        (
            "a-sum-that-cannot-be-opened-is-made",
            "if count > limit:",
            "if False:",
        ),
        (
            "one-member-of-a-sum-is-forgotten",
            "for envelope in envelopes[1:]:",
            "for envelope in envelopes[2:]:",
        ),
        (
            "one-member-s-tag-is-forgotten",
            "        tag = added(tag, envelope.tag, adder.form)\n",
            "        pass\n",
        ),
        (
            "an-update-from-before-attests",
            "if one.round >= self.candidate.version}",
            "}",
        ),
    ),
    "cipher/server/inbox.py": (
        (
            "masks-with-strangers-are-taken",
            "if not roster <= self._keys.senders.keys():",
            "if False:",
        ),
        (
            "signatures-of-updates-are-ignored",
            "keys.fingerprint, None, chunks, update_id, self.key_of(silo),",
            "keys.fingerprint, None, chunks, update_id, self.key_of(silo) and None,",
        ),
        (
            "an-update-that-silos-have-forgotten-is-added",
            "one.envelope.head.round <= newest - WINDOW",
            "one.envelope.head.round < newest - WINDOW",
        ),
        (
            "one-silo-of-another-past-ends-the-round",
            "(one.envelope.head.round, one.envelope.head.members[0].chain), past)",
            "(0, b''), past)",
        ),
        (
            "a-sealed-update-is-committed-twice",
            "taken = {update_id: self._pending.pop(update_id) for update_id in named if",
            "taken = {update_id: self._pending[update_id] for update_id in named if",
        ),
        (
            "a-committed-order-is-answered-again",
            "            self._ordered.pop(update_id, None)\n        self._drop",
            "            pass\n        self._drop",
        ),
        (
            "a-restarted-server-asks-for-masks-again",
            "            self._attempts.restart(version)",
            "            pass",
        ),
    ),
    "silo/owner/lockout.py": (
        (
            "a-silo-answers-a-fourth-forgery",
            "LIMIT = 3",
            "LIMIT = 4",
        ),
        (
            "forgeries-are-not-written-down",
            "self._write(replace(counted, failures=(*counted.failures, failure)[-LIMIT:]))",
            "pass",
        ),
    ),
    "silo/session/session.py": (
        (
            "a-locked-silo-trains",
            "with self._exchange, nullcontext() if self.lockout is None else self.lockout.alone():",
            "with self._exchange:",
        ),
        (
            "the-server-can-tell-checks-apart",
            "                raise IntegrityError(failure.sender, failure.check, failure.detail) from error",
            "                raise failure from error",
        ),
    ),
    "silo/owner/owner_policy.py": (
        (
            "a-run-without-masks-is-taken",
            "if self.seal.masks and not plan.masked:",
            "if False:",
        ),
    ),
}
