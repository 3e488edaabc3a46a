"""The part of `sealing` that breaks suites and keys."""

from __future__ import annotations

from bench.faults.breakages._core import Changes

KEYS: Changes = {
    "cipher/keys/material.py": (
        (
            "a-secret-is-not-bound-to-the-two-keys",
            'return hkdf(shared, salt, b"fedsync agree 1\\0" + context, length)',
            'return hkdf(shared, b"", b"fedsync agree 1\\0" + context, length)',
        ),
        (
            "every-epoch-has-the-same-keys",
            'f"fedsync group 1/{self.epoch}/{purpose}"',
            'f"fedsync group 1/{purpose}"',
        ),
        (
            "all-purposes-share-a-key",
            'f"fedsync group 1/{self.epoch}/{purpose}"',
            'f"fedsync group 1/{self.epoch}"',
        ),
        (
            "the-server-can-try-out-grids",
            'return hmac.digest(self._naming, digest, "sha256")',
            'return hmac.digest(self.fingerprint, digest, "sha256")',
        ),
    ),
    "cipher/keys/keywrap.py": (
        (
            "an-older-epoch-is-accepted",
            "if header.epoch <= held_epoch:",
            "if False:",
        ),
        (
            "anybody-s-bundle-is-accepted",
            "if signer != administrator:",
            "if False:",
        ),
        (
            "a-changed-bundle-is-accepted",
            "if not is_signed(administrator, _BUNDLE, message, signature):",
            "if False:",
        ),
    ),
    "cipher/keys/authority.py": (
        (
            "two-silos-have-one-exchange-key",
            "if public.signing == member.signing or public.exchange == member.exchange:",
            "if public.signing == member.signing:",
        ),
    ),
    "cipher/suites/suite.py": (
        (
            "a-sum-holds-more-than-opens",
            "if not 1 <= len(members) <= limit:",
            "if not 1 <= len(members):",
        ),
        (
            "two-updates-have-one-nonce",
            "if len({member.nonce for member in members}) != len(members):",
            "if False:",
        ),
    ),
    "cipher/suites/pad.py": (
        (
            "a-pad-is-used-again-for-a-repeated-update",
            'b"fedsync pad 2\\0" + member.nonce + member.chain + name',
            'b"fedsync pad 2\\0" + member.chain + name',
        ),
        (
            "every-chunk-has-one-pad",
            "numbers = self._stream.words(SLOTS)",
            "numbers = Keystream(self._key).words(SLOTS)",
        ),
    ),
    "cipher/suites/__init__.py": (
        (
            "pads-and-tags-share-a-key",
            "return Pad(group.derive(Purpose.PAD))",
            "return Pad(group.derive(Purpose.TAG))",
        ),
    ),
}
