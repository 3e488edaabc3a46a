"""Registers the keys of nodes by name at a SuperLink, and takes that back: by Flower's own command line.

A SuperLink keeps a key for ever: one that was revoked, or that came under another name, cannot be registered again. It
takes any number of keys under one name, so that one which was replaced would stay valid; and its list of nodes has
neither names nor keys. So what was registered is put down, and one key a name is left.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fedsync.common.errors import ConfigError, FedSyncError, RunError
from fedsync.common.files import OWNER_FILE, write_atomically
from fedsync.common.locks import taken
from fedsync.common.processes import INTERPRETER
from fedsync.common.proxies import unproxied
from fedsync.flower.process_environment import QUIET

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

NODES_FILE = "nodes.json"
"""In a server's state folder: the keys that were registered."""

_TIMEOUT_S, _LOCK_S = 60.0, 120.0
_TAKEN = "already in use"
_BY_HAND = "if it runs, use `flwr supernode list` and `flwr supernode unregister`"
_NUMBER = re.compile(r'"node-id": "?(\d+)')


@dataclass(frozen=True, slots=True)
class Registered:
    """What became of the keys that were to be registered.

    Args:
        problems: why a silo's key is not registered under its name: a `RunError` where another try may help, a
            `ConfigError` where it does not.
        retired: how many other keys under the silo's name were unregistered, where there were any.
        unsure: silos whose key the SuperLink had before, where nobody can say under which name, or if it was revoked.
    """

    problems: dict[str, FedSyncError] = field(default_factory=dict)
    retired: dict[str, int] = field(default_factory=dict)
    unsure: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise the problem, or a `RunError` with all of them."""
        if len(self.problems) == 1:
            raise next(iter(self.problems.values()))
        if self.problems:
            raise RunError("\n".join(str(problem) for problem in self.problems.values()))


@dataclass(slots=True)
class KnownNode:
    """A key that was registered.

    Args:
        name: of the silo.
        key: SHA-256 of the key, hexadecimal.
        node: number that the SuperLink gave it; empty where it does not say.
        revoked: whether its registration was taken back.
    """

    name: str
    key: str
    node: str
    revoked: bool = False


def write_connection(home: Path, name: str, address: str, authority: Path | None) -> None:
    """Tell Flower's command line, by ``config.toml`` in its home, how to reach a SuperLink.

    Args:
        home: Flower's, which ``FLWR_HOME`` names.
        name: of the connection.
        address: ``host:port``.
        authority: certificate that the server's was signed with, an absolute path; None for no TLS.

    Raises:
        ConfigError: nothing can be written there.
    """
    trust = "insecure = true" if authority is None else f'root-certificates = "{authority}"'
    text = f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\n{trust}\n'
    write_atomically(home / "config.toml", text.encode())


def flwr_command() -> str:
    """Flower's command line, which stands beside the interpreter."""
    return str(Path(sys.executable).parent / "flwr")


def node_public_key(name: str, path: Path) -> EllipticCurvePublicKey:
    """The public node key of a silo.

    Args:
        name: of the silo.
        path: file in OpenSSH form.

    Raises:
        ConfigError: it cannot be read, or a SuperLink would not take it.
    """
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric import ec
    from cryptography.hazmat.primitives.serialization import load_ssh_public_key

    remedy = f"Have {name} send the {name}.node.pub that `fedsync certs silo {name}` makes"
    try:
        key = load_ssh_public_key(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"silos, {name}", f"{path} cannot be read: {error.strerror}", remedy) from None
    except (ValueError, UnsupportedAlgorithm):
        raise ConfigError(f"silos, {name}", f"{path} is no public key", remedy) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ConfigError(f"silos, {name}", f"{path} is not a key on an elliptic curve", remedy)
    return key


def register_keys(keys: Mapping[str, Path], home: Path, connection: str) -> None:
    """As `register_each`, where every key has to be registered.

    Raises:
        ConfigError: a key will not do.
        RunError: the SuperLink refused a key, or cannot be reached; or there were several problems.
    """
    register_each(keys, home, connection).check()


