"""Confinement of this process and its children on Linux: Landlock for files and ports, seccomp for sockets.

Landlock (``landlock(7)``) denies access to all files except the named ones, and to all TCP ports except the named ones
(Linux 6.7). It also denies access to other processes' memory, and signals to them (6.12). It does not control Unix
sockets and UDP, so a seccomp filter (``seccomp(2)``) allows only TCP sockets. Both need no privileges, and cannot be
undone. The package ``landlock`` does not support ports, so the three system calls are made here.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import resource
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import fedsync
from fedsync.common.errors import ConfigError
from fedsync.common.files import remove_tree

_CREATE, _ADD, _RESTRICT = 444, 445, 446
_VERSION = 1
_NO_NEW_PRIVILEGES, _SECCOMP, _FILTER = 38, 22, 2
_CAPABILITIES = 0x20080522

_EXECUTE, _WRITE, _READ, _LIST, _REMOVE_DIR, _REMOVE_FILE = (1 << bit for bit in range(6))
_MAKE_DIR, _MAKE_FILE, _MAKE_LINK = 1 << 7, 1 << 8, 1 << 12
_REFER, _TRUNCATE, _IOCTL = 1 << 13, 1 << 14, 1 << 15
_CONNECT_TCP, _BIND_TCP = 1 << 1, 1 << 0
_LOOK = _READ | _LIST | _EXECUTE
_KEEP = _READ | _LIST | _WRITE | _TRUNCATE | _MAKE_DIR | _MAKE_FILE | _MAKE_LINK | _REMOVE_DIR | _REMOVE_FILE | _REFER
_DROP = _WRITE | _MAKE_FILE | _REMOVE_FILE | _TRUNCATE
_OF_FILES = _EXECUTE | _WRITE | _READ | _TRUNCATE | _IOCTL
_BENEATH, _PORT = 1, 2

NETWORK_ABI = 4
"""First Landlock version that controls ports."""

_SIGNALS_ABI = 6

_ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS = {
    "x86_64": {
        "socket": 41, "socketpair": 53, "sendto": 44, "sendmsg": 46, "sendmmsg": 307,
        "bind": 49, "listen": 50, "add_key": 248, "request_key": 249, "keyctl": 250, "io_uring_setup": 425,
        "inotify_add_watch": 254, "fanotify_init": 300, "ptrace": 101, "process_vm_readv": 310,
        "process_vm_writev": 311, "pidfd_getfd": 438, "unshare": 272, "setns": 308, "mount": 165, "bpf": 321,
        "userfaultfd": 323, "perf_event_open": 298,
        "chmod": 90, "fchmodat": 268, "fchmodat2": 452, "chown": 92, "lchown": 94, "fchownat": 260, "setxattr": 188,
        "lsetxattr": 189, "removexattr": 197, "lremovexattr": 198, "setxattrat": 463, "removexattrat": 466,
        "utime": 132, "utimes": 235, "futimesat": 261, "utimensat": 280,
        "kill": 62, "tkill": 200, "tgkill": 234, "rt_sigqueueinfo": 129, "rt_tgsigqueueinfo": 297,
        "pidfd_send_signal": 424, "shmget": 29, "msgget": 68, "semget": 64, "prlimit64": 302, "setpriority": 141,
        "ioprio_set": 251, "sched_setaffinity": 203, "sched_setscheduler": 144, "sched_setparam": 142,
        "sched_setattr": 314, "clone": 56, "clone3": 435, "fcntl": 72, "setsockopt": 54,
        "fchmod": 91, "fchown": 93, "fsetxattr": 190, "fremovexattr": 199, "file_setattr": 469,
        "shmat": 30, "shmctl": 31, "shmdt": 67, "msgsnd": 69, "msgrcv": 70, "msgctl": 71, "semop": 65, "semctl": 66,
        "semtimedop": 220, "setsid": 112, "setpgid": 109, "ioctl": 16, "prctl": 157,
    },
    "aarch64": {
        "socket": 198, "socketpair": 199, "sendto": 206, "sendmsg": 211, "sendmmsg": 269,
        "bind": 200, "listen": 201, "add_key": 217, "request_key": 218, "keyctl": 219, "io_uring_setup": 425,
        "inotify_add_watch": 27, "fanotify_init": 262, "ptrace": 117, "process_vm_readv": 270,
        "process_vm_writev": 271, "pidfd_getfd": 438, "unshare": 97, "setns": 268, "mount": 40, "bpf": 280,
        "userfaultfd": 282, "perf_event_open": 241,
        "fchmodat": 53, "fchmodat2": 452, "fchownat": 54, "setxattr": 5, "lsetxattr": 6, "removexattr": 14,
        "lremovexattr": 15, "setxattrat": 463, "removexattrat": 466, "utimensat": 88,
        "kill": 129, "tkill": 130, "tgkill": 131, "rt_sigqueueinfo": 138, "rt_tgsigqueueinfo": 240,
        "pidfd_send_signal": 424, "shmget": 194, "msgget": 186, "semget": 190, "prlimit64": 261, "setpriority": 140,
        "ioprio_set": 30, "sched_setaffinity": 122, "sched_setscheduler": 119, "sched_setparam": 118,
        "sched_setattr": 274, "clone": 220, "clone3": 435, "fcntl": 25, "setsockopt": 208,
        "fchmod": 52, "fchown": 55, "fsetxattr": 7, "fremovexattr": 16, "file_setattr": 469,
        "shmat": 196, "shmctl": 195, "shmdt": 197, "msgsnd": 189, "msgrcv": 188, "msgctl": 187, "semop": 193,
        "semctl": 191, "semtimedop": 192, "setsid": 157, "setpgid": 154, "ioctl": 29, "prctl": 167,
    },
}  # fmt: skip

_DENIED = (
    *("bind", "listen", "add_key", "request_key", "keyctl", "io_uring_setup", "inotify_add_watch", "fanotify_init"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "unshare", "setns", "mount", "bpf"),
    *("userfaultfd", "perf_event_open", "shmget", "msgget", "semget", "ioprio_set"),
    *("rt_sigqueueinfo", "rt_tgsigqueueinfo", "pidfd_send_signal", "shmat", "shmctl", "shmdt"),
    *("msgsnd", "msgrcv", "msgctl", "semop", "semctl", "semtimedop"),
)
_SIGNALS = ("kill", "tkill", "tgkill")
_SERVING = ("bind", "listen")
_GROUPS = ("setsid", "setpgid")
"""System calls by which a process leaves its group and would not be killed with it."""

_OWNER_CONTROLS, _DEATH_SIGNAL = (0x8901, 0x8902), 1
_OF_ITSELF = ("prlimit64", "sched_setaffinity", "sched_setscheduler", "sched_setparam", "sched_setattr")
"""System calls whose first argument is a process; 0 is the caller."""

_IN_VAIN = (
    *("chmod", "fchmodat", "fchmodat2", "chown", "lchown", "fchownat", "setxattr", "lsetxattr", "removexattr"),
    *("fchmod", "fchown", "fsetxattr", "fremovexattr", "lremovexattr", "setxattrat", "removexattrat"),
    *("utime", "utimes", "futimesat", "utimensat", "file_setattr"),
)
"""System calls on file permissions and times, which Landlock ignores; they report success and do nothing."""

_OTHER_CALLS = 0x40000000
_DENY, _PRETEND, _UNKNOWN, _ALLOW = 0x00050000 | 1, 0x00050000, 0x00050000 | 38, 0x7FFF0000
_NAMESPACES, _OWNERS, _ULP = 0x7E020080, (8, 10, 15), 31
_OWN_NAMESPACES, _PRIVATE, _SET_FLAGS, _UP = 0x10000000 | 0x40000000 | 0x00020000 | 0x08000000, 0x44000, 0x8914, 0x41
_INET, _INET6, _NETLINK, _STREAM, _KIND, _TCP, _FAST_OPEN = 2, 10, 16, 1, 0xF, 6, 0x20000000


@dataclass(frozen=True, slots=True)
class Room:
    """Permissions of a confined process.

    Args:
        readable: files and folders; missing paths are ignored.
        inbox: folder in which files may be created but not read, or None.
        ports: TCP ports to which connections are allowed, on any machine.
        listed: folders that may be listed, with all subfolders.
        devices: files and folders of usable devices.
        network: ``ports``; ``none`` without sockets; or ``own`` if `own_namespaces` has made a network.
    """

    readable: tuple[Path, ...]
    writable: tuple[Path, ...] = ()
    inbox: Path | None = None
    ports: tuple[int, ...] = ()
    listed: tuple[Path, ...] = ()
    devices: tuple[Path, ...] = ()
    network: Literal["ports", "none", "own"] = "ports"


def landlock_abi() -> int:
    if sys.platform != "linux":
        return 0
    return max(0, _call(_CREATE, None, 0, _VERSION))


def can_confine() -> bool:
    return landlock_abi() > 0 and platform.machine() in _CALLS


def confine(room: Room) -> None:
    """Confine this thread, and all that it starts from now on. Other threads stay free and share its memory: only
    programs executed afterwards are fully confined. Raises `ConfigError` if this system cannot confine processes.
    """
    abi = landlock_abi()
    if abi == 0 or platform.machine() not in _CALLS:
        remedy = "Use a Linux with Landlock (5.13, better 6.7) on x86-64 or ARM64"
        raise ConfigError("confinement", "this system cannot isolate a process from files", remedy)
    _done(ctypes.CDLL(None, use_errno=True).prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    handled = (1 << (13 if abi < 2 else 14 if abi < 3 else 15 if abi < 5 else 16)) - 1
    network = _CONNECT_TCP | _BIND_TCP if abi >= NETWORK_ABI and room.network != "own" else 0
    scoped = 3 if abi >= _SIGNALS_ABI else 0
    attributes = struct.pack("=QQQ", handled, network, scoped)
    size = 24 if abi >= _SIGNALS_ABI else 16 if abi >= NETWORK_ABI else 8
    ruleset = _done(_call(_CREATE, attributes, size, 0), "landlock_create_ruleset")
    try:
        for path in room.readable:
            _allow(ruleset, path, _LOOK & handled)
        for path in room.listed:
            _allow(ruleset, path, _LIST & handled)
        for path in room.writable:
            _allow(ruleset, path, (_KEEP | _EXECUTE) & handled)
        for path in room.devices:
            _allow(ruleset, path, (_READ | _LIST | _WRITE | _IOCTL) & handled)
        if room.inbox is not None:
            _allow(ruleset, room.inbox, _DROP & handled)
        for port in room.ports if network else ():
            _done(_call(_ADD, ruleset, _PORT, struct.pack("=QQ", _CONNECT_TCP, port), 0), "landlock_add_rule")
        _done(_call(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)
    # The superuser's capabilities would allow access to memory that Landlock protects.
    head, none = struct.pack("=II", _CAPABILITIES, 0), bytes(24)
    _done(ctypes.CDLL(None, use_errno=True).capset(head, none), "capset")
    _filter_calls(abi, room.network)


def own_namespaces() -> bool:
    """Give this single-threaded process its own loopback network and shared memory; return whether this succeeded.
    Where the system forbids namespaces, some steps may have been done.
    """
    library = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    try:
        _done(library.unshare(_OWN_NAMESPACES), "unshare")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
            fcntl.ioctl(any_socket, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))
        _done(library.mount(b"none", b"/", None, _PRIVATE, None), "mount")
        _done(library.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"mode=1777"), "mount")
    except (ConfigError, OSError):
        return False
    return True


def can_own_namespaces() -> bool:
    code = f"from {__name__} import own_namespaces; raise SystemExit(not own_namespaces())"
    return subprocess.run([sys.executable, "-P", "-c", code], check=False, capture_output=True).returncode == 0


def own_sources() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the folders that a confined process must read to run FedSync, and those that it must list."""
    package = Path(fedsync.__file__).resolve().parent
    listed = tuple(Path(each) for each in sys.path if each and package.parent == Path(each).resolve())
    return program_folders([package]), listed


