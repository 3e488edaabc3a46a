"""Node key of a silo: the key pair that proves to the server under which name the silo is registered.

Flower requires a key on a NIST curve in OpenSSH's format. The server's operator registers the public key with
``flwr supernode register``; the SuperNode signs its requests with the private key.
"""

from __future__ import annotations

import base64
import hashlib
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedsync.common.errors import ConfigError
from fedsync.common.files import ANYBODY_FILE, private_folder, read_private, write_atomically, write_private
from fedsync.common.names import check_silo_name

_MAX_KEY_BYTES = 2**16


@dataclass(frozen=True, slots=True)
class NodeKey:
    """Files of a silo's node key in OpenSSH's format: ``private`` for the SuperNode, and one ``public`` line for the
    server's operator. ``fingerprint`` has the form ``SHA256:...`` of ``ssh-keygen -l``.
    """

    name: str
    private: Path
    public: Path
    fingerprint: str


def make_node_key(name: str, folder: Path) -> NodeKey:
    """Return the folder's node key of a silo, ``NAME.node`` and ``NAME.node.pub``; a missing key is made, on P-384. A
    missing folder gets mode 0700. `ConfigError` for a forbidden name, an unsuitable folder, or a damaged key.
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
    line = node_public_line(private)
    write_atomically(public, line + b" " + name.encode() + b"\n", ANYBODY_FILE)
    return NodeKey(name, private, public, line_fingerprint(line))


def node_key_fingerprint(private: Path) -> str:
    return line_fingerprint(node_public_line(private))


def sign_by_node(private: Path, message: bytes) -> bytes:
    """Sign a message with the node key, ECDSA with SHA-384; `ConfigError` if others can access the key. Flower makes
    nodes sign the time with the same key, so a message must begin with a text that states its purpose.
    """
    return _private_key(private).sign(message, ec.ECDSA(hashes.SHA384()))


def is_signed_by_node(public: bytes, message: bytes, signature: bytes) -> bool:
    """Whether the owner of this public key (OpenSSH format) signed the message; False for an invalid key."""
    try:
        key = serialization.load_ssh_public_key(public)
        if not isinstance(key, ec.EllipticCurvePublicKey):
            return False
        key.verify(signature, message, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError, UnsupportedAlgorithm):
        return False
    return True


def node_public_line(private: Path) -> bytes:
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


def line_fingerprint(line: bytes) -> str:
    digest = hashlib.sha256(base64.b64decode(line.split()[1])).digest()
    return "SHA256:" + base64.b64encode(digest).rstrip(b"=").decode()
