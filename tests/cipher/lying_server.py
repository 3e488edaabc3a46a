"""What a server can do without a key: cut sums out of the chain, write other headers to them, send what it likes."""

from collections.abc import Callable
from dataclasses import replace

from fedsync.cipher.encoding import sealed_wire as wire
from fedsync.cipher.encoding.catch_up import LinkEntry, Piece
from fedsync.cipher.keys.keywrap import ServerKeys
from fedsync.cipher.plan import EncryptionPlan
from fedsync.common.errors import SERVER
from tests.cipher.make import Federation

Change = Callable[[wire.Envelope], wire.Envelope]


def entry_of(federation: Federation, version: int) -> LinkEntry:
    """What was added by ``version``."""
    chain = federation.aggregator._chain
    (entry,) = chain.links[version - chain.first - 1].entries
    return entry


def read_sum(plan: EncryptionPlan, keys: ServerKeys, data: Piece, version: int, chunks: int) -> wire.Envelope:
    """A sum that an honest server would send."""
    expected = wire.Expected(
        wire.Kind.AGGREGATE, plan.form, plan.packing, SERVER, version, None, keys.epoch, keys.fingerprint, None, chunks
    )
    return wire.decode(data, expected)


def rewritten(federation: Federation, entry: LinkEntry, version: int, change: Change = lambda one: one) -> LinkEntry:
    """The same sums under another version, each changed as a server could."""
    plan, sums = federation.plan, []
    for one in entry.sums:
        envelope = change(read_sum(plan, federation.keys.server, one, entry.version, plan.chunks))
        sums.append(wire.encode(replace(envelope.head, round=version), envelope.words, envelope.tag, None))
    return replace(entry, version=version, sums=tuple(sums))


def one_more(envelope: wire.Envelope) -> wire.Envelope:
    """One of the last words is one more."""
    words = envelope.words.copy()
    words[-1, -1] = (words[-1, -1] + 1) % envelope.head.form.modulus
    return replace(envelope, words=words)
