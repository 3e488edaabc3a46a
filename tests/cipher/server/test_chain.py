"""The links that the server keeps: one for each version, never joined."""

import numpy as np
import pytest

from fedsync.cipher.encoding.catch_up import LinkEntry, LinkKind
from fedsync.cipher.encoding.sealed_wire import NO_TAG, Envelope
from fedsync.cipher.server.chain import Chain, total
from fedsync.cipher.suites.suite import PAD, Adder
from fedsync.common.errors import PolicyError
from tests.cipher.messages import head


def chain_of(*kinds: LinkKind) -> Chain:
    chain = Chain()
    for version, kind in enumerate(kinds, 1):
        if kind is LinkKind.ADD:
            chain.add(LinkEntry(version, (b"sum",)))
        else:
            chain.pause()
    return chain


ADD, EMPTY, UNDO = LinkKind.ADD, LinkKind.EMPTY, LinkKind.UNDO


def test_what_was_added_is_taken_back_newest_first_and_nothing_else() -> None:
    chain = chain_of(ADD, ADD, EMPTY, ADD, EMPTY)
    chain.undo(1)
    (undoing,) = chain.since(5)
    assert (undoing.kind, [entry.version for entry in undoing.entries], chain.newest) == (UNDO, [4, 2], 6)
    nothing = chain_of(ADD, EMPTY)
    nothing.undo(1)
    assert [link.kind for link in nothing.since(2)] == [EMPTY]


def test_what_is_forgotten_cannot_be_taken_back_nor_what_took_back() -> None:
    chain = chain_of(ADD, ADD, ADD)
    chain.forget(1)
    assert (chain.first, chain.newest) == (1, 3)
    assert not chain.continues(0) and chain.continues(1) and chain.continues(3) and not chain.continues(4)
    with pytest.raises(PolicyError, match="no longer stored"):
        chain.undo(0)
    chain.undo(2)
    with pytest.raises(PolicyError, match="already undid another"):
        chain.undo(1)


def test_a_sum_that_nobody_could_open_is_not_made() -> None:
    update = Envelope(head("pad"), np.zeros((2, PAD.words), dtype=np.uint64), NO_TAG)
    total([update] * 2, Adder(PAD), 2)
    with pytest.raises(PolicyError, match="at most 2 can be decrypted"):
        total([update] * 3, Adder(PAD), 2)
