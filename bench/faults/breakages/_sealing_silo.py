"""The part of `sealing` that breaks what a silo reads, follows and remembers."""

from __future__ import annotations

from bench.faults.breakages._core import Changes

_AUTHENTICATED = "self._authenticator.authenticate(one, SERVER)"


def unchecked(one: str) -> str:
    """What is opened as if it had been authenticated."""
    words = f"'spans': lambda self, one={one}: iter([one.words.copy()]), 'first': {one}.words[:1]"
    return f"type('Unchecked', (), {{'head': {one}.head, {words}}})()"


SILO: Changes = {
    "cipher/silo/replay_log.py": (
        (
            "what-a-silo-came-to-is-not-written-down",
            "                write_private(self._folder / self._file, self._memory.to_bytes())",
            "                pass",
        ),
        (
            "a-run-has-names-without-end",
            "if len(entries.names) >= MOST_NAMES:",
            "if False:",
        ),
        (
            "each-new-name-leads-back-further",
            "oldest = min(entries.chains, default=0)",
            "oldest = 0",
        ),
        (
            "a-run-that-is-over-is-played-again",
            "if self._run in self._over():",
            "if False:",
        ),
        (
            "all-runs-share-a-log",
            'return f"{self._epoch}-{self._run.hex()}"',
            "return f\"{self._epoch}-{'0' * 64}\"",
        ),
        (
            "what-was-evaluated-is-forgotten-with-the-process",
            "            if self.file is not None:\n                text",
            "            if False:\n                text",
        ),
        (
            "an-order-that-trains-tells-of-the-test-split",
            "if not order.scores_only or order.subject.value in self.tests",
            "if order.subject.value in self.tests",
        ),
        (
            "the-test-split-is-asked-again-and-again",
            "order.subject.value in self.tests or model in dict(self.tests.values())",
            "False",
        ),
        (
            "one-model-by-two-names-is-tested-twice",
            " or model in dict(self.tests.values()):",
            ":",
        ),
        (
            "a-model-of-the-server-s-choice-is-evaluated-in-rounds",
            "if order.subject is not Subject.LAST:",
            "if False:",
        ),
    ),
    "cipher/silo/figure_pool.py": (
        (
            "figures-of-one-silo-are-told",
            "return max(2, quorum // 2 + 1)",
            "return 1",
        ),
        (
            "an-evaluation-that-one-silo-left-out-is-told",
            "if tally.evaluation is None or tally.evaluators != tally.count:",
            "if tally.evaluation is None:",
        ),
        (
            "two-pools-share-updates",
            "return FigurePool(), PooledFigures(",
            "return pool, PooledFigures(",
        ),
        (
            "silos-without-samples-are-company",
            "return tally.holders == tally.count or (len(silos) == tally.count and tally.holders >= least)",
            "return True",
        ),
        (
            "few-silos-answer-a-question",
            "if found is None or not found.samples or not _counts(tally, silos, least) or len(silos) < least:",
            "if found is None or not found.samples or not _counts(tally, silos, least):",
        ),
        (
            "answers-of-two-sets-of-silos-are-told",
            "if panel not in (None, answered):",
            "if False:",
        ),
        (
            "a-score-is-of-a-model-that-nobody-has",
            "_score(pool.evaluated if pool.offered < 0 else pool.offered,",
            "_score(pool.evaluated,",
        ),
        (
            "metrics-are-told-digit-by-digit",
            "told = {name: published(value)",
            "told = {name: value",
        ),
        (
            "each-version-is-the-best",
            "return leader.after(rule, score, {}, ()).score is score",
            "return True",
        ),
        (
            "a-damaged-file-is-the-best-model",
            "if digest(model).hex() != expected:",
            "if False:",
        ),
    ),
    "cipher/silo/history.py": (
        (
            "values-in-the-clear-are-not-in-the-past",
            "*parts, hashlib.sha256(clear).digest())",
            "*parts)",
        ),
        (
            "one-member-is-not-in-the-past",
            "for member in head.members)) for head in sums]",
            "for member in head.members[:1])) for head in sums]",
        ),
        (
            "anything-is-taken-back",
            "        if kind is LinkKind.UNDO:\n            self._check_undo(entries)\n",
            "",
        ),
        (
            "one-version-is-taken-back-twice",
            '                raise ProtocolError(SERVER, "undo", detail)\n            at -= 1',
            '                raise ProtocolError(SERVER, "undo", detail)',
        ),
        (
            "the-model-is-not-in-the-past",
            "version, newest.content, counted, state)",
            "version, newest.content, counted)",
        ),
        (
            "a-history-of-one-version-fits-anything",
            "return len(chains) > 1 and self == History(self.run, records, chains[:-1])._led_to(state)",
            "return len(chains) < 2 or self == History(self.run, records, chains[:-1])._led_to(state)",
        ),
    ),
    "cipher/silo/opening.py": (
        (
            "the-newest-model-is-kept-whichever-was-scored",
            "            if score.version == at:",
            "            if True:",
        ),
        (
            "the-model-that-a-pool-began-with-is-not-kept",
            "if at in (pool.began, pool.offered):",
            "if at == pool.offered:",
        ),
        (
            "a-question-about-another-model-chooses-the-best",
            "if added_up.question != ROUNDS:",
            "if False:",
        ),
        (
            "what-one-silo-spoiled-ends-the-run",
            "        spoiled[index] = error\n\n\n",
            "        raise\n\n\n",
        ),
        (
            "one-vote-sets-the-first-grid",
            "spared = tally.votes_spared(Counter(member.silo for member in members), plan.colluding)",
            "spared = 0",
        ),
        (
            "the-server-sees-the-state",
            "        concealed = self._ring.group.conceal(state.digest)\n"
            "        return replace(state, history=state.history.after",
            "        concealed = state.digest\n        return replace(state, history=state.history.after",
        ),
        (
            "clear-values-of-a-spoiled-sum-count",
            "clear = entry.clear if len(tallies) == len(entry.sums) else np.zeros_like(entry.clear)",
            "clear = entry.clear",
        ),
    ),
    "cipher/silo/catch_up_checks.py": (
        (
            "a-calibration-for-another-model-is-opened",
            "if envelope.head.grid != first or envelope.head.attempt:",
            "if envelope.head.attempt:",
        ),
        (
            "a-calibration-of-another-run-is-opened",
            "            if len(others) > self._lying:\n                detail = f",
            "            if False:\n                detail = f",
        ),
        (
            "a-calibration-of-one-silo-is-opened",
            "        self._enough(members)\n        return envelope",
            "        return envelope",
        ),
        (
            "two-masked-sums-in-one-version",
            "if len(sums) != 1:",
            "if False:",
        ),
        (
            "only-the-first-sum-is-authenticated",
            _AUTHENTICATED,
            f"{_AUTHENTICATED} if one is envelopes[0] else {unchecked('one')}",
        ),
        (
            "a-calibration-is-opened-unauthenticated",
            "self._authenticator.authenticate(decoded, SERVER)",
            unchecked("decoded"),
        ),
        (
            "sums-are-opened-unauthenticated",
            _AUTHENTICATED,
            unchecked("one"),
        ),
        (
            "what-is-taken-back-is-opened-unauthenticated",
            f"{_AUTHENTICATED} for one in envelopes)",
            f"{_AUTHENTICATED} if entry.version not in self.__dict__.setdefault('_seen', set()) else "
            f"{unchecked('one')} for one in envelopes)\n        self._seen.add(entry.version)",
        ),
        (
            "members-are-counted-not-silos",
            "silos = len({member.silo for member in members})",
            "silos = len(members)",
        ),
        (
            "an-update-is-added-twice",
            "                    admit(member, added, self._ring)\n",
            "",
        ),
        (
            "an-update-of-another-past-is-added",
            "    if len(others) > lying:\n        raise other_chain(",
            "    if False:\n        raise other_chain(",
        ),
        (
            "an-update-of-a-forgotten-version-is-added",
            "if not max(oldest, entry.version - WINDOW) <= member.round < entry.version:",
            "if not member.round < entry.version:",
        ),
        (
            "a-joiner-believes-one-silo",
            "        if found < needed:",
            "        if False:",
        ),
        (
            "an-old-serial-counts-again",
            " or (len(seen) == SEEN and number < seen[0]) or",
            " or",
        ),
        (
            "only-one-serial-is-remembered",
            "added[name] = tuple(sorted((*seen, number)))[-SEEN:]",
            "added[name] = tuple(sorted((*seen, number)))[-1:]",
        ),
    ),
    "cipher/silo/replica.py": (
        (
            "a-silo-seals-under-another-s-name",
            "if not re.fullmatch(re.escape(self._ring.own.name) + _SERIAL, order.update_id):",
            "if False:",
        ),
        (
            "updates-have-one-nonce",
            "member = Member(order.update_id, order.base_version, secrets.token_bytes(NONCE_BYTES), chain)",
            "member = Member(order.update_id, order.base_version, bytes(NONCE_BYTES), chain)",
        ),
        (
            "a-nonce-follows-from-the-order",
            "member = Member(order.update_id, order.base_version, secrets.token_bytes(NONCE_BYTES), chain)",
            "member = Member(order.update_id, order.base_version, "
            "hashlib.md5(order.update_id.encode()).digest(), chain)",
        ),
        (
            "an-update-is-sealed-without-its-masks",
            "pipeline, annex = Serial(Masked(self._sealer, masks.mask)), masks.annex",
            "annex = masks.annex",
        ),
        (
            "the-server-reads-steps-from-updates",
            "group.fingerprint, group.conceal(grid.digest), chunks",
            "group.fingerprint, grid.digest, chunks",
        ),
        (
            "what-was-followed-is-not-noted",
            "            self._chain_log.enter(state.history.known())\n",
            "",
        ),
        (
            "a-model-is-used-before-its-chain-is-noted",
            "            self._chain_log.enter(state.history.known())\n"
            "            if self._file is not None:\n"
            "                state = state.save(self._file)\n",
            "            if self._file is not None:\n"
            "                state = state.save(self._file)\n"
            "            self._chain_log.enter(state.history.known())\n",
        ),
        (
            "a-model-is-used-before-it-is-on-disk",
            "            if self._file is not None:\n"
            "                state = state.save(self._file)\n"
            "            self._state, self._pooled = state, pooled[-MAX_POOLED:]",
            "            self._state, self._pooled = state, pooled[-MAX_POOLED:]\n"
            "            if self._file is not None:\n"
            "                state = state.save(self._file)",
        ),
        (
            "another-past-is-followed",
            "        check_alike(known, followed)\n",
            "",
        ),
        (
            "what-was-noted-beside-the-keys-does-not-count",
            "{**self._state.history.known(), **followed}",
            "{**self._state.history.known()}",
        ),
        (
            "the-server-chooses-the-first-model",
            "if self._pinned not in (ANY_MODEL, found):",
            "if False:",
        ),
        (
            "masks-come-again-under-another-name",
            "for name in (origin or run, run)",
            "for name in (origin or run, origin or run)",
        ),
    ),
    "cipher/silo/replica_state.py": (
        (
            "what-is-the-best-is-not-attested",
            '{"best": self.best, ',
            '{"best": None, ',
        ),
        (
            "models-are-removed-before-the-state-names-others",
            "        write_pieces(file, (checksum(*parts), *parts), OWNER_FILE)\n"
            "        remove_others(folder, self.kept)",
            "        remove_others(folder, self.kept)\n"
            "        write_pieces(file, (checksum(*parts), *parts), OWNER_FILE)",
        ),
        (
            "a-snapshot-s-length-tells-whether-models-are-in-it",
            "plan.layout.nbytes * plan.most_models",
            "plan.layout.nbytes",
        ),
        (
            "momentum-is-not-attested",
            "return digest_of(self._about(), *self._vectors)",
            "return digest_of(self._about(), self._vectors[0])",
        ),
        (
            "a-joiner-takes-roots-of-negative-squares",
            "            optimizer.check(moments)\n",
            "            pass\n",
        ),
        (
            "a-damaged-state-is-loaded",
            '            if body is None:\n                raise ValueError("its checksum does not fit")\n',
            "            body = body or file.read_bytes()[32:]\n",
        ),
        (
            "anybody-s-snapshot-is-taken",
            "if author is None or not read.is_of(author.signing):",
            "if author is None:",
        ),
        (
            "a-snapshot-of-another-run-is-taken",
            "if found != (run, version, run, version) or",
            "if found[1::2] != (version, version) or",
        ),
    ),
}
