"""A hub with TLS on loopback, and silos' lines to it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from fedsync.identity.certificates import Authority, make_authority, make_server_certificate
from fedsync.transport.hub.hub import Hub
from fedsync.transport.hub_line import HubLine, ReceivedQuestion
from fedsync.transport.join import Join, new_secret
from fedsync.transport.port import BASE


@dataclass
class Served:
    """A hub that is up.

    Args:
        hub: the hub.
        address: its URL, with the path of all that it answers.
        authority: PEM that silos trust.
        lines: that tests have opened.
    """

    hub: Hub
    address: str
    authority: str
    lines: list[HubLine] = field(default_factory=list)

    @property
    def port(self) -> int:
        return int(self.address.removesuffix(BASE).rpartition(":")[2])

    def invited(self, silo: str) -> Join:
        return self.hub.invite(silo, [self.address], self.authority)

    def line(self, join: Join, secret: str | None = None) -> HubLine:
        self.lines.append(HubLine(join, secret or new_secret()))
        return self.lines[-1]

    def joined(self, silo: str) -> HubLine:
        line = self.line(self.invited(silo))
        line.join()
        return line


def asked(line: HubLine, after: int = 0) -> ReceivedQuestion:
    found = line.asked(after)
    assert found is not None
    return found


@contextmanager
def served(folder: Path, port: int = 0) -> Iterator[Served]:
    """A hub in a folder, until the block ends; what is in the folder stays."""
    authority = Authority.at(folder / "authority")
    if not authority.key.exists():
        authority = make_authority(folder / "authority")
    certificate = make_server_certificate(authority, ["127.0.0.1"], folder / "server")
    hub = Hub(folder / "hub")
    port = hub.start(port=port, certificate=certificate.certificate, key=certificate.key)
    found = Served(hub, f"https://127.0.0.1:{port}{BASE}", authority.certificate.read_text())
    try:
        yield found
    finally:
        for line in found.lines:
            line.close()
        hub.close(over=False)
