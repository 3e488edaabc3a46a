"""A small HTTP proxy in a thread: passes connections on, refuses, wants a password, or reads along in TLS."""

from __future__ import annotations

import base64
import contextlib
import socket
import ssl
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest

from fedsync.identity.certificates import ServerCertificate


class ConnectProxy:
    """Serves CONNECT on loopback.

    Args:
        to: port on loopback that every connection is passed on to, whatever host is named: as by the proxy's own DNS.
        status: answered in place of 200.
        user: ``user:password`` without which it answers 407.
        reads: folder with a certificate under which it ends TLS, and reads along.
    """

    def __init__(self, to: int = 0, status: str = "", user: str = "", reads: Path | None = None) -> None:
        self._to, self._status, self._user, self._reads = to, status, user, reads
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.url = f"http://127.0.0.1:{self.port}"
        self.asked: list[str] = []
        threading.Thread(target=self._serve, daemon=True).start()

    def close(self) -> None:
        # A thread that waits in accept() holds the socket open until it is shut down.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                line, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(line,), daemon=True).start()

    def _answer(self, line: socket.socket) -> None:
        with contextlib.suppress(OSError), line:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                byte = line.recv(1)
                if not byte:
                    return
                head += byte
            text = head.decode()
            self.asked.append(text.partition("\r\n")[0])
            known = base64.b64encode(self._user.encode()).decode()
            status = self._status or "200 Connection established"
            if self._user and f"Proxy-Authorization: Basic {known}\r\n" not in text:
                status = "407 Proxy Authentication Required"
            line.sendall(f"HTTP/1.1 {status}\r\n\r\n".encode())
            if not status.startswith("200"):
                return
            if self._reads is not None:
                context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
                files = ServerCertificate.at(self._reads)
                context.load_cert_chain(files.certificate, files.key)
                context.wrap_socket(line, server_side=True).close()
                return
            with socket.create_connection(("127.0.0.1", self._to)) as far:
                back = threading.Thread(target=_copy, args=(far, line), daemon=True)
                back.start()
                _copy(line, far)
                back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
        sink.shutdown(socket.SHUT_WR)


@contextlib.contextmanager
def proxy(to: int = 0, *, status: str = "", user: str = "", reads: Path | None = None) -> Iterator[ConnectProxy]:
    made = ConnectProxy(to, status, user, reads)
    try:
        yield made
    finally:
        made.close()


def as_httpx_goes(variables: Mapping[str, str], url: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Address of the proxy that Flower's HTTP client goes through to a URL under these variables."""
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        with httpx.Client() as client:
            return proxy_of(client, url)


def proxy_of(client: httpx.Client, url: str) -> str | None:
    """Address of the proxy that the client goes through to a URL."""
    found = getattr(client._transport_for_url(httpx.URL(url))._pool, "_proxy_url", None)  # type: ignore[attr-defined]
    return None if found is None else f"{found.host.decode()}:{found.port}"
