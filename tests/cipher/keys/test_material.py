"""Derived keys, signatures and sealed blobs."""

import hashlib
import hmac
import pickle

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from fedsync.cipher.keys import material
from fedsync.cipher.keys.material import GroupKey, PublicKeys, Purpose, SiloKeys, is_signed, open_blob, seal_blob
from fedsync.common.errors import ConfigError, ProtocolError
from tests.cipher.given_keys import group_of

A, B = (SiloKeys.generate(name) for name in "ab")


def hkdf_by_hand(secret: bytes, salt: bytes, info: bytes) -> bytes:
    """RFC 5869 for one block of output."""
    extracted = hmac.digest(salt, secret, hashlib.sha256)
    return hmac.digest(extracted, info + b"\x01", hashlib.sha256)


def test_sub_keys_are_hkdf_of_epoch_and_purpose_also_that_which_conceals_digests() -> None:
    group = group_of(A, epoch=3)
    expected = hkdf_by_hand(b"k" * 32, b"salt", b"fedsync group 1/3/pad")
    assert group.derive(Purpose.PAD, b"salt") == expected
    assert group.derive(Purpose.PAD, b"salt", 8) == expected[:8]
    name = hkdf_by_hand(b"k" * 32, b"", b"fedsync group 1/3/name")
    assert group.conceal(b"digest") == hmac.digest(name, b"digest", "sha256"), "which the server does not have"


