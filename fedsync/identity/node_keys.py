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
from fedsync.common.files import ANYBODY_FILE, private_folder, read_input, read_private, write_atomically, write_private
from fedsync.common.names import check_silo_name

_MAX_KEY_BYTES = 2**16
_P384, _P384_POINT = bytes.fromhex("3076301006072a8648ce3d020106052b81040022036200"), 97
"""First bytes of the DER form of a public key on P-384, and the number of bytes of the point that follows."""


@dataclass(frozen=True, slots=True)
class NodeKey:
    """Files of a silo's node key: ``private`` for the SuperNode, and one ``public`` line for the server's operator.

    Both are in OpenSSH's format; ``fingerprint`` has the form ``SHA256:...`` of ``ssh-keygen -l``.
    """

    name: str
    private: Path
    public: Path
    fingerprint: str


def make_node_key(name: str, folder: Path) -> NodeKey:
    """Return the folder's node key of a silo, ``NAME.node`` and ``NAME.node.pub``; make one on P-384 if there is none.

    A missing folder is created with mode 0700. Raises `ConfigError` if the name is not allowed, the folder is
    unsuitable, or its key is damaged.
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


def read_node_keys(folder: Path) -> list[NodeKey]:
    """Read a folder's node keys, sorted by name; raises `ConfigError` for a damaged key or one others can access."""
    found = []
    for name in sorted(
        {path.name.removesuffix(".pub") for path in (*folder.glob("*.node"), *folder.glob("*.node.pub"))}
    ):
        private, public = folder / name, folder / f"{name}.pub"
        line = node_public_line(private) if private.exists() else public_line_of(public)
        found.append(NodeKey(private.stem, private, public, line_fingerprint(line)))
    return found


def public_line_of(path: Path) -> bytes:
    """Return type and public key (OpenSSH) of a silo's file; raises `ConfigError` for no elliptic-curve key."""
    try:
        key = serialization.load_ssh_public_key(read_input(path, _MAX_KEY_BYTES))
    except (ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        remedy = "Have the silo send the NAME.node.pub that `fedsync certs silo` makes"
        raise ConfigError(str(path), "not a public key on an elliptic curve in OpenSSH form", remedy)
    return key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)


def node_key_fingerprint(private: Path) -> str:
    return line_fingerprint(node_public_line(private))


def sign_by_node(private: Path, message: bytes) -> bytes:
    """Sign a message with the node key, ECDSA with SHA-384; raises `ConfigError` as `read_node_keys`.

    Flower makes nodes sign the time with the same key, so a message must begin with a text that states its purpose.
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
    """Return type and public key in OpenSSH format; raises `ConfigError` as `read_node_keys`."""
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