def settle_in(home: Path) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ.update({"HOME": str(home), "FLWR_HOME": str(home), "TMPDIR": str(home / "tmp")})
    os.chdir(home)


def emptied(home: Path) -> None:
    """Recreate a confined process's folder without its untrusted old content; raises `ConfigError` on failure."""
    try:
        remove_tree(home)
        (home / "tmp").mkdir(mode=0o700, parents=True)
        home.chmod(0o700)
    except OSError as error:
        raise ConfigError(str(home), f"cannot be removed: {error}", "Remove it by hand") from error


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        rule = struct.pack("=Qi", rights if path.is_dir() else rights & _OF_FILES, descriptor)
        _done(_call(_ADD, ruleset, _BENEATH, rule, 0), "landlock_add_rule")
    finally:
        os.close(descriptor)


_LOAD, _EQUAL, _LEAST, _ANY, _MASK, _GIVE = 0x20, 0x15, 0x35, 0x45, 0x54, 0x06
_Instruction = tuple[int, int, int, int]


def _argument_at(number: int) -> int:
    return 16 + 8 * number


def _only(offset: int, *values: int, mask: int = 0) -> list[_Instruction]:
    masked = [(_MASK, 0, 0, mask)] if mask else []
    tests = [(_EQUAL, len(values) - place, 0, value) for place, value in enumerate(values)]
    return [(_LOAD, 0, 0, offset), *masked, *tests, (_GIVE, 0, 0, _DENY)]


