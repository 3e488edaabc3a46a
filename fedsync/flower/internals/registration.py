"""Registers the keys of nodes by name at a SuperLink, and takes that back.

A SuperLink keeps a key for ever: one that was revoked, or that came under another name, cannot be registered again. It
takes any number of keys under one name, so that one which was replaced would stay valid. Hence it is asked first what
it has, once for all keys that are to be registered, and one key a name is left.

The stock way is ``flwr supernode register KEY.pub CONNECTION --name NAME``, which costs a second or two of imports for
each key, and cannot look: its list of nodes has neither names nor keys. With the versions of flwr in
`fedsync.flower.internals.versions.TESTED` the same requests are made here, through Flower's own client; with any
other the command is run.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from fedsync.common.environment import environment as variables
from fedsync.common.files import write_atomically
from fedsync.common.proxies import unproxied
from fedsync.core.errors import ConfigError, FedSyncError, RunError
from fedsync.flower.environment import QUIET
from fedsync.flower.internals import versions
from fedsync.flower.internals.operator import read_secret

if TYPE_CHECKING:
    import httpx
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.protobuf.client import ProtobufCall, ProtobufRequestContext

_TIMEOUT_S = 60.0
_TAKEN = "already in use"
_REVOKED = "unregistered"


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


def register_keys(keys: Mapping[str, Path], home: Path, connection: str, address: str, authority: Path) -> None:
    """As `register_each`, where every key has to be registered.

    Raises:
        ConfigError: a key will not do.
        RunError: the SuperLink refused a key, or cannot be reached; or there were several problems.
    """
    register_each(keys, home, connection, address, authority).check()


def register_each(keys: Mapping[str, Path], home: Path, connection: str, address: str, authority: Path) -> Registered:
    """Have each key be the one that is registered under the name of its silo; a problem with one stops no other.

    Other keys under the name are unregistered, once the silo's own is registered; with a version of flwr that was not
    tested they stay.

    Args:
        keys: public key files in OpenSSH form, by silo.
        home: Flower's, where `write_connection` has written how to reach the SuperLink.
        connection: name of that connection.
        address: of the SuperLink, ``host:port``.
        authority: certificate that the server's was signed with.
    """
    environment = {**os.environ, **unproxied(os.environ), **QUIET, "FLWR_HOME": str(home)}
    found = Registered()
    with ExitStack() as open_until_then:
        registry = None
        for name, path in keys.items():
            try:
                key = node_public_key(name, path)
                if not versions.supported():
                    if not _register_by_command(name, path, connection, environment):
                        found.unsure.append(name)
                    continue
                with _told(address):
                    if registry is None:
                        registry = _Registry(open_until_then.enter_context(_operator(home, address, authority)))
                    retired = registry.register(name, key)
                if retired:
                    found.retired[name] = retired
            except ConfigError as error:
                found.problems[name] = error
            except RunError as error:
                found.problems[name] = RunError(f"the key of {name!r} could not be registered: {error}")
    return found


def revoke_keys(name: str, home: Path, address: str, authority: Path) -> int:
    """Take back the registration of every key under a silo's name; returns how many there were.

    A node that is online is cut off: its next request is refused.

    Raises:
        ConfigError: this version of flwr was not tested.
        RunError: the SuperLink refuses, or cannot be reached.
    """
    if not versions.supported():
        remedy = "Use `flwr supernode list CONNECTION --format json` and `flwr supernode unregister NODE_ID CONNECTION`"
        raise ConfigError("flwr", "not a version that this was tested with", remedy)
    from flwr.proto.control_pb2 import ListNodesRequest, UnregisterNodeRequest

    with _told(address), _operator(home, address, authority) as client:
        known = client.ListNodes(ListNodesRequest()).nodes_info
        doomed = [node.node_id for node in known if node.name == name and node.status != _REVOKED]
        for node in doomed:
            client.UnregisterNode(UnregisterNodeRequest(node_id=node))
    return len(doomed)


class _Registry:
    """The keys that a SuperLink has, asked for once: each answer has all of them."""

    def __init__(self, client: ControlHttpClient) -> None:
        from flwr.proto.control_pb2 import ListNodesRequest

        self._client = client
        self._nodes = {node.public_key: node for node in client.ListNodes(ListNodesRequest()).nodes_info}
        self._valid: defaultdict[str, list[bytes]] = defaultdict(list)
        for public, node in self._nodes.items():
            if node.status != _REVOKED:
                self._valid[node.name].append(public)

    def register(self, name: str, key: EllipticCurvePublicKey) -> int:
        """Register a key, and unregister others under its name; returns how many there were."""
        from flwr.proto.control_pb2 import RegisterNodeRequest, UnregisterNodeRequest
        from flwr.proto.node_pb2 import NodeInfo
        from flwr.supercore.primitives.asymmetric import public_key_to_bytes

        public = public_key_to_bytes(key)
        known = self._nodes.get(public)
        remedy = (
            "At the silo, make another with `fedsync silo rotate` and send its public half. "
            f"Do not remove {name}.node by hand: the silo's audit log could not tell the new key from a stranger's"
        )
        if known is None:
            self._client.RegisterNode(RegisterNodeRequest(public_key=public, name=name))
            self._nodes[public] = NodeInfo(public_key=public, name=name)
        elif known.status == _REVOKED:
            raise ConfigError(f"silos, {name}", "its key was revoked before, and Flower takes no key twice", remedy)
        elif known.name != name:
            raise ConfigError(f"silos, {name}", f"its key is registered under the name {known.name!r}", remedy)
        others = [other for other in self._valid.pop(name, ()) if other != public]
        for other in others:
            self._client.UnregisterNode(UnregisterNodeRequest(node_id=self._nodes[other].node_id))
            self._nodes[other].status = _REVOKED
        return len(others)


def _register_by_command(name: str, path: Path, connection: str, environment: Mapping[str, str]) -> bool:
    """Register a key by Flower's command line; False where the SuperLink had it before."""
    command = [flwr_command(), "supernode", "register", str(path), connection, "--name", name]
    try:
        done = subprocess.run(
            command, env=dict(environment), capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except (subprocess.TimeoutExpired, OSError) as error:
        raise RunError(str(error)) from error
    if done.returncode == 0:
        return True
    if _TAKEN in done.stdout + done.stderr:
        return False
    raise RunError((done.stdout + done.stderr).strip())


@contextmanager
def _operator(home: Path, address: str, authority: Path) -> Iterator[ControlHttpClient]:
    """Flower's client for operators."""
    from flwr.cli.cli_client_interceptor import CliClientHttpInterceptor
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor

    def show_secret(context: ProtobufRequestContext, call_next: ProtobufCall) -> httpx.Response:
        context.request.headers["Authorization"] = f"Bearer {secret}"
        return call_next(context)

    secret = read_secret(home)
    with variables(unproxied(os.environ)):  # it reads them as it is made
        client = ControlHttpClient.from_server_address(
            server_address=address,
            insecure=False,
            root_certificates=authority.read_bytes(),
            interceptors=[
                CliClientHttpInterceptor(),
                RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
                SimpleNamespace(intercept=show_secret),
            ],
        )
    with closing(client):
        yield client


@contextmanager
def _told(address: str) -> Iterator[None]:
    """What the SuperLink refuses is a `RunError` that says why."""
    import httpx

    try:
        yield
    except httpx.HTTPStatusError as error:
        raise RunError(f"the SuperLink at {address} refuses: {error.response.text}") from error
    except httpx.HTTPError as error:
        raise RunError(f"the SuperLink at {address} does not answer: {error}") from error
