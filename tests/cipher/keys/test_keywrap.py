"""Bundles, announcements and the server's file."""

import json
from collections.abc import Callable

import pytest

from fedsync.cipher.keys.keywrap import (
    ServerKeys,
    announce,
    read_announcement,
    read_server_file,
    server_file,
    unwrap,
    wrap,
)
from fedsync.cipher.keys.material import PublicKeys, SiloKeys, sign, verification_key
from fedsync.common.errors import ConfigError, ProtocolError
from tests.cipher.given_keys import group_of

A, B = SiloKeys.generate("a"), SiloKeys.generate("b")
SIGNING = b"s" * 32
PUBLIC = verification_key(SIGNING)
GROUP = group_of(A, B, epoch=3)
GROUP = type(GROUP)(3, GROUP.context, GROUP.key, GROUP.members, PUBLIC)
BUNDLE = wrap(GROUP, "a", SIGNING)


def refused(bundle: bytes, own: SiloKeys = A, administrator: bytes = PUBLIC, held: int = 0) -> str:
    with pytest.raises(ProtocolError) as caught:
        unwrap(bundle, own, administrator, held)
    assert caught.value.sender == "administrator"
    return caught.value.check


def test_a_bundle_does_not_hold_the_secret_in_the_clear_and_no_two_are_alike() -> None:
    again = wrap(GROUP, "a", SIGNING)
    assert GROUP.key not in BUNDLE and GROUP.context not in BUNDLE
    assert again != BUNDLE and len(again) == len(BUNDLE)


def test_what_a_bundle_is_refused_for() -> None:
    stranger, other = SiloKeys.generate("a"), b"t" * 32
    of_other = type(GROUP)(3, GROUP.context, GROUP.key, GROUP.members, verification_key(other))
    assert refused(BUNDLE, held=3) == "epoch"
    assert refused(BUNDLE, held=4) == "epoch"
    assert refused(BUNDLE, own=B) == "silo"
    assert refused(BUNDLE, own=stranger) == "silo key"
    assert refused(wrap(of_other, "a", other)) == "administrator"
    assert refused(wrap(GROUP, "a", other)) == "signature", "names the administrator, but another signed it"
    assert refused(b"") == refused(b"x" * 1000) == refused(BUNDLE + bytes(4 * 2**20)) == "bundle"


def test_every_flipped_bit_and_every_cut_of_a_bundle_is_refused() -> None:
    checks = {refused(BUNDLE[:i] + bytes([BUNDLE[i] ^ 1]) + BUNDLE[i + 1 :]) for i in range(len(BUNDLE))}
    assert checks == {"bundle", "administrator", "signature"}
    assert {refused(BUNDLE[:i]) for i in range(len(BUNDLE))} == {"bundle", "signature"}


@pytest.mark.parametrize(
    ("change", "check"),
    [
        (lambda message: message[:40] + b"\xff\xff\xff\xff" + message[44:], "header"),
        (lambda message: message[:44], "header"),
        (lambda message: message.replace(b'"epoch":3', b'"epoch":0'), "header"),
        (lambda message: message.replace(b'"epoch":3', b'"epoch":9'), "wrapping"),
        (lambda message: message.replace(b"bfv-4096", b"bfv-8192"), "suite"),
        (lambda message: message.replace(b'"silo":"a"', b'"silo":"b"'), "silo"),
        (lambda message: message[:-1], "wrapping"),
        (lambda message: message[:-50], "wrapping"),
    ],
)
def test_even_what_the_administrator_signed_is_checked(change: Callable[[bytes], bytes], check: str) -> None:
    message = change(BUNDLE[:-64])
    assert message != BUNDLE[:-64]
    assert refused(message + sign(SIGNING, b"key bundle 1", message)) == check


def test_a_signature_for_something_else_is_none_for_a_bundle() -> None:
    message = BUNDLE[:-64]
    assert refused(message + sign(SIGNING, b"server keys 1", message)) == "signature"


def test_a_silos_line_tells_its_public_keys() -> None:
    line = announce(A)
    assert "\n" not in line and len(line) < 400
    assert read_announcement(line.encode(), "a.json") == ("a", A.public)
    assert all(secret.hex() not in line for secret in (A.exchange, A.signing))


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (b"", "not what `fedsync keys silo` prints"),
        (b"\xff\xfe", "not what"),
        (b"[" * 4000, "not what"),
        (b" " * 5000, "at most 4096"),
        (announce(A).replace('"a"', '"c"').encode(), "was changed"),
        (announce(A).replace('"a"', '"../c"').encode(), "silo"),
        (announce(A)[:-1].encode() + b',"more":1}', "more"),
        (announce(A).replace(A.public.exchange.hex(), B.public.exchange.hex()).encode(), "was changed"),
        (announce(A).replace(A.public.exchange.hex(), "00" * 32).encode(), "invalid exchange key"),
        (announce(A).replace(A.public.exchange.hex(), "00" * 31).encode(), "exchange"),
    ],
)
def test_a_damaged_line_is_refused_and_says_whose(line: bytes, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        read_announcement(line, "a.json")
    assert caught.value.place == "a.json"


def test_the_servers_file_reads_back() -> None:
    data = server_file(ServerKeys.of(GROUP), SIGNING)
    server = read_server_file(data, "server.json", PUBLIC)
    assert server == read_server_file(data, "server.json") == ServerKeys.of(GROUP)
    assert (server.epoch, server.fingerprint) == (3, GROUP.fingerprint)
    assert server.senders == {"a": A.public.signing, "b": B.public.signing}


def test_a_changed_server_file_is_refused() -> None:
    data = server_file(ServerKeys.of(GROUP), SIGNING)
    fields = json.loads(data)
    changes: list[dict[str, object]] = [
        {"epoch": 4},
        {"fingerprint": "00" * 16},
        {"senders": {"a": B.public.signing.hex()}},
        {"administrator": verification_key(b"t" * 32).hex()},
        {"suite": "plain"},
        {"more": 1},
    ]
    wrong = [json.dumps(fields | change).encode() for change in changes]
    for damaged in (*wrong, b"", data[:-10]):
        with pytest.raises(ConfigError, match=r"server\.json"):
            read_server_file(damaged, "server.json")
    of_other = server_file(ServerKeys.of(type(GROUP)(3, b"c", GROUP.key, {}, verification_key(b"t" * 32))), b"t" * 32)
    with pytest.raises(ConfigError, match="not by the administrator"):
        read_server_file(of_other, "server.json", PUBLIC)


def test_public_keys_have_their_length() -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        PublicKeys(b"x", b"y" * 32)
