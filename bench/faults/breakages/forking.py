"""Mutants of processes that are forked for several silos on one machine, for `tests/common` to notice."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = ("tests/common/test_fork_server.py", "tests/silo/test_forked.py")

_CHANGES: Changes = {
    "common/fork_server.py": (
        ("two-silos-draw-the-same", 'sys.modules["numpy.random"].seed()', "pass"),
        ("a-fork-has-the-servers-environment", "        os.environ.clear()\n", ""),
        ("a-fork-is-in-the-servers-session", "        os.setsid()\n", ""),
        ("a-fork-holds-the-servers-socket", "        self.server.socket.close()\n", ""),
        ("a-trainer-is-not-found-by-its-command-line", "        _rename(command)\n", ""),
        ("a-silo-starts-twice", '        self.request.sendall(b"%d\\n" % os.getpid())\n', ""),
        ("a-library-with-threads-is-forked", "iterdir())) > 1:", "iterdir())) > 9:"),
        ("a-server-stays-for-ever", "if os.getppid() != self._parent:", "if False:"),
        ("anybody-has-programs-forked", "path.chmod(0o600)", "path.chmod(0o666)"),
        ("a-failure-counts-as-success", "self._code = int(self._said or _UNKNOWN)", "self._code = 0"),
    ),
    "train/options.py": (
        ("a-trainer-loads-a-compiler-for-its-first-step", "inspect.unwrap(kind.step)", "kind.step"),
        (
            "a-trainer-loads-a-compiler-for-its-optimizer",
            "inspect.unwrap(kind.add_param_group)",
            "kind.add_param_group",
        ),
        (
            "an-optimizers-step-is-part-of-the-gradient",
            "torch.no_grad()(inspect.unwrap(kind.step))",
            "inspect.unwrap(kind.step)",
        ),
    ),
    "silo/session/trainer_client.py": (
        ("trainers-share-nothing", "server = os.environ.get(FORK_SERVER)", "server = None"),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