def _filter_calls(abi: int, network: str) -> None:
    """Allow TCP sockets only and no outside listeners; also deny calls that bypass Landlock."""
    calls, architecture = _CALLS[platform.machine()], _ARCHITECTURES[platform.machine()]
    deny, allow, pretend = (_GIVE, 0, 0, _DENY), (_GIVE, 0, 0, _ALLOW), (_GIVE, 0, 0, _PRETEND)
    family, kind, protocol = map(_argument_at, range(3))
    fast = [(_ANY, 0, 1, _FAST_OPEN), deny]
    of_calls: dict[str, list[_Instruction]] = {
        "socket": [*_only(family, _INET, _INET6), *_only(kind, _STREAM, mask=_KIND), *_only(protocol, 0, _TCP)],
        "socketpair": _only(kind, _STREAM, mask=_KIND),
        "sendto": [(_LOAD, 0, 0, _argument_at(3)), *fast],
        "sendmsg": [(_LOAD, 0, 0, _argument_at(2)), *fast],
        "sendmmsg": [(_LOAD, 0, 0, _argument_at(3)), *fast],
    }
    signals = () if abi >= _SIGNALS_ABI else _SIGNALS
    denied = [name for name in (*_DENIED, *signals) if network != "own" or name not in _SERVING]
    if network == "none":
        of_calls["socket"] = [deny]
    elif network == "own":  # the network has no other hosts; netlink lists its interfaces
        of_calls["socket"] = [*_only(family, _INET, _INET6, _NETLINK), *_only(protocol, 0, _TCP)]
    of_calls |= {name: [deny] for name in denied} | {name: [pretend] for name in _IN_VAIN}
    of_calls |= {name: _only(_argument_at(0), 0) for name in _OF_ITSELF}
    of_calls["setpriority"] = [*_only(_argument_at(0), 0), *_only(_argument_at(1), 0)]
    owners = [each for command in _OWNERS for each in ((_EQUAL, 0, 1, command), deny)]
    of_calls["fcntl"] = [(_LOAD, 0, 0, _argument_at(1)), *owners]
    controls = [each for control in _OWNER_CONTROLS for each in ((_EQUAL, 0, 1, control), deny)]
    of_calls["ioctl"] = [(_LOAD, 0, 0, _argument_at(1)), *controls]
    if network != "ports":
        of_calls |= {name: [pretend] for name in _GROUPS}
        of_calls["prctl"] = [(_LOAD, 0, 0, _argument_at(0)), (_EQUAL, 0, 1, _DEATH_SIGNAL), deny]
    level, option = _argument_at(1), _argument_at(2)
    other_layers = [(_LOAD, 0, 0, option), (_EQUAL, 0, 1, _ULP), deny]
    of_calls["setsockopt"] = [(_LOAD, 0, 0, level), (_EQUAL, 0, len(other_layers), _TCP), *other_layers]
    of_calls["clone"] = [(_LOAD, 0, 0, _argument_at(0)), (_ANY, 0, 1, _NAMESPACES), deny]
    of_calls["clone3"] = [(_GIVE, 0, 0, _UNKNOWN)]  # its arguments are invisible; callers fall back to clone
    program: list[_Instruction] = [(_LOAD, 0, 0, 4), (_EQUAL, 1, 0, architecture), deny, (_LOAD, 0, 0, 0)]
    program += [(_LEAST, 0, 1, _OTHER_CALLS), deny]
    for name, rules in of_calls.items():
        if name in calls:
            program += [(_EQUAL, 0, len(rules) + 1, calls[name]), *rules, allow]
    program.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *each) for each in program))
    head = struct.pack("@HP", len(program), ctypes.addressof(code))
    _done(ctypes.CDLL(None, use_errno=True).prctl(_SECCOMP, _FILTER, head, 0, 0), "seccomp")


