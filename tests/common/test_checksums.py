"""Damage is noticed wherever it is."""

from fedsync.common.files import digested, undigested


def test_what_was_written_comes_back_and_nothing_else_does() -> None:
    data = digested(b"model")
    assert undigested(data) == b"model"
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1
        assert undigested(bytes(changed)) is None
        assert undigested(data[:at]) is None
    assert undigested(data + b"\0") is None
    assert undigested(digested(b"")) == b""
