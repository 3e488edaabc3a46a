"""Mutants of the hub, of silos' lines to it, of their joins, and of how large answers leave a trainer."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/transport",
    "tests/attacks/test_hub.py",
    "tests/silo",
    "tests/flower/test_hub_transport.py",
    "tests/silo/test_leaving.py",
)

_CHANGES: Changes = {
    "transport/hub/sessions.py": (
        (
            "a-join-is-used-twice",
            "secret, session.invited, session.used = secret, ",
            "secret, _, session.used = secret, ",
        ),
        ("two-silos-have-one-secret", "if secret in self._by_secret or secret == found:", "if False:"),
        (
            "a-silo-whose-line-breaks-as-it-joins-stays-out",
            "session.used == found and session.secret",
            "session.secret",
        ),
        (
            "a-silo-that-joins-anew-has-what-another-was-asked",
            "session.queued = {}",
            "pass",
        ),
        ("who-is-struck-off-stays", "self._by_silo.pop(silo, None)", "self._by_silo.get(silo)"),
        ("questions-are-queued-without-end", "if len(session.queued) >= MOST_QUEUED:", "if False:"),
        (
            "a-question-has-the-number-of-one-before-a-restart",
            "HubSession(silo, secret, invited, used, first)",
            "HubSession(silo, secret, invited, used)",
        ),
        ("a-silo-is-invited-while-it-comes-back", "return known and self._clock()", "return False and self._clock()"),
    ),
    "transport/hub/door.py": (
        ("an-empty-update-is-none-at-the-server", "length > head.text or head.empty else", "length > head.text else"),
        ("one-silo-has-all-the-hub-s-attention", "if session.open >= MOST_OPEN:", "if False:"),
        (
            "a-slow-body-holds-its-memory",
            "asyncio.wait_for(anext(stream), BODY_S)",
            "asyncio.wait_for(anext(stream), 60)",
        ),
        ("an-answer-is-as-large-as-its-silo-likes", "if length > head.text + most:", "if False:"),
        (
            "an-answer-that-is-too-large-is-waited-for",
            "if queued.number == number or queued.ticket == ticket",
            "if False and queued.ticket == ticket",
        ),
        ("an-answer-counts-twice", "            del session.queued[head.number]\n", ""),
        ("silos-wait-for-a-run-that-is-over", "410 if self.over else 204", "204"),
        (
            "a-silo-fetches-what-is-for-others",
            " or not any(isinstance(each, Blob) and each.digest == digest for each in payloads)",
            "",
        ),
        (
            "an-upload-has-any-size",
            "        if total > upload.most:\n            raise self._too_large(session, ticket=upload.path.name)\n"
            "        if _length(request, upload.most - there)",
            "        if _length(request, 2**40)",
        ),
        (
            "an-upload-leaves-a-hole",
            'if upload.whole or request.headers.get("upload-offset") != str(there):',
            "if False:",
        ),
        (
            "an-earlier-connection-goes-on",
            "        if upload.writer != mine:\n            raise",
            "        if False:\n            raise",
        ),
        (
            "a-damaged-update-counts",
            'upload.whole = upload.digest == request.headers.get("upload-sha256")',
            "upload.whole = True",
        ),
        (
            "what-came-before-the-line-broke-is-lost",
            "            try:\n                await _write(upload, mine, pieces)\n            finally:",
            "            try:\n                pass\n            finally:",
        ),
    ),
    "transport/hub/blobs.py": (
        ("a-ticket-is-everybodys", "found if found is not None and found.silo == silo else None", "found"),
        ("half-an-update-counts", "if found is None or not found.whole:", "if found is None:"),
        ("the-file-of-an-update-stays", "map_file(found.path, remove=True)", "map_file(found.path)"),
        ("models-that-nobody-fetches-stay", "            (self._blobs / unused).unlink(missing_ok=True)\n", ""),
    ),
    "transport/hub/hub.py": (
        ("a-model-goes-before-it-is-fetched", "keep({*digests, *self._sessions.blobs})", "keep(digests)"),
        (
            "a-head-without-end-keeps-its-connection",
            "if time.monotonic() - self._busy_s > (QUIET_S",
            "if False and (QUIET_S",
        ),
        ("an-update-that-nobody-waits-for-stays", "        if queued.ticket:\n", "        if False:\n"),
        ("a-model-goes-along-with-each-question", "payload.nbytes > BESIDE_BYTES:", "payload.nbytes > 2**40:"),
    ),
    "transport/hub_line.py": (
        ("an-empty-model-is-none-at-the-silo", "elif len(body) > end or head.empty:", "elif len(body) > end:"),
        ("another-model-is-trained-on", "if found != blob.digest:", "if False:"),
        ("a-model-without-end-fills-the-disk", "if there > blob.nbytes:", "if False:"),
        (
            "a-download-begins-anew",
            'headers = {**self._known(), **({"range"',
            'part.write_bytes(b"")\n        headers = {**self._known(), **({"unused"',
        ),
        (
            "any-server-is-trusted",
            "verify.load_verify_locations(cadata=join.authority)",
            "verify.check_hostname, verify.verify_mode = False, ssl.CERT_NONE",
        ),
        ("a-question-comes-again-and-again", " or head.number <= after:", ":"),
        ("a-question-fills-the-memory", "        if there > most:\n", "        if False:\n"),
    ),
    "transport/join.py": (
        ("a-server-steers-a-silo-to-any-machine", "if of.hostname in hosts and", "if"),
        ("a-server-says-whom-to-trust", "self.authority if authority is None else authority", "self.authority"),
        ("a-join-leads-past-tls", 'if parts.scheme != ("https" if tls else "http"):', "if False:"),
    ),
    "silo/session/resident_trainer.py": (
        (
            "a-full-disk-loses-an-answer",
            "            path.unlink(missing_ok=True)\n            return answer",
            "            raise",
        ),
        (
            "files-of-answers-stay",
            "send(connection, reply, answer, passing=passing)",
            "send(connection, reply, answer)",
        ),
    ),
    "silo/agent/agent.py": (
        (
            "questions-wait-for-each-other",
            "threading.Thread(target=self._work, args=(line, session, question), daemon=True).start()",
            "self._work(line, session, question)",
        ),
        ("a-killed-agent-forgets-its-sessions", "            session.save(self._file)", "            pass"),
        (
            "what-is-over-is-tried-again",
            "        finally:\n            self._file.unlink",
            "        finally:\n            self._file.exists",
        ),
        ("an-app-says-what-its-node-is", "if own := os.environ.get(OWN_NODE):", "if own := None:"),
        (
            "a-silo-stays-with-a-hub-that-is-gone",
            "return (there.addresses, there.authority) !=",
            "return False and (there.addresses, there.authority) !=",
        ),
        (
            "a-damaged-file-is-trained-on",
            "if there is None or digest(there).hex() != payload.digest:",
            "if there is None:",
        ),
    ),
    "silo/agent/joins.py": (
        ("a-server-leads-its-silos-to-themselves", "    here = not owner or", "    here = True or"),
        ("a-join-comes-again-and-again", "            _remove(Path(entry.path))\n", "            pass\n"),
        ("a-flood-of-joins-is-taken", "and len(found) < MOST_JOINS", "and True"),
    ),
    "silo/agent/answers.py": (
        (
            "an-empty-model-is-none-for-the-trainer",
            "        return fetch(folder)\n    with room_for",
            "        return fetch(folder) if nbytes else None\n    with room_for",
        ),
    ),
    "flower/hub_transport.py": (
        ("who-was-struck-off-is-invited", " or _node(silo)[1] in struck:", ":"),
        ("a-silo-is-invited-at-each-look", "now_s < kept.again_s or ", ""),
        (
            "nobody-says-who-does-not-join",
            "if each.problem is not None and silo not in here",
            "if False and silo not in here",
        ),
        ("each-silo-has-its-model-laid-down-anew", "if id(payload) not in self._published:", "if True:"),
        (
            "what-waits-at-the-hub-is-asked-for-again",
            "return self._asked.intersection(names)",
            "return set()",
        ),
        ("a-hub-comes-back-elsewhere", "ports.insert(0, int(kept", "ports.append(int(kept"),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
