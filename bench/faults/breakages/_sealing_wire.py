"""The part of `sealing` that breaks what travels: encoding of sums, headers, tags and tallies."""

from __future__ import annotations

from bench.faults.breakages._core import Changes

WIRE: Changes = {
    "cipher/encoding/catch_up.py": (
        (
            "fewer-than-half-stand-for-a-snapshot",
            "return -(-silos // 2)",
            "return silos // 2",
        ),
        (
            "any-number-of-links-is-read",
            "if count > MAX_LINKS or not",
            "if not",
        ),
        (
            "a-catch-up-leads-backwards",
            "not -1 <= base <= to or attempt",
            "attempt",
        ),
        (
            "an-attempt-of-any-size-is-kept",
            " or attempt > MAX_ATTEMPT:",
            ":",
        ),
        (
            "one-link-counts-for-many-versions",
            "if count != to - max(base, 0):",
            "if False:",
        ),
        (
            "an-entry-of-no-version-is-read",
            "if not 1 <= version <= newest or not 1 <= sums <= MAX_SUMS:",
            "if not 1 <= sums <= MAX_SUMS:",
        ),
        (
            "one-link-adds-two-versions",
            "if not {LinkKind.ADD: count == 1, LinkKind.UNDO: count >= 1, LinkKind.EMPTY: count == 0}[link.kind]:",
            "if False:",
        ),
        (
            "a-catch-up-may-have-a-tail",
            "if reader.at != len(reader.view):",
            "if False:",
        ),
    ),
    "cipher/encoding/integrity.py": (
        (
            "forged-sums-are-opened",
            "if not hmac.compare_digest(TAG.pack(*expected), TAG.pack(*envelope.tag)):",
            "if False:",
        ),
        (
            "half-of-a-tag-is-compared",
            "hmac.compare_digest(TAG.pack(*expected), TAG.pack(*envelope.tag))",
            "hmac.compare_digest(TAG.pack(*expected)[:8], TAG.pack(*envelope.tag)[:8])",
        ),
        (
            "what-is-opened-is-not-compared-with-what-was-authenticated",
            "if hasher.value() != reached:",
            "if False:",
        ),
        (
            "both-checks-of-a-tag-share-a-pad",
            "wide[32 * check : 32 * check + 32]",
            "wide[:32]",
        ),
        (
            "a-tag-has-no-pad",
            'hmac.digest(self._pad_key, b"fedsync pad of a tag 1\\0" + member_context(head, member), "sha512")',
            "bytes(64)",
        ),
        (
            "pads-and-factors-share-a-key",
            'self._derived(b"pad")',
            'self._derived(b"s")',
        ),
        (
            "chunks-can-be-exchanged",
            "factors = self._factors.words(2 * TAG_PARTS * count).reshape",
            "factors = np.tile(self._factors.words(2 * TAG_PARTS * count)[: 2 * TAG_PARTS], count).reshape",
        ),
    ),
    "cipher/encoding/sealed_wire.py": (
        (
            "a-tag-beyond-the-modulus-is-added",
            "if max(tag) >= head.form.modulus:",
            "if False:",
        ),
        (
            "anybody-seals-in-a-silo-s-name",
            "if expected.public is not None and not is_signed(",
            "if False and not is_signed(",
        ),
        (
            "words-beyond-the-modulus-are-added",
            "    if fault is not None:\n        raise fault\n",
            "",
        ),
        (
            "an-annex-of-any-size-is-read",
            "    if annexed > most:\n",
            "    if False:\n",
        ),
        (
            "updates-of-an-older-key-are-taken",
            '    same("key epoch", head.epoch, expected.epoch)\n',
            "",
        ),
        (
            "another-update-is-taken-for-the-one-that-was-ordered",
            '            same("update id", head.members[0].update_id, expected.update_id)\n',
            "            pass\n",
        ),
        (
            "the-epoch-is-not-under-the-tag",
            "packing.count, head.epoch, head.attempt, head.chunks),",
            "packing.count, 0, head.attempt, head.chunks),",
        ),
        (
            "the-attempt-is-not-under-the-tag",
            "packing.count, head.epoch, head.attempt, head.chunks),",
            "packing.count, head.epoch, 0, head.chunks),",
        ),
        (
            "the-grid-is-not-under-the-tag",
            "*(head.fingerprint, head.grid),\n    )\n    return bound",
            "*(head.fingerprint, bytes(32)),\n    )\n    return bound",
        ),
        (
            "words-and-annex-are-not-under-the-tag",
            "return bound + write_member(member, digests=True)",
            "return bound + write_member(member, digests=False)",
        ),
    ),
    "cipher/encoding/quantization.py": (
        (
            "one-silo-s-value-fills-the-lane",
            "if integers.max(initial=0) > bound or integers.min(initial=0) < -bound:",
            "if False:",
        ),
        (
            "values-behind-the-model-are-passed-over",
            "if integers[max(self.layout.size - start, 0) :].any():",
            "if False:",
        ),
    ),
    "cipher/encoding/sums.py": (
        (
            "counts-of-nobody-are-figures",
            "if max(sums) > evaluators * most or min(sums) < (0 if one.whole else -evaluators * most):",
            "if False:",
        ),
        (
            "histograms-count-other-samples-than-there-are",
            "if problem or counted != evaluation.samples:",
            "if problem:",
        ),
        (
            "sums-that-no-samples-come-to-are-figures",
            "if problem or counted != evaluation.samples:",
            "if counted != evaluation.samples:",
        ),
    ),
    "cipher/encoding/tally.py": (
        (
            "silos-answer-different-questions-with-one-figure",
            " or int(flat[_SQUARE]) != evaluators * asked**2:",
            ":",
        ),
        (
            "a-silo-counts-for-another-number",
            "if count != members or not 1 <= count <= MAX_COUNT:",
            "if not 1 <= count <= MAX_COUNT:",
        ),
        (
            "one-silo-weighs-more-than-the-cap",
            "if not count <= weight <= count * cap:",
            "if not count <= weight:",
        ),
        (
            "one-vote-sets-the-grid",
            "enough = np.cumsum(tally.votes, axis=1) >= tally.count - spared",
            "enough = np.cumsum(tally.votes, axis=1) >= tally.count",
        ),
        ("a-grid-that-clips-stays", "if all(0 <= exponent - need", "if all(-9 <= exponent - need"),
        ("grids-change-with-every-idle-bit", "<= 2 * headroom for", "<= headroom for"),
        (
            "a-busy-liar-s-second-vote-sets-the-grid",
            "return sum(sorted(voters.values(), reverse=True)[:lying])",
            "return min(lying, sum(voters.values()) - 1)",
        ),
    ),
}
