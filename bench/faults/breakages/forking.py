"""Mutants of processes that are forked for several silos on one machine, for `tests/common` to notice."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = ("tests/common/test_nursery.py", "tests/silo/test_forked.py")

_CHANGES: Changes = {
    "common/nursery.py": (
        ("two-silos-draw-the-same", 'sys.modules["numpy.random"].seed()', "pass"),
        ("a-fork-has-the-nurserys-environment", "    os.environ.clear()\n", ""),
        ("a-fork-is-in-the-nurserys-session", "    os.setsid()\n", ""),
        (
            "a-fork-holds-the-lines-of-others",
            "            for descriptor in self._callers:\n                os.close(descriptor)\n",
            "",
        ),
        ("a-trainer-is-not-found-by-its-command-line", "    _rename(fork.command)\n", ""),
        ("a-silo-starts-twice", 'if caller.recv(1, socket.MSG_DONTWAIT) == b"":', "if False:"),
        ("a-library-with-threads-is-forked", "return status == 0 and len(", "return status == 0 or len("),
        ("a-fork-without-its-device-is-used", "os._exit(0 if good else 1)", "os._exit(0)"),
        ("a-nursery-stays-for-ever", "while os.getppid() == self._parent:", "while True:"),
        ("nonsense-ends-a-nursery", "except (OSError, ValueError, TypeError, struct.error):", "except ValueError:"),
    ),
    "common/forking.py": (
        ("anybody-has-programs-forked", "path.chmod(0o600)", "path.chmod(0o666)"),
        (
            "the-end-of-a-fork-is-never-seen-without-its-nursery",
            "if self._line is None or now_s",
            "if now_s < 0 and now_s",
        ),
        ("a-failure-counts-as-success", "self._code = int(said)", "self._code = 0"),
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
        ("trainers-share-nothing", "nursery = os.environ.get(NURSERY)", "nursery = None"),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
