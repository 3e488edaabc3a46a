"""Mutants of the way that large payloads take through the server's gate, for `tests/flower` to notice."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/flower/internals/test_broken_transfers.py",
    "tests/flower/internals/test_parcels.py",
    "tests/flower/test_outbox.py",
    "tests/flower/test_client_app.py",
    "tests/trainer/test_leaving.py",
)

_CHANGES: Changes = {
    "flower/parcels.py": (
        (
            "anybody-takes-what-is-not-expected",
            'raise ProtocolError(sender, "upload", "nobody expects it")',
            "most = 2**40",
        ),
        ("an-update-may-have-any-size", "if not 0 < uploaded.nbytes <= most:", "if False:"),
        ("half-an-update-counts", "if size != uploaded.nbytes:", "if size > uploaded.nbytes:"),
        ("the-file-of-an-update-stays", "map_file(kept, remove=True)", "map_file(kept)"),
        ("a-model-stays-that-nobody-fetches", "for name in self._published - set(digests):", "for name in ():"),
        (
            "a-ticket-stays-that-nobody-waits-for",
            "for node, name in self._expected.keys() - set(tickets):",
            "for node, name in ():",
        ),
        ("a-session-at-work-is-removed", "if session.is_dir() and not held(session / _LOCK):", "if session.is_dir():"),
        ("a-session-that-is-over-stays", "shutil.rmtree(session, ignore_errors=True)", "pass"),
    ),
    "flower/internals/parcel_routes.py": (
        (
            "a-ticket-is-everybodys",
            "folder = node_folder(self._root / upload[1], node)",
            "folder = next((self._root / upload[1]).glob('node-*'))",
        ),
        ("the-gate-takes-more-than-is-expected", "if total > most:", "if False:"),
        ("an-upload-leaves-a-hole", "if first != _size(path):", "if first < _size(path):"),
        ("what-is-there-is-written-again", "if first != _size(path):", "if first > _size(path):"),
        ("what-waits-is-not-counted", "if self._waiting(path) + last + 1 > self._quota:", "if last >= self._quota:"),
        (
            "what-is-about-to-come-is-not-counted",
            "for each, writer in self._writers.items():",
            "for each, writer in ():",
        ),
        (
            "a-part-lies-about-its-length",
            "if part is None or last - first + 1 != length or last >= total:",
            "if part is None or last >= total:",
        ),
        (
            "parts-of-two-updates-meet",
            "                other.unlink(missing_ok=True)",
            "                other.rename(path)",
        ),
        ("a-download-begins-anew", "at = int(found[1]) if found is not None else 0", "at = 0"),
        (
            "what-came-before-the-line-broke-is-lost",
            "if len(waiting) < SPAN_BYTES and more:",
            "if message['type'] != 'http.request':\n            break\n        if more:",
        ),
        ("an-earlier-connection-goes-on", "if not writes():", "if False:"),
        ("a-full-disk-is-not-told", "if failure is not None:\n        raise failure", "pass"),
    ),
    "flower/internals/parcel_client.py": (
        ("another-model-is-trained-on", "if hashed.hexdigest() != parcel.digest:", "if False:"),
        (
            "a-damaged-file-is-trained-on",
            "if kept is not None and digest(kept).hex() == parcel.digest:",
            "if kept is not None:",
        ),
        ("old-models-fill-the-disk", "if other not in (whole, part, *self._used):", "if False:"),
        (
            "what-failed-stays",
            "        except BaseException:\n            part.unlink(missing_ok=True)",
            "        except BaseException:",
        ),
        ("a-server-that-is-gone-is-waited-for", "if time.monotonic() - moved_s > PATIENCE_S:", "if tries > 50:"),
    ),
    "flower/packing.py": (
        (
            "a-node-gets-what-it-cannot-fetch",
            "if fetches and self._parcels is not None",
            "if self._parcels is not None",
        ),
        (
            "a-small-model-takes-the-long-way",
            "and self._parcels is not None and payload.nbytes > payloads.SMALL_BYTES",
            "and self._parcels is not None",
        ),
    ),
    "flower/outbox.py": (
        (
            "an-order-has-no-ticket",
            "large = isinstance(sent.request, Train | AskModel | AskSnapshot)",
            "large = isinstance(sent.request, AskModel | AskSnapshot)",
        ),
    ),
    "flower/client_app.py": (
        (
            "a-full-gate-loses-the-update",
            "        if uploaded is not None:\n            return uploaded",
            "        return uploaded",
        ),
        (
            "a-node-does-not-say-that-it-fetches",
            "return messages.answer(message, reply, packed, fetches=parcels is not None)",
            "return messages.answer(message, reply, packed)",
        ),
    ),
    "trainer/server.py": (
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
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
