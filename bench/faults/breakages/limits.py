"""Mutants of what keeps a run within what its machines have, whatever it is asked, told or left waiting for."""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._core import Changes

TESTS = (
    "tests/train/test_model_size.py",
    "tests/train/test_precision.py",
    "tests/silo/test_hangs.py",
    "tests/silo/test_current_order.py",
    "tests/observe/test_long_runs.py",
    "tests/server/test_nodes.py",
    "tests/flower/test_nodes_refusing.py",
    "tests/simulation/test_rollback_at_the_end.py",
    "tests/flower/test_first_model.py",
    "tests/flower/test_start.py",
)

_CHANGES: Changes = {
    "train/machine/resources.py": (
        ("only-the-largest-layer-counts", "self._bytes += itemsize", "self._bytes = itemsize"),
        (
            "a-model-of-other-floats-is-taken-for-smaller",
            '(given.get("dtype") or torch.get_default_dtype()).itemsize',
            "4",
        ),
        ("a-silo-is-asked-for-what-nobody-can-have", "self._bytes > NOBODY_HAS_BYTES", "self._bytes > 2**70"),
        ("a-group-s-memory-is-taken-for-the-machine-s", "min(found, int(text)) if", "found if"),
    ),
    "train/machine/device.py": (
        ("half-floats-are-not-tried", "self._dtype is None or self._device.type", "True or self._device.type"),
        (
            "trying-half-floats-leaves-traces-in-the-model",
            "                buffer.copy_(values)\n",
            "                pass\n",
        ),
        (
            "a-task-s-own-mistake-is-blamed-on-half-floats",
            "            loss()  # an error that also occurs in float32 is raised as it is\n",
            "",
        ),
    ),
    "observe/ledger.py": (
        ("the-books-keep-every-round", "if self.keep is None or", "if True or"),
        ("a-target-that-was-reached-is-forgotten", "self._reached_s = row.at_s", "self._reached_s = None"),
        ("a-silo-that-never-answers-holds-up-the-books", "- index > MOST_OPEN", "- index > 2**60"),
        ("rounds-go-before-they-were-handed-out", "min(self._over, len(self.rounds)", "min(2**60, len(self.rounds)"),
    ),
    "server/nodes.py": (
        ("a-silo-counts-for-as-many-samples-as-it-says", "if most is not None and said > most:", "if False:"),
        ("a-silo-with-as-many-samples-as-it-may-have-is-refused", "and said > most:", "and said >= most:"),
    ),
    "silo/session/liveness.py": (
        ("a-step-that-waits-for-ever-is-waited-for", "if signs.still_s >= patience_s:", "if signs.still_s > 1e9:"),
        ("a-long-step-is-taken-for-one-that-waits", "or cpu_s - self.cpu_s > _LEAST_SHARE * LOOK_S", ""),
        ("a-loop-of-ones-own-may-wait-for-nothing", "inf if waits else PATIENCE_S", "PATIENCE_S"),
        ("what-nobody-wants-any-more-holds-up-the-silo", "UNWANTED_S if unwanted() else inf", "inf"),
    ),
    "silo/session/current_order.py": (
        (
            "what-waits-for-a-hang-is-never-answered",
            "                self._job.end(VersionMismatch(holds))\n",
            "                pass\n",
        ),
        (
            "an-order-that-is-superseded-trains-to-its-end",
            "                before.given_up = True\n                before.halt.set()\n",
            "                pass\n",
        ),
        ("a-silo-trains-two-orders-at-once", "                job.before.over.wait()\n", "                pass\n"),
    ),
    "model/plain_aggregator.py": (
        ("a-run-leaves-a-model-that-was-taken-back", "        self._public.restart(public)\n", ""),
    ),
    "cipher/server/chain.py": (
        (
            "a-way-back-under-encryption-stops-half-way",
            "entries = tuple(link.entries[0] for link in links)",
            "entries = tuple(link.entries[0] for link in links[1:])",
        ),
    ),
    "config/strategy.py": (
        (
            "nobody-gets-the-last-version-of-an-encrypted-run",
            "if scored == 0 and not isinstance(",
            "if False and not isinstance(",
        ),
    ),
    "observe/rounds.py": (("a-curve-grows-with-the-run", "if len(self._outline) > MOST_OUTLINED", "if False"),),
    "observe/recorder.py": (
        (
            "a-resumed-run-exports-its-newest-rounds-only",
            "                exporter.follow(self.ledger)\n",
            "                pass\n",
        ),
    ),
    "flower/flower_strategy.py": (
        ("silos-are-asked-for-a-model-that-nobody-has", "(PartsError, HugeModel)", "PartsError"),
    ),
    "flower/first_model.py": (
        (
            "a-lost-question-for-the-first-model-stays-lost",
            "            outbox.ask_again(sent, now_s)\n",
            "",
        ),
    ),
}

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after)
    for file, changes in _CHANGES.items()
    for name, before, after in changes
)
