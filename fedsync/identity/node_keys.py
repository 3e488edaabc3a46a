"""A silo's node key: what it proves to the server that it is the node registered under its name.

Flower wants a key on a NIST curve in OpenSSH's form: the server's operator registers the public half with
``flwr supernode register``, the SuperNode signs its requests with the private one.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedsync.common.files import ANYBODY_FILE, private_folder, read_private, write_atomically, write_private
from fedsync.common.names import check_silo_name
from fedsync.core.errors import ConfigError

_MAX_KEY_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class NodeKey:
    """Files of a silo's node key.

    Args:
        name: of the silo.
        private: OpenSSH form, secret; for the SuperNode.
        public: one line in OpenSSH form; for the server's operator.
        fingerprint: ``SHA256:...`` as ``ssh-keygen -l`` prints it.
    """

    name: str
    private: Path
    public: Path
    fingerprint: str


def make_node_key(name: str, folder: Path) -> NodeKey:
    """A silo's node key: the one in the folder, or a fresh one on P-384.

    Args:
        name: of the silo; also names the files, ``NAME.node`` and ``NAME.node.pub``.
        folder: made with mode 0700 if it is missing.

    Raises:
        ConfigError: the name is not allowed, the folder will not do, or its key is damaged.
    """
    check_silo_name(name)
    private_folder(folder)
    private, public = folder / f"{name}.node", folder / f"{name}.node.pub"
    if not private.exists():
        key = ec.generate_private_key(ec.SECP384R1())
        write_private(
            private,
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
            ),
        )
    line = _public_line(private)
    write_atomically(public, line + b" " + name.encode() + b"\n", ANYBODY_FILE)
    return NodeKey(name, private, public, _fingerprint(line))


def read_node_keys(folder: Path) -> list[NodeKey]:
    """The node keys in a folder, by name.

    Raises:
        ConfigError: one is damaged or open to others.
    """
    found = []
    for private in sorted(folder.glob("*.node")):
        public = private.with_name(private.name + ".pub")
        found.append(NodeKey(private.stem, private, public, _fingerprint(_public_line(private))))
    return found


def node_key_fingerprint(private: Path) -> str:
    """What the file's public half is called; raises `ConfigError` as `read_node_keys`."""
    return _fingerprint(_public_line(private))


def sign_by_node(private: Path, message: bytes) -> bytes:
    """The node's signature of a message, ECDSA with SHA-384.

    Flower has nodes sign the time, as a number in text, by the same key: a message begins with what says what it is.

    Raises:
        ConfigError: the key is damaged or open to others.
    """
    return _private_key(private).sign(message, ec.ECDSA(hashes.SHA384()))


def is_signed_by_node(private: Path, message: bytes, signature: bytes) -> bool:
    """Whether the node whose key this is signed a message; raises `ConfigError` as `sign_by_node`."""
    try:
        _private_key(private).public_key().verify(signature, message, ec.ECDSA(hashes.SHA384()))
    except InvalidSignature:
        return False
    return True


def _public_line(private: Path) -> bytes:
    """Kind and public key, as OpenSSH writes them."""
    public = _private_key(private).public_key()
    return public.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def _private_key(private: Path) -> ec.EllipticCurvePrivateKey:
    data = read_private(private, _MAX_KEY_BYTES)
    try:
        key = serialization.load_ssh_private_key(data, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        remedy = "Remove it and make another with `fedsync certs silo`; the server must register that one"
        raise ConfigError(str(private), "not an elliptic-curve key in OpenSSH form", remedy)
    return key


def _fingerprint(line: bytes) -> str:
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).rstrip(b"=").decode()