def register_each(keys: Mapping[str, Path], home: Path, connection: str) -> Registered:
    """Have each key be the one that is registered under the name of its silo; a problem with one stops no other.

    Other keys under the name are unregistered, once the silo's own is registered.

    Args:
        keys: public key files in OpenSSH form, by silo.
        home: Flower's, where `write_connection` has written how to reach the SuperLink.
        connection: name of that connection.
    """
    found, digests = Registered(), dict[str, str]()
    with taken(home / f"{NODES_FILE}.lock", _LOCK_S):
        known = _known(home)
        for name, path in keys.items():
            try:
                digest = _digest(node_public_key(name, path))
                others = [KnownNode(other, each, "") for other, each in digests.items() if each == digest]
                _check(name, [*others, *(node for node in known if node.key == digest)])
                digests[name] = digest
            except ConfigError as error:
                found.problems[name] = error
        missing = {node.name for node in known if not node.revoked and node.key == digests.get(node.name)}
        fresh = [name for name in keys if name not in found.problems and name not in missing]
        calls = [["supernode", "register", str(keys[name]), connection, "--name", name] for name in fresh]
        for name, (code, said) in zip(fresh, _called(calls, home), strict=True):
            if code != 0 and _TAKEN not in said:
                found.problems[name] = RunError(f"the key of {name!r} could not be registered: {_words(said)}")
                continue
            if code != 0:
                found.unsure.append(name)
            number = _NUMBER.search(said)
            known.append(KnownNode(name, digests[name], number.group(1) if number else ""))
        _retire(known, {name: digests[name] for name in keys if name not in found.problems}, home, connection, found)
        _save(home, known)
    return found


def _check(name: str, nodes: Sequence[KnownNode]) -> None:
    """See that a key may be registered under a name; raises `ConfigError` otherwise."""
    remedy = (
        "At the silo, make another with `fedsync silo rotate` and send its public half. "
        f"Do not remove {name}.node by hand: the silo's audit log could not tell the new key from a stranger's"
    )
    for node in nodes:
        if node.revoked:
            raise ConfigError(f"silos, {name}", "its key was revoked before, and Flower takes no key twice", remedy)
        if node.name != name:
            raise ConfigError(f"silos, {name}", f"its key is registered under the name {node.name!r}", remedy)


def _retire(
    known: Sequence[KnownNode], wanted: Mapping[str, str], home: Path, connection: str, found: Registered
) -> None:
    """Take back the registration of other keys under the names of silos."""
    old = [node for node in known if node.name in wanted and node.key != wanted[node.name] and not node.revoked]
    done = _unregistered(old, home, connection)
    for node in done:
        found.retired[node.name] = found.retired.get(node.name, 0) + 1
    for name in {node.name for node in old if not node.revoked}:
        found.problems[name] = RunError(f"an older key of {name!r} is still registered; {_BY_HAND}")


def _unregistered(nodes: Sequence[KnownNode], home: Path, connection: str) -> list[KnownNode]:
    """Those of the nodes whose registration is taken back now."""
    done, numbered = [], [node for node in nodes if node.node]
    calls = [["supernode", "unregister", node.node, connection] for node in numbered]
    for node, (code, _) in zip(numbered, _called(calls, home), strict=True):
        if code == 0:
            node.revoked = True
            done.append(node)
    return done


def revoke_keys(name: str, home: Path, connection: str) -> int:
    """Take back the registration of every key under a silo's name; returns how many there were.

    Raises:
        RunError: the SuperLink refuses, or cannot be reached.
    """
    with taken(home / f"{NODES_FILE}.lock", _LOCK_S):
        known = _known(home)
        doomed = [node for node in known if node.name == name and not node.revoked]
        done = _unregistered(doomed, home, connection)
        _save(home, known)
    if len(done) < len(doomed):
        raise RunError(f"the SuperLink did not take back {len(doomed) - len(done)} keys of {name!r}; {_BY_HAND}")
    return len(done)


def _called(calls: Sequence[Sequence[str]], home: Path) -> list[tuple[int, str]]:
    """Exit code and output of calls of Flower's command line, in their order; 1 for those that do not come back."""
    if not calls:
        return []
    environment = {**os.environ, **unproxied(os.environ), **QUIET, "FLWR_HOME": str(home)}
    asked = json.dumps([[*arguments, "--format", "json"] for arguments in calls])
    try:
        done = subprocess.run(
            [*INTERPRETER, "fedsync.flower.flwr_calls"], input=asked, env=environment, capture_output=True,
            text=True, timeout=_TIMEOUT_S + 10.0 * len(calls), check=False,
        )  # fmt: skip
        said, why = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        said, why = (error.stdout or b"").decode(errors="replace"), "Flower's command line does not come back"
    except OSError as error:
        said, why = "", f"Flower's command line cannot be started: {error.strerror}"
    answers = []
    with suppress(ValueError):
        answers = [json.loads(line) for line in said.splitlines()][: len(calls)]
    return [*((int(code), str(text)) for code, text in answers), *((1, why) for _ in calls[len(answers) :])]


def _words(said: str) -> str:
    return " ".join(said.split())[-500:]


def _digest(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def _known(home: Path) -> list[KnownNode]:
    try:
        return [KnownNode(**each) for each in json.loads((home / NODES_FILE).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []


def _save(home: Path, known: Sequence[KnownNode]) -> None:
    write_atomically(home / NODES_FILE, json.dumps([asdict(each) for each in known], indent=2).encode(), OWNER_FILE)