def _call(number: int, *arguments: int | bytes | None) -> int:
    words = (ctypes.c_long(each) if isinstance(each, int) else each for each in arguments)
    return int(ctypes.CDLL(None, use_errno=True).syscall(number, *words))


def _done(result: int, what: str) -> int:
    if result < 0:
        problem = f"{what} fails: {os.strerror(ctypes.get_errno())}"
        raise ConfigError("confinement", problem, "Let this user use Landlock and seccomp")
    return result


def program_folders(packages: Iterable[Path] = ()) -> tuple[Path, ...]:
    """Return the paths of Python, its packages, and files that system libraries read, and ``packages`` elsewhere."""
    own = [Path(each).resolve() for each in (sys.prefix, sys.base_prefix, sys.exec_prefix, sys.executable)]
    system = ["/usr", "/lib", "/lib64", "/bin", "/sbin", "/proc", "/dev/null", "/dev/urandom", "/dev/random"]
    settings = ["ld.so.cache", "ld.so.preload", "localtime", "hosts", "host.conf", "nsswitch.conf", "resolv.conf"]
    settings += ["mime.types", "ssl/certs", "ssl/openssl.cnf", "ca-certificates", "alternatives", "os-release"]
    return (*own, Path(sys.prefix), *map(Path, system), *(Path("/etc", each) for each in settings), *packages)
