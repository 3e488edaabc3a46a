"""A silo's side of transfers through a SuperLink's gate."""

import contextlib
import http.client

from fedsync.core.spans import SPAN_BYTES
from fedsync.flower.internals.parcel_client import ParcelClient
from fedsync.flower.internals.parcel_routes import PREFIX
from tests.flower.internals.superlink import Silo

LARGE = 3 * SPAN_BYTES + 17


def client(silo: Silo, port: int | None = None) -> ParcelClient:
    return ParcelClient(f"127.0.0.1:{port or silo.link.port}", None, lambda: silo.headers)


def asked(
    silo: Silo, method: str, path: str, body: bytes = b"", *, signed: bool = True, **told: str
) -> tuple[int, bytes]:
    """Status and text of the answer to a bare request."""
    line = http.client.HTTPConnection("127.0.0.1", silo.link.port, timeout=10)
    headers = {**(silo.headers if signed else {}), **{name.replace("_", "-"): value for name, value in told.items()}}
    with contextlib.closing(line):
        line.request(method, PREFIX + path, body or None, headers)
        answer = line.getresponse()
        return answer.status, answer.read()
