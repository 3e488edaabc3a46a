"""Mutants of what carries orders and answers and survives a restart, for `tests/flower` to notice."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/flower/test_checkpoint_files.py",
    "tests/server/test_array_files.py",
    "tests/server/test_outbox.py",
    "tests/flower/test_payloads.py",
    "tests/server/test_timeouts.py",
    "tests/flower/test_flower_messages.py",
    "tests/flower/test_first_model.py",
    "tests/server/test_checkpoints.py",
    "tests/flower/test_sealed_checkpoints.py",
    "tests/server/test_driver.py",
    "tests/server/test_lost_nodes.py",
    "tests/server/test_refusing_silos.py",
    "tests/silo/test_order_results.py",
    "tests/silo/test_memory.py",
    "tests/extras/cross_site/test_own_models.py",
    "--deselect=tests/server/test_driver.py::test_an_order_is_not_sent_again_where_the_model_has_moved_on",
)

_CHANGES: Changes = {
    "server/checkpoints.py": (
        (
            "a-commit-is-not-in-a-checkpoint",
            "return self._begun > begun or any(isinstance(action, Commit | Rollback | Evaluate) for",
            "return self._begun > begun or any(isinstance(action, Rollback | Evaluate) for",
        ),
        (
            "a-rollback-is-not-in-a-checkpoint",
            "any(isinstance(action, Commit | Rollback | Evaluate) for",
            "any(isinstance(action, Commit | Evaluate) for",
        ),
        (
            "a-question-of-the-end-is-not-in-a-checkpoint",
            "any(isinstance(action, Commit | Rollback | Evaluate) for",
            "any(isinstance(action, Commit | Rollback) for",
        ),
        (
            "the-first-model-is-not-in-a-checkpoint",
            "return self._begun > begun or any",
            "return any",
        ),
        (
            "the-beginning-is-not-in-a-checkpoint",
            "        if entry is None:\n            return True",
            "        if entry is None:\n            return False",
        ),
        (
            "a-silo-that-joined-is-forgotten-at-a-restart",
            "self._silos[event.silo] = None",
            "pass",
        ),
        (
            "a-silo-that-left-is-waited-for-after-a-restart",
            "self._silos.pop(event.silo, None)",
            "pass",
        ),
        (
            "the-last-evaluation-is-forgotten-at-a-restart",
            "                self._evaluating = action\n",
            "                pass\n",
        ),
        (
            "an-encrypted-run-goes-on-without-checkpoints",
            "            if self._required:\n                raise",
            "            if False:\n                raise",
        ),
        (
            "checkpoints-are-kept-for-ever",
            "                old.unlink(missing_ok=True)\n",
            "                pass\n",
        ),
        (
            "the-newest-checkpoints-are-removed",
            "for old in files[self._keep :]:",
            "for old in files[: -self._keep]:",
        ),
        (
            "older-checkpoints-win",
            "return sorted(found, key=lambda path: int(path.stem), reverse=True)",
            "return sorted(found, key=lambda path: int(path.stem))",
        ),
        (
            "checkpoint-9-is-newer-than-10",
            "return sorted(found, key=lambda path: int(path.stem), reverse=True)",
            "return sorted(found, key=lambda path: path.stem, reverse=True)",
        ),
        (
            "a-journal-shorter-than-its-checkpoint-goes-on",
            "if length < checkpoint.moment.position:",
            "if False:",
        ),
        (
            "a-checkpoint-is-said-to-be-on-disk-before-its-journal",
            "            self._settle_journal()\n            self._arrays",
            "            self._arrays",
        ),
        (
            "silos-are-told-what-a-dead-machine-has-no-journal-of",
            "            if self._required:\n                self._settle_journal()\n",
            "",
        ),
        (
            "a-checkpoint-is-said-to-be-on-disk-before-it-is",
            '            settle_file(self._folder / f"{version}{_SUFFIX}")\n',
            "",
        ),
        (
            "silos-that-know-more-are-asked-to-go-on",
            "if _may_be_known(out / FOLDER, checkpoint, _commits_after(journal, position)):",
            "if False:",
        ),
        (
            "silos-go-on-after-a-crash-of-the-machine",
            "(commits == 1 and _boot() not in [file.read_bytes() for file in folder.glob(_BOOT)])",
            "False",
        ),
        (
            "a-new-identity-is-lost-at-the-second-restart",
            "        _write(ArrayFiles(out / FOLDER), out / FOLDER, checkpoint, settle=True)\n    os.truncate",
            "    os.truncate",
        ),
        (
            "a-journal-is-continued-behind-what-was-lost",
            "    os.truncate(journal, position)\n",
            "",
        ),
        (
            "an-encrypted-run-is-renamed-without-need",
            "        return torn",
            "        return commits > 0",
        ),
        (
            "a-torn-checkpoint-is-not-known-to-have-been",
            "        return torn",
            "        return False",
        ),
        (
            "silos-do-not-know-under-which-name-the-run-began",
            '"began": known.get("began") or known["run"]}',
            '"began": known["run"]}',
        ),
        (
            "a-torn-checkpoint-ends-the-run",
            "        except Damaged as error:",
            "        except KeyError as error:",
        ),
        (
            "a-torn-checkpoint-is-tried-for-ever",
            "            file.rename(file.with_suffix(_TORN))\n",
            "",
        ),
        (
            "a-torn-checkpoint-is-loaded",
            "    body = undigested(data)\n",
            "    body = data[DIGEST_BYTES:]\n",
        ),
        (
            "a-checkpoint-is-written-in-place",
            "    write_atomically(path, digested(body), OWNER_FILE, settle=settle)",
            "    path.write_bytes(digested(body))",
        ),
        (
            "a-checkpoint-of-another-configuration-is-loaded",
            'if head["config"] != config:',
            "if False:",
        ),
        (
            "anybody-s-checkpoint-is-unpickled",
            "data = memoryview(read_private(path, path.stat().st_size))",
            "data = memoryview(path.read_bytes())",
        ),
        (
            "older-checkpoints-go-before-a-newer-one-is-on-disk",
            "if len(files) > self._keep and self._settled >= int(kept[-1].stem):",
            "if len(files) > self._keep:",
        ),
        (
            "an-encrypted-checkpoint-comes-before-its-arrays",
            "    if settle:\n",
            "    if False:\n",
        ),
        (
            "arrays-go-before-the-checkpoints-that-need-them",
            "for file in _newest_first(self._folder) for name",
            "for file in _newest_first(self._folder)[:1] for name",
        ),
        (
            "each-sealed-checkpoint-has-all-sums-again",
            "ArrayFiles(self._folder, LASTING_BYTES if required else inf)",
            "ArrayFiles(self._folder)",
        ),
        (
            "arrays-are-kept-for-ever",
            "            self._arrays.prune(",
            "            list(",
        ),
    ),
    "server/array_files.py": (
        (
            "checkpoints-depend-on-the-order-of-fields",
            "        if names is None:\n            return NotImplemented\n",
            "        return NotImplemented\n",
        ),
        (
            "sums-below-a-mebibyte-have-no-file",
            "return still and (value.nbytes >= least or is_large(value.nbytes))",
            "return still and is_large(value.nbytes)",
        ),
        (
            "a-torn-array-is-loaded",
            "        if ArrayName.of(value) == name:\n",
            "        if True:\n",
        ),
        (
            "a-torn-array-is-taken-for-whole-later",
            "    path.unlink(missing_ok=True)  # else",
            "    # else",
        ),
        (
            "an-array-that-changes-is-written-once",
            "value.flags.c_contiguous and not value.flags.writeable",
            "value.flags.c_contiguous",
        ),
        (
            "an-array-is-written-again-every-time",
            "self._written.get(id(value)) or (value, ArrayName.of(value))",
            "(value, ArrayName.of(value))",
        ),
        ("an-array-in-a-file-is-written-again", "if not link_file(data, path):", "if True:"),
    ),
    "model/chunked_arrays.py": (
        ("a-longer-file-is-linked-for-an-array", " and part.path.stat().st_size == part.nbytes:", ":"),
    ),
    "server/outbox.py": (
        (
            "another-order-is-halted",
            "sent.order is not None and sent.order.update_id == update_id",
            "sent.order is not None",
        ),
        (
            "an-order-is-sent-twice",
            "posted, self._posted = self._posted, []",
            "posted, self._posted = self._posted, [] if self._sent else self._posted[:1]",
        ),
        (
            "an-answer-is-taken-twice",
            "        sent = self._sent.pop(identifier, None)\n",
            "        sent = self._sent.get(identifier)\n",
        ),
        (
            "an-answer-to-what-is-forgotten-counts",
            "(sent := self._end(answer.name)) is not None and",
            "(sent := self._end(answer.name) or next(iter(self._sent.values()), None)) is not None and",
        ),
        (
            "a-repeated-question-is-answered-twice",
            "        if sent is not None and sent.asked:\n",
            "        if False:\n",
        ),
        (
            "a-lost-node-s-messages-are-waited-for",
            "self._sent = {identifier: sent for identifier, sent in self._sent.items() if sent.node != node}",
            "pass",
        ),
        (
            "what-was-posted-to-a-lost-node-goes-out",
            "        self._posted = [(sent, message) for sent, message in self._posted if sent.node != node]\n",
            "",
        ),
        (
            "what-takes-all-silos-long-is-asked-for-again",
            "return max(patience_s, self._answer_times.patience_s)",
            "return patience_s",
        ),
        (
            "what-is-overdue-is-waited-for",
            "        late = [identifier",
            "        late = [identifier for identifier in ()] and [identifier",
        ),
        (
            "an-order-is-asked-for-again-before-it-can-be-done",
            " + (0.0 if sent.order is None else self._report_s)\n",
            "\n",
        ),
        (
            "an-order-goes-to-another-silo",
            "node, request = self._nodes.by_name[silo], protocol.Train(order, self._report_s)",
            "node, request = next(iter(self._nodes.by_name.values())), protocol.Train(order, self._report_s)",
        ),
        (
            "an-order-is-never-overdue",
            "due_s, end_s = self._timing.order_until(now_s)",
            "due_s = end_s = inf",
        ),
        (
            "what-comes-with-a-request-continues-what-its-silo-holds-now",
            "        if rounds and not sent.again:\n",
            "        if False:\n",
        ),
        (
            "a-repeated-order-is-not-known-to-be-one",
            "self._send(replace(sent, again=True), silo, now_s)",
            "self._send(sent, silo, now_s)",
        ),
        (
            "an-update-of-any-size-is-taken",
            "return self._aggregator.upload_bytes\n",
            "return MAX_SEALED_BYTES\n",
        ),
        (
            "a-silo-that-is-gone-is-asked-about-its-masks",
            "self._aggregator.give_up(silo)  # the aggregator may ask other silos instead\n"
            "                    continue",
            "continue",
        ),
        (
            "a-question-about-masks-is-waited-for-without-end",
            "timeout_s = min(_QUESTION_S, self._timing.order_timeout_s)",
            "timeout_s = 1e9",
        ),
    ),
    "flower/payloads.py": (
        (
            "a-payload-of-any-size-is-taken",
            "    if len(data) > most:\n",
            "    if False:\n",
        ),
        (
            "a-shape-of-any-size-is-allocated",
            "        if left < 0:\n",
            "        if False:\n",
        ),
        (
            "an-empty-axis-hides-the-others",
            "math.prod(max(axis, 1) for axis in shape)",
            "math.prod(shape)",
        ),
    ),
    "server/driver.py": (
        (
            "silos-hear-of-a-commit-before-it-is-on-disk",
            "                self._save(entry)\n"
            "                # A send that fails at once causes a further event.\n"
            "                events = self._flush()\n",
            "                # A send that fails at once causes a further event.\n"
            "                events = self._flush()\n"
            "                self._save(entry)\n",
        ),
    ),
    "server/timeouts.py": (
        ("a-slow-hour-is-remembered-for-ever", "self._longest_s) - self._usual_s)", "self._longest_s))"),
        ("one-answer-held-back-makes-all-others-late", "min(seconds, self._longest_s)", "seconds"),
        (
            "an-order-has-no-limit",
            "return min(now_s + self.order_timeout_s, end_s), end_s",
            "return now_s + self.order_timeout_s, end_s",
        ),
    ),
    "extras/cross_site/own_models.py": (
        (
            "a-model-of-ones-own-is-trained-twice-after-a-crash",
            "kept is None or order.after > kept.order.after",
            "kept is None or order.after >= kept.order.after",
        ),
        (
            "tuning-goes-on-from-another-version",
            " or order.base_version != kept.order.base_version",
            "",
        ),
    ),
    "silo/session/current_order.py": (
        ("a-place-in-the-data-is-lost", 'decode(Cursor, about["cursor"], own=True)', "Cursor()"),
        (
            "an-order-is-done-twice-after-a-crash",
            "        write_pieces(path, chain((head,), vectors, (self.rest,)), OWNER_FILE)\n",
            "        path.parent.joinpath('x').write_bytes(b'')\n",
        ),
        (
            "an-answer-is-written-in-place",
            "        write_pieces(path, chain((head,), vectors, (self.rest,)), OWNER_FILE)\n",
            "        path.write_bytes(b''.join(chain((head,), vectors, (self.rest,))))\n",
        ),
        ("a-torn-update-is-sent", "if whole else None", ""),
        ("a-torn-answer-ends-the-silo", "            if line is None:\n", "            if False:\n"),
        (
            "an-update-comes-back-as-another-type",
            "map_file(path, np.dtype(dtype), begins, size)",
            'map_file(path, "i4", begins, size)',
        ),
        (
            "an-update-is-copied-to-be-written",
            "chain((head,), vectors, (self.rest,)), OWNER_FILE",
            "(head, *(each.tobytes() for each in self.vectors.values()), self.rest), OWNER_FILE",
        ),
        (
            "a-torn-private-part-is-trained-with",
            'if hashlib.sha256(rest).hexdigest() != said["rest"] or',
            "if",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