def test_the_fingerprint_stands_for_context_key_and_epoch() -> None:
    group = group_of(A)
    salt = hashlib.sha256(b"context").digest()
    assert group.fingerprint == hkdf_by_hand(b"k" * 32, salt, b"fedsync group 1/1/fingerprint")[:16]
    others = [group_of(A, epoch=2), group_of(A, key=b"l" * 32), group_of(A, context=b"contexu")]
    assert len({group.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert group_of(A, B).fingerprint == group.fingerprint, "the same secret"


def test_no_secret_is_in_a_repr_and_a_group_key_pickles() -> None:
    group = group_of(A, key=bytes(range(100, 132)), context=b"the secret context")
    shown = f"{group!r} {group} {A!r} {A}"
    for secret in (group.key, group.context, A.exchange, A.signing):
        assert repr(secret)[2:-1] not in shown and secret.hex() not in shown
    assert "epoch=1" in shown and "'a'" in shown
    assert pickle.loads(pickle.dumps(group)) == group


@pytest.mark.parametrize("values", [{"epoch": 0}, {"epoch": 2**32}, {"key": b"short"}, {"context": b""}])
def test_a_group_key_of_nonsense_is_refused(values: dict[str, object]) -> None:
    good: dict[str, object] = {"epoch": 1, "context": b"c", "key": b"k" * 32, "members": {}, "administrator": b"a" * 32}
    with pytest.raises(ValueError, match=r"epoch|context"):
        GroupKey(**(good | values))  # type: ignore[arg-type]  # wrong on purpose


def test_what_two_silos_agree_on_is_hkdf_of_the_exchange_and_both_public_keys() -> None:
    shared = X25519PrivateKey.from_private_bytes(A.exchange).exchange(
        X25519PublicKey.from_public_bytes(B.public.exchange)
    )
    salt = b"".join(sorted((A.public.exchange, B.public.exchange)))
    expected = hkdf_by_hand(shared, salt, b"fedsync agree 1\0mask")
    assert A.agree(B.public, b"mask") == B.agree(A.public, b"mask") == expected
    assert A.agree(B.public, b"mask", 100)[:32] == expected


def test_a_key_of_low_order_is_not_usable() -> None:
    zero = PublicKeys(bytes(32), A.public.signing)
    assert not zero.usable and A.public.usable
    with pytest.raises(ValueError, match=r".*"):
        B.agree(zero, b"mask")


def test_a_signature_holds_for_one_key_one_context_and_one_message() -> None:
    public, signature = A.public.signing, A.sign(b"update", b"message")
    assert is_signed(public, b"update", b"message", signature)
    assert not is_signed(B.public.signing, b"update", b"message", signature)
    assert not is_signed(public, b"updat", b"emessage", signature), "the same bytes, split elsewhere"
    assert not is_signed(public, b"update", b"messagf", signature)
    assert not is_signed(public, b"update", b"message", signature[:-1])
    assert not is_signed(b"short", b"update", b"message", signature)


def test_a_silo_has_a_name_that_can_name_a_file() -> None:
    with pytest.raises(ConfigError, match="silo name"):
        SiloKeys.generate("../a")


def test_a_blob_is_aes_gcm_under_a_key_of_its_own() -> None:
    group = group_of(A)
    blob = seal_blob(group, Purpose.SNAPSHOT, b"version 4", b"model")
    head, salt, body = blob[:12], blob[12:44], blob[44:]
    key = hkdf_by_hand(group.key, salt, b"fedsync group 1/1/snapshot")
    assert AESGCM(key).decrypt(bytes(12), body, head + group.fingerprint + b"version 4") == b"model"
    assert seal_blob(group, Purpose.SNAPSHOT, b"version 4", b"model")[12:] != blob[12:]
    assert open_blob(group, Purpose.SNAPSHOT, b"", seal_blob(group, Purpose.SNAPSHOT, b"", b"")) == b""


def test_every_flipped_bit_and_every_cut_is_refused() -> None:
    group = group_of(A)
    blob = seal_blob(group, Purpose.SNAPSHOT, b"", b"model")
    flipped = [blob[:i] + bytes([blob[i] ^ 1 << bit]) + blob[i + 1 :] for i in range(len(blob)) for bit in (0, 7)]
    cut = [blob[:i] for i in range(len(blob))]
    for wrong in (*flipped, *cut, blob + b"\0"):
        with pytest.raises(ProtocolError):
            open_blob(group, Purpose.SNAPSHOT, b"", wrong)


def test_a_blob_beyond_one_call_has_parts_in_order_and_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state of a silo with a model of 110 million values, and the moments of Adam, is longer than 2^31 bytes."""
    monkeypatch.setattr(material, "PART_BYTES", 20)
    group, data = group_of(A), bytes(range(50))
    blob = seal_blob(group, Purpose.SNAPSHOT, b"version 4", data)
    assert len(blob) == len(data) + 44 + 3 * 16
    assert open_blob(group, Purpose.SNAPSHOT, b"version 4", blob) == data
    head, first, second, third = blob[:44], blob[44:80], blob[80:116], blob[116:]
    parts = [[first, second], [first], [second, third], [second, first, third], [first, second, second], [third]]
    for wrong in (*parts, [first, second, third[:-1]], [first, second, third, b"\0"], []):
        with pytest.raises(ProtocolError):
            open_blob(group, Purpose.SNAPSHOT, b"version 4", head + b"".join(wrong))


def test_a_blob_for_something_else_is_refused_with_the_reason() -> None:
    group = group_of(A)
    blob = seal_blob(group, Purpose.SNAPSHOT, b"version 4", b"model")
    with pytest.raises(ProtocolError, match=r"'b'.*sealed blob"):
        open_blob(group, Purpose.PAD, b"version 4", blob, "b")
    with pytest.raises(ProtocolError, match="sealed blob"):
        open_blob(group, Purpose.SNAPSHOT, b"version 5", blob)
    with pytest.raises(ProtocolError, match="sealed in epoch 1, this is epoch 2"):
        open_blob(group_of(A, epoch=2), Purpose.SNAPSHOT, b"version 4", blob)
    with pytest.raises(ProtocolError, match="sealed blob"):
        open_blob(group_of(A, key=b"l" * 32), Purpose.SNAPSHOT, b"version 4", blob)
    with pytest.raises(ProtocolError, match="sealed blob"):
        open_blob(group_of(A, context=b"another"), Purpose.SNAPSHOT, b"version 4", blob)
