"""Who sends a request to a SuperLink, told from its head alone: what a stranger sends after it is never read.

| caller | proof in the head | checked again by Flower |
|---|---|---|
| a silo | its registered public key, and its signature of the time | yes, with the number in the body |
| an app | the token of its task | yes |
| the SuperExec | an HMAC under the secret that it shares with the SuperLink | yes, with the body |
| an operator | the secret of the server's user, as a bearer's token | no: Flower asks for none |

Flower trusts whoever reaches the interface of operators, which any user of the server's machine does. A run's code runs
as the server's user. Hence the secret: a file in the server's state folder that only this user can read.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import TYPE_CHECKING, TypeVar

from anyio.to_thread import run_sync

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
    from flwr.server.superlink.linkstate import LinkState

Headers = Mapping[bytes, bytes]
Value = TypeVar("Value")

_REREAD_S = 1.0
_STALE_S = 10.0
"""How long a node that was revoked may go on, where Flower does not look at its requests too."""

_TOKEN_S = 60.0
_MOST_KEPT = 256
_MOST_PROOFS = 2**13
"""Proofs that need no second look, of the nodes that asked last. A node has one in use (`node_proof`)."""

_TOKEN = re.compile(rb"[0-9a-f]{256}")
_ACQUIRE = "/flwr.proto.Runtime/AcquireTask"


def _keep(kept: dict[bytes, Value], key: bytes, value: Value, most: int = _MOST_KEPT) -> None:
    kept.pop(key, None)
    while len(kept) >= most:
        del kept[next(iter(kept))]
    kept[key] = value


class Callers:
    """Knows the callers.

    Args:
        state: of the SuperLink.
        operator: the secret of operators.
        superexec: the secret of the SuperExec.
    """

    def __init__(self, state: Callable[[], LinkState], operator: str, superexec: bytes | None) -> None:
        self._state = state
        self._operator = f"Bearer {operator}".encode()
        self._superexec = superexec
        self._nodes: dict[bytes, tuple[int, EllipticCurvePublicKey]] = {}
        self._read_s = float("-inf")
        self._reading = asyncio.Lock()
        self._tokens: dict[bytes, float] = {}
        self._asking = asyncio.Lock()
        self._proved: dict[bytes, tuple[EllipticCurvePublicKey, bytes]] = {}

    def is_operator(self, headers: Headers) -> bool:
        """Whether the request is by somebody who can read the server's secret."""
        return hmac.compare_digest(headers.get(b"authorization", b""), self._operator)

    def is_superexec(self, headers: Headers) -> bool:
        """Whether the request to be given a task is by the server's SuperExec."""
        from flwr.supercore.auth import compute_superexec_signature, derive_auth_secret

        if self._superexec is None:
            return False
        stated = [headers.get(b"flwr-superexec-" + name, b"") for name in (b"ts", b"nonce", b"body-sha256")]
        try:
            time, nonce, body = (value.decode("ascii") for value in stated)
            expected = compute_superexec_signature(
                auth_secret=derive_auth_secret(self._superexec),
                method=_ACQUIRE,
                timestamp=int(time),
                nonce=nonce,
                body_sha256=body,
            )
        except ValueError:
            return False
        return hmac.compare_digest(expected.encode(), headers.get(b"flwr-superexec-signature", b""))

    async def is_app(self, headers: Headers) -> bool:
        """Whether the request is by a process that the SuperExec has started for a task that is not over."""
        token = headers.get(b"flwr-task-token", b"")
        now_s = asyncio.get_running_loop().time()
        if self._tokens.get(token, now_s) > now_s:
            return True
        if _TOKEN.fullmatch(token) is None:
            return False
        async with self._asking:  # one at a time: whoever makes tokens up takes one thread, not all
            if await run_sync(self._state().get_task_by_token, token.decode()) is None:
                return False
        _keep(self._tokens, token, now_s + _TOKEN_S)
        return True

    async def node(self, headers: Headers) -> int | None:
        """Number of the registered node that the request is by; None if it is by no such node."""
        from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_TOLERANCE
        from flwr.supercore.date import now

        try:
            public, signature = (
                base64.b64decode(headers[name], validate=True) for name in (b"flwr-public-key", b"flwr-signature")
            )
            time = headers[b"flwr-timestamp"]
            age_s = (now() - datetime.fromisoformat(time.decode("ascii"))).total_seconds()
        except (KeyError, ValueError, TypeError, binascii.Error):
            return None
        if not -SYSTEM_TIME_TOLERANCE < age_s < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE:
            return None
        if public not in self._nodes or asyncio.get_running_loop().time() - self._read_s > _STALE_S:
            await self._read_nodes()
        number, key = self._nodes.get(public, (None, None))
        if key is None or not self.verified(key, time, signature):
            return None
        _keep(self._proved, signature, (key, time), _MOST_PROOFS)
        return number

    def verified(self, key: EllipticCurvePublicKey, message: bytes, signature: bytes) -> bool:
        """As Flower's `verify_signature`, half a millisecond each, which looks at every signature after `node` did."""
        from flwr.supercore.primitives.asymmetric import verify_signature

        return self._proved.get(signature) == (key, message) or verify_signature(key, message, signature)

    async def _read_nodes(self) -> None:
        """Read who is registered, once a second at most, whoever asks how often."""
        loop = asyncio.get_running_loop()
        asked_s = loop.time()
        async with self._reading:
            if self._read_s >= asked_s:
                return
            await asyncio.sleep(max(0.0, self._read_s + _REREAD_S - loop.time()))
            self._read_s = loop.time()
            self._nodes = await run_sync(self._registered)

    def _registered(self) -> dict[bytes, tuple[int, EllipticCurvePublicKey]]:
        from flwr.supercore.constant import NodeStatus
        from flwr.supercore.primitives.asymmetric import bytes_to_public_key

        known = self._nodes
        found: dict[bytes, tuple[int, EllipticCurvePublicKey]] = {}
        for node in self._state().get_node_info():
            if node.status != NodeStatus.UNREGISTERED:
                public = bytes(node.public_key)
                # Reading a key takes longer than all else here.
                key = known[public][1] if public in known else bytes_to_public_key(public)
                found[public] = node.node_id, key
        return found
