"""Network of `bench/faults/networks.py`: a namespace for each silo, and a router that delays and drops packets.

Linux has `tc netem` for this, but some kernels lack it. Here each namespace has a TUN device, and one thread reads the
packets of all. So TCP is the kernel's own, with its retransmissions, and whole packets are lost. This needs root; the
network disappears when the process ends.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import threading
import time
from collections import defaultdict
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

CLONE_NEWNET = 0x40000000
_TUNSETIFF, _IFF_TUN, _IFF_NO_PI = 0x400454CA, 0x0001, 0x1000
MTU = 1500
SERVER = "10.77.0.1"
TCP, _FIN, _SYN, _RST = 6, 1, 2, 4

_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True, slots=True)
class Line:
    """What a silo's line does to packets, the same both ways.

    Args:
        delay_s: one way [s].
        loss: share of packets that are lost.
        mbps: megabits per second [Mbit/s].
        queue_s: a packet that would wait for longer than this is lost too [s].
        idle_s: a firewall forgets connections that were silent for so long, and drops what they send from then on [s].
    """

    delay_s: float = 0.0
    loss: float = 0.0
    mbps: float = inf
    queue_s: float = 0.5
    idle_s: float = inf


@dataclass(slots=True)
class Count:
    """What came to a line, both ways.

    Args:
        packets: all of them.
        payload: bytes that TCP carried.
        again: bytes of these that were sent before.
        lost: packets that the line dropped.
        forgotten: packets of connections that the firewall had forgotten.
        silence_s: longest time that a connection was silent before it was used again [s].
    """

    packets: int = 0
    payload: int = 0
    again: int = 0
    lost: int = 0
    forgotten: int = 0
    silence_s: float = 0.0


@dataclass(slots=True)
class _Silo:
    name: str
    address: str
    tun: int
    line: Line = field(default_factory=Line)
    count: Count = field(default_factory=Count)
    free_s: dict[bool, float] = field(default_factory=lambda: defaultdict(float))
    seen: dict[bytes, float] = field(default_factory=dict)
    sent: dict[bytes, int] = field(default_factory=dict)
    holder: subprocess.Popen[bytes] | None = None


class Lines:
    """Namespaces of silos, beside this process, which has one of its own from now on.

    Args:
        names: of the silos.
        seed: of what is lost.
    """

    def __init__(self, names: list[str], seed: int = 0) -> None:
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._due: list[tuple[float, int, int, bytes]] = []
        self._serial = 0
        if _libc.unshare(CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "no network namespace of its own: this takes root on Linux")
        _ip("link set lo up")
        self._server = _tun()
        _ip(f"addr add {SERVER}/16 dev line")
        _ip(f"link set line up mtu {MTU}")
        self._silos = {name: self._make(name, f"10.77.1.{number + 1}") for number, name in enumerate(names)}
        self._by_address = {silo.address: silo for silo in self._silos.values()}
        threading.Thread(target=self._route, daemon=True).start()

    def entering(self, name: str) -> list[str]:
        """What to write before a command that is to run in a silo's namespace."""
        return ["nsenter", f"--net=/proc/{self._holder(name).pid}/ns/net"]

    def set(self, name: str, line: Line) -> Count:
        """Have a silo's line be so from now on; the count begins anew and is returned."""
        with self._lock:
            silo = self._silos[name]
            silo.line, silo.count = line, Count()
            return silo.count

    def move(self, name: str) -> None:
        """Give a silo another address. Connections of the old one hear nothing any more, and nobody says so."""
        with self._lock:
            silo = self._silos[name]
            old = silo.address
            first, second, third, last = old.split(".")
            silo.address = f"{first}.{second}.{int(third) + 1}.{last}"
            del self._by_address[old]
            self._by_address[silo.address] = silo
        # In this order: with the first address of a network, Linux takes away all others.
        for told in (f"addr del {old}/16 dev line", f"addr add {silo.address}/16 dev line"):
            _ip(told, *self.entering(name))

    def close(self) -> None:
        """End what holds the namespaces."""
        for silo in self._silos.values():
            if silo.holder is not None:
                silo.holder.kill()
                silo.holder.wait()

    def _holder(self, name: str) -> subprocess.Popen[bytes]:
        holder = self._silos[name].holder
        assert holder is not None
        return holder

    def _make(self, name: str, address: str) -> _Silo:
        holder = subprocess.Popen(["unshare", "--net", "sleep", "infinity"], stdin=subprocess.DEVNULL)
        mine = Path("/proc/self/ns/net").readlink()
        while Path(f"/proc/{holder.pid}/ns/net").readlink() == mine:
            time.sleep(0.01)
        found: list[int] = []

        def enter() -> None:
            with Path(f"/proc/{holder.pid}/ns/net").open() as space:  # of this thread alone, which ends
                if _libc.setns(space.fileno(), CLONE_NEWNET):
                    raise OSError(ctypes.get_errno(), "setns")
            found.append(_tun())

        thread = threading.Thread(target=enter)
        thread.start()
        thread.join()
        silo = _Silo(name, address, found[0], holder=holder)
        enter_it = ["nsenter", f"--net=/proc/{holder.pid}/ns/net"]
        for told in ("link set lo up", f"addr add {address}/16 dev line", f"link set line up mtu {MTU}"):
            _ip(told, *enter_it)
        return silo

    # The router.

    def _route(self) -> None:
        poll = select.epoll()
        poll.register(self._server, select.EPOLLIN)
        for silo in self._silos.values():
            poll.register(silo.tun, select.EPOLLIN)
        while True:
            wait_s = max(self._due[0][0] - time.monotonic(), 0.0) if self._due else 1.0
            for tun, _ in poll.poll(wait_s):
                self._read(tun)
            now_s = time.monotonic()
            while self._due and self._due[0][0] <= now_s:
                _, _, tun, packet = heapq.heappop(self._due)
                os.write(tun, packet)

    def _read(self, tun: int) -> None:
        for _ in range(64):
            try:
                packet = os.read(tun, 65536)
            except BlockingIOError:
                return
            up = tun != self._server
            address = socket.inet_ntoa(packet[12:16] if up else packet[16:20]) if packet[0] >> 4 == 4 else ""
            with self._lock:
                silo = self._by_address.get(address)
                if silo is not None and (not up or silo.tun == tun):
                    self._take(silo, packet, up=up)

    def _take(self, silo: _Silo, packet: bytes, *, up: bool) -> None:
        """A packet comes to a line: it is lost, or due at the other end after its turn, its bits and its way."""
        line, count, now_s = silo.line, silo.count, time.monotonic()
        count.packets += 1
        if packet[9] == TCP and not self._passes(silo, packet, now_s):
            count.forgotten += 1
            return
        begin_s = max(silo.free_s[up], now_s)
        if self._random.random() < line.loss or begin_s - now_s > line.queue_s:
            count.lost += 1
            return
        silo.free_s[up] = end_s = begin_s + 8e-6 * len(packet) / line.mbps
        self._serial += 1
        heapq.heappush(self._due, (end_s + line.delay_s, self._serial, self._server if up else silo.tun, packet))

    def _passes(self, silo: _Silo, packet: bytes, now_s: float) -> bool:
        """Count what a segment carries, and whether the firewall knows its connection."""
        head = 4 * (packet[0] & 15)
        ports = packet[head : head + 4]
        (number,) = struct.unpack_from(">I", packet, head + 4)
        flags, length = packet[head + 13], len(packet) - head - 4 * (packet[head + 12] >> 4)
        flow = packet[12:20] + ports
        both = min(flow, packet[16:20] + packet[12:16] + ports[2:] + ports[:2])
        count, before_s = silo.count, silo.seen.get(both)
        if flags & _SYN:
            if not flags & 16:
                silo.sent.pop(flow, None)
        elif before_s is None or now_s - before_s > silo.line.idle_s:
            silo.seen[both] = -inf  # it stays forgotten, however often it is tried
            if silo.line.idle_s < inf:
                return False
        elif length > 0:
            count.silence_s = max(count.silence_s, now_s - before_s)
        silo.seen[both] = now_s
        if length > 0:
            count.payload += length
            newest = silo.sent.setdefault(flow, number)
            ahead = (number + length - newest) & 0xFFFFFFFF
            new = min(ahead, length) if ahead < 1 << 31 else 0
            count.again += length - new
            if new:
                silo.sent[flow] = (number + length) & 0xFFFFFFFF
        return True


def _tun() -> int:
    """A TUN device called ``line`` in the namespace of this thread."""
    tun = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(tun, _TUNSETIFF, struct.pack("16sH", b"line", _IFF_TUN | _IFF_NO_PI))
    return tun


def _ip(told: str, *before: str) -> None:
    subprocess.run([*before, "ip", *told.split()], check=True)
