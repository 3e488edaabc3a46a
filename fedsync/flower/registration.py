"""Registration of node keys by name at a SuperLink, and its revocation, through Flower's command line.

A SuperLink keeps every key for ever: a key that was revoked, or registered under another name, cannot be registered
again. It accepts several keys under one name, so a replaced key would stay valid. Its list of nodes has neither names
nor keys. So this module records all registrations in a file, and leaves one valid key per name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
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

_TIMEOUT_S, _LOCK_S = 60.0, 120.0
_DONE, _TAKEN, _GONE = '"success": true', "already in use", "Node ID not found"
_BY_HAND = "if it runs, use `flwr supernode list` and `flwr supernode unregister`"
_NUMBER = re.compile(r'"node-id": "?(\d+)')


@dataclass(frozen=True, slots=True)
class Registered:
    """Result of a registration.

    Args:
        problems: by silo, the reason why its key is not registered under its name: a `RunError` if a retry may help,
            otherwise a `ConfigError`.
        retired: number of other keys under the silo's name that were unregistered, if any.
        unsure: silos whose key the SuperLink already had: the key's registered name, or a revocation, is unknown.
    """

    problems: dict[str, FedSyncError] = field(default_factory=dict)
    retired: dict[str, int] = field(default_factory=dict)
    unsure: list[str] = field(default_factory=list)

    def check(self) -> None:
        if len(self.problems) == 1:
            raise next(iter(self.problems.values()))
        if self.problems:
            raise RunError("\n".join(str(problem) for problem in self.problems.values()))


@dataclass(slots=True)
class KnownNode:
    """Record of a registered key."""

    name: str
    key: str
    node: str
    revoked: bool = False


def write_connection(home: Path, name: str, address: str, authority: Path | None) -> None:
    """Write ``config.toml`` with the connection to a SuperLink for Flower's command line; `ConfigError` if that fails.
    ``authority`` is the absolute path of the CA certificate of the server's certificate; None for no TLS.
    """
    path = json.dumps(str(authority), ensure_ascii=False)
    trust = "insecure = true" if authority is None else f"root-certificates = {path}"
    text = f'[superlink]\ndefault = "{name}"\n\n[superlink.{name}]\naddress = "{address}"\n{trust}\n'
    write_atomically(home / "config.toml", text.encode())


def flwr_command() -> str:
    return str(Path(sys.executable).parent / "flwr")


def node_public_key(name: str, path: Path) -> EllipticCurvePublicKey:
    """Read a silo's public node key, in OpenSSH form; `ConfigError` if unreadable, or a SuperLink would refuse it."""
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


@contextmanager
def _changing(home: Path) -> Iterator[list[KnownNode]]:
    """Known nodes, while no other process changes them. Raises `RunError` if one does so for too long."""
    with taken(home / f"{NODES_FILE}.lock", _LOCK_S) as alone:
        if not alone:
            raise RunError("another process changes the registrations of this server; try again when it has ended")
        yield known_nodes(home)


def register_each(keys: Mapping[str, Path], home: Path, connection: str) -> Registered:
    """Register each key under the name of its silo; a problem with one key does not stop the others.

    Other keys under the name are unregistered after the silo's own key is registered. ``home`` is Flower's home folder,
    in which `write_connection` has written the connection. Raises `RunError`, and does nothing, while another process
    changes registrations.
    """
    found, digests = Registered(), dict[str, str]()
    with _changing(home) as known:
        for name, path in keys.items():
            try:
                digest = key_digest(node_public_key(name, path))
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
                found.problems[name] = RunError(
                    f"the key of {name!r} could not be registered: {' '.join(said.split())[-500:]}"
                )
                continue
            if code != 0:
                found.unsure.append(name)
            number = _NUMBER.search(said)
            known.append(KnownNode(name, digests[name], number.group(1) if number else ""))
        _retire(known, {name: digests[name] for name in keys if name not in found.problems}, home, connection, found)
        _save(home, known)
    return found


def _check(name: str, nodes: Sequence[KnownNode]) -> None:
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
    old = [node for node in known if node.name in wanted and node.key != wanted[node.name] and not node.revoked]
    done = _unregistered(old, home, connection)
    for node in done:
        found.retired[node.name] = found.retired.get(node.name, 0) + 1
    for name in {node.name for node in old if not node.revoked}:
        found.problems[name] = RunError(f"an older key of {name!r} is still registered; {_BY_HAND}")


def _unregistered(nodes: Sequence[KnownNode], home: Path, connection: str) -> list[KnownNode]:
    done, numbered = [], [node for node in nodes if node.node]
    calls = [["supernode", "unregister", node.node, connection] for node in numbered]
    for node, (code, said) in zip(numbered, _called(calls, home), strict=True):
        if code == 0 or _GONE in said:
            node.revoked = True
            done.append(node)
    return done


def revoke_keys(name: str, home: Path, connection: str) -> None:
    """Unregister all keys under a silo's name; `RunError` if the SuperLink fails, or another process changes keys."""
    with _changing(home) as known:
        doomed = [node for node in known if node.name == name and not node.revoked]
        done = _unregistered(doomed, home, connection)
        _save(home, known)
    if len(done) < len(doomed):
        raise RunError(f"the SuperLink did not unregister {len(doomed) - len(done)} keys of {name!r}; {_BY_HAND}")


def _called(calls: Sequence[Sequence[str]], home: Path) -> list[tuple[int, str]]:
    """Return exit code and output of calls of Flower's command line, in order; code 1 for unfinished calls, and for
    failed ones: with ``--format json``, Flower reports an error in its output, and exits with 0.
    """
    if not calls:
        return []
    plain = {"FORCE_COLOR": "", "TTY_COMPATIBLE": "0"}  # colour codes would be between the words of the output
    environment = {**os.environ, **unproxied(os.environ), **QUIET, **plain, "FLWR_HOME": str(home)}
    asked = json.dumps([[*arguments, "--format", "json"] for arguments in calls])
    try:
        done = subprocess.run(
            [*INTERPRETER, "fedsync.flower.flwr_calls"], input=asked, env=environment, capture_output=True,
            text=True, timeout=_TIMEOUT_S + 10.0 * len(calls), check=False,
        )  # fmt: skip
        said, why = done.stdout, done.stderr
    except subprocess.TimeoutExpired as error:
        said, why = (error.stdout or b"").decode(errors="replace"), "Flower's command line did not end in time"
    except OSError as error:
        said, why = "", f"Flower's command line cannot be started: {error.strerror}"
    answers = []
    with suppress(ValueError):
        answers = [(int(code or _DONE not in text), text) for code, text in map(json.loads, said.splitlines())]
    return [*answers[: len(calls)], *((1, why) for _ in calls[len(answers) :])]


def key_digest(key: EllipticCurvePublicKey) -> str:
    from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

    return hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()


def known_nodes(home: Path) -> list[KnownNode]:
    try:
        return [KnownNode(**each) for each in json.loads((home / NODES_FILE).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError) as error:
        remedy = "Restore it from a backup, together with the database of the same time"
        raise ConfigError(str(home / NODES_FILE), f"cannot be read: {error}", remedy) from error


def _save(home: Path, known: Sequence[KnownNode]) -> None:
    write_atomically(home / NODES_FILE, json.dumps([asdict(each) for each in known], indent=2).encode(), OWNER_FILE)
