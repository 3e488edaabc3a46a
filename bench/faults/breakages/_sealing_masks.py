"""The part of `sealing` that breaks masks."""

from __future__ import annotations

from bench.faults.breakages._core import Changes

MASKS: Changes = {
    "cipher/masking/annex.py": (
        (
            "another-own-seed-is-taken",
            " or commitment(seeds.own) != self.own:",
            ":",
        ),
        (
            "another-pair-s-seed-is-taken",
            "if any(told[name] != self.pairs[name] for name in told):",
            "if False:",
        ),
        (
            "one-share-less-gives-a-seed",
            "[split(seed, threshold, holders.values())",
            "[split(seed, threshold - 1, holders.values())",
        ),
        (
            "shares-are-sealed-under-one-nonce",
            "nonce = secrets.token_bytes(_NONCE_BYTES)",
            "nonce = bytes(_NONCE_BYTES)",
        ),
        (
            "shares-of-both-directions-have-one-key",
            "pack_frames([context, dealer.encode(), holder.encode()])",
            "pack_frames([context, *sorted([dealer.encode(), holder.encode()])])",
        ),
        (
            "a-commitment-is-the-seed",
            'return hashlib.sha256(b"fedsync mask seed 1" + seed).digest()',
            "return seed[:32]",
        ),
        (
            "a-polynomial-of-too-low-a-degree",
            "for _ in range(threshold - 1))",
            "for _ in range(threshold - 2))",
        ),
        (
            "coefficients-are-drawn-from-a-small-range",
            "draw: Callable[[int], int] = secrets.randbelow",
            "draw: Callable[[int], int] = lambda most: secrets.randbelow(2**16)",
        ),
    ),
    "cipher/masking/mask_log.py": (
        (
            "masks-come-from-long-lived-keys",
            "self.pair = fresh_pair(ring.own)\n",
            "self.pair = ring.own\n",
        ),
        (
            "a-mask-is-used-twice",
            "if base < newest or (base == newest and (attempt in attempts or len(attempts) >= MAX_ATTEMPTS)):",
            "if base < newest:",
        ),
        (
            "used-masks-are-not-written-down",
            "(attempt,)\n            self._write(file)",
            "(attempt,)",
        ),
        (
            "the-book-of-masks-is-not-on-disk-in-time",
            '            write_private(file, f"{self.pair',
            '            file.write_bytes(f"{self.pair',
        ),
        (
            "masks-are-used-before-they-are-written-down",
            "        self._log.enter(order.base_version, attempt)\n",
            "",
        ),
        (
            "two-processes-write-one-book",
            "stack.enter_context(taken(path, inf))",
            "path.touch()",
        ),
        (
            "a-damaged-book-counts-as-empty",
            "    except (IndexError, ValueError):\n        raise _damaged(file) from None",
            "    except (IndexError, ValueError):\n        return bytes(KEY_BYTES), (-1, ())",
        ),
        (
            "the-book-in-use-is-removed",
            " - {file, file.parent / _LOCK}",
            " - {file.parent / _LOCK}",
        ),
        (
            "seeds-are-kept-for-ever",
            "dict(list(self._rounds.items())[-_ROUNDS:])",
            "dict(self._rounds)",
        ),
        (
            "seeds-of-opened-sums-are-kept",
            " if made[0] >= version}",
            "}",
        ),
    ),
    "cipher/masking/mask_round.py": (
        ("masks-are-not-bound-to-the-run", '"fedsync mask context 3", run, chain,', '"fedsync mask context 3", chain,'),
        ("masks-are-not-bound-to-the-roster", '"little"), roster.digest, pack_named', '"little"), pack_named'),
        (
            "masks-are-not-bound-to-the-learning-rate",
            "field.name not in OWN]",
            'field.name not in OWN | {"learning_rate"}]',
        ),
        (
            "own-masks-are-all-alike",
            "Seeds(secrets.token_bytes(KEY_BYTES), pair_seeds",
            "Seeds(bytes(KEY_BYTES), pair_seeds",
        ),
        (
            "own-masks-follow-from-the-context",
            "Seeds(secrets.token_bytes(KEY_BYTES), pair_seeds",
            "Seeds(hashlib.sha256(own.exchange + context).digest(), pair_seeds",
        ),
        (
            "pair-masks-are-the-same-in-each-round",
            "own.agree(other, _PAIR + context)",
            "own.agree(other, _PAIR)",
        ),
        (
            "masks-are-put-on-twice",
            "if first != self._masked or self._survivors is not None:",
            "if False:",
        ),
        (
            "a-silo-signs-two-lists",
            "if self._survivors not in (None, survivors):",
            "if False:",
        ),
        (
            "a-list-without-the-own-update-is-signed",
            "if survivors.annexes.get(self._own.name) != annex_stub(self.annex):",
            "if False:",
        ),
        (
            "masks-are-revealed-with-one-signature-less",
            "self._roster.keys, self._roster.threshold)",
            "self._roster.keys, self._roster.threshold - 1)",
        ),
        (
            "both-kinds-of-seeds-are-revealed",
            "self._seeds.only(dropped), shares)",
            "self._seeds, shares)",
        ),
        (
            "both-kinds-of-shares-are-told",
            "self._shares(survivors, name, data).only(dropped) for",
            "self._shares(survivors, name, data) for",
        ),
        (
            "a-silo-tells-shares-of-itself",
            "!= annex_stub(data) or name == self._own.name:",
            "!= annex_stub(data):",
        ),
        (
            "shares-of-another-context-are-told",
            "if of.context != self.context or of.pairs",
            "if of.pairs",
        ),
        (
            "shares-under-another-roster-are-told",
            " or of.pairs.keys() | {name} != self._roster.keys.keys():",
            ":",
        ),
        (
            "signatures-of-anything-count",
            "if name not in self.annexes or not self.signed_by(keys[name].signing, signature):",
            "if name not in self.annexes:",
        ),
        (
            "a-list-is-signed-without-its-context",
            "return pack_frames([self.context, pack_named(self.annexes)])",
            "return pack_frames([pack_named(self.annexes)])",
        ),
    ),
    "cipher/masking/masks.py": (
        (
            "an-annex-that-was-not-sealed-is-used",
            "if any(annex_digest(annex) != digests[name] for name, (annex, _) in entries.items()):",
            "if False:",
        ),
        (
            "seeds-that-nobody-committed-to-are-used",
            "            annexes[name].check(seeds, dropped, SERVER)\n",
            "",
        ),
    ),
    "cipher/masking/mask_roster.py": (
        (
            "a-sum-of-two-is-opened",
            "return colluding + 2",
            "return colluding + 1",
        ),
        (
            "two-lists-get-enough-signatures",
            "return (silos + colluding) // 2 + 1",
            "return (silos + colluding) // 2",
        ),
        (
            "one-key-for-all-runs",
            "return replace(own, exchange=exchange or secrets.token_bytes(KEY_BYTES))",
            "return replace(own, exchange=exchange or own.exchange)",
        ),
        (
            "the-server-announces-for-a-silo",
            "if len(announcement) != ANNOUNCEMENT_BYTES or not is_signed(signing, _SIGNED, text, signature):",
            "if len(announcement) != ANNOUNCEMENT_BYTES:",
        ),
        (
            "an-announcement-of-another-run-is-used",
            "if any(other != run for other, _ in found.values()):",
            "if False:",
        ),
    ),
    "cipher/masking/unmask.py": (
        (
            "the-server-joins-shares-unchecked",
            "                annex.check(seeds[name], set(self._dropped), name)\n",
            "",
        ),
    ),
}
