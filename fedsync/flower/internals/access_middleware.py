"""Who may reach what of a SuperLink: silos the fleet's interface, everything else this machine only.

One port of the SuperLink serves three interfaces: that of SuperNodes, where nodes are authenticated; that of
operators, which registers nodes and starts runs; and that of ServerApps, which hands out their work. Flower
asks for no account on the last two, so whoever reaches them could register a node of any name.

Nor does Flower bound what a client sends, which it reads as a whole before it asks who that is. So a request is only
let through if it says how long it is, and that is not too long. Silos need no long ones: Flower cuts arrays into parts
of 5 MiB, each of which is a request.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MAX_REQUEST_BYTES = 2**24
"""Largest request of a silo: three parts of an array, or the names of the parts of a model of 100 000 tensors."""

_FOR_ALL = ("/v1/fleet/",)
_STRANGER = 403, b"only from the machine of the server\n"
_NO_LENGTH = 411, b"say how long the request is\n"
_TOO_LONG = 413, b"too long a request\n"
_DIGITS = 20


def allowed(path: str, host: str | None, own: str | None = None) -> bool:
    """Whether a client at the address ``host`` may ask for ``path`` at the server's address ``own``."""
    return path.startswith(_FOR_ALL) or path == "/health" or _from_here(host, own)


def _from_here(host: str | None, own: str | None) -> bool:
    if host is not None and host == own:
        return True
    try:
        address = ipaddress.ip_address(host or "")
    except ValueError:
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def _refusal(scope: Scope) -> tuple[int, bytes] | None:
    """Status and text of the answer to a request that is not passed on; None for one that is."""
    path = str(scope["path"])
    client, server = (address[0] if address else None for address in (scope.get("client"), scope.get("server")))
    if not allowed(path, client, server):
        return _STRANGER
    if not path.startswith(_FOR_ALL) and _from_here(client, server):
        return None
    headers = dict(scope["headers"])
    length = headers.get(b"content-length", b"0")
    if b"transfer-encoding" in headers or not length.isdigit():
        return _NO_LENGTH
    return _TOO_LONG if len(length) > _DIGITS or int(length) > MAX_REQUEST_BYTES else None


class AccessMiddleware:
    """Answers requests itself that come from elsewhere and are not for the fleet's interface, or are too long for it.

    Args:
        app: what is behind it, an ASGI application.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or pass it on."""
        refusal = None if scope["type"] == "lifespan" else _refusal(scope)
        if refusal is None:
            await self._app(scope, receive, send)
            return
        status, text = refusal
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(text)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text})


def put_gate_before_superlink() -> None:
    """Have the SuperLink that this process becomes stand behind a `AccessMiddleware`."""
    from flwr.superlink import main

    create = main.create_app

    def create_behind_gate(*arguments: Any, **options: Any) -> Any:
        app = create(*arguments, **options)
        app.add_middleware(AccessMiddleware)
        return app

    vars(main)["create_app"] = create_behind_gate
