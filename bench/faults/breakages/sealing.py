"""Mutants of all that seals, opens and checks what is sealed, for `tests/attacks` and `tests/cipher` to notice.

Also of what a silo's trainer adds: the count of forgeries, and what its owner allows.
"""

from __future__ import annotations

from bench.faults.breakages import Mutant
from bench.faults.breakages._sealing_keys import KEYS
from bench.faults.breakages._sealing_masks import MASKS
from bench.faults.breakages._sealing_server import SERVER
from bench.faults.breakages._sealing_silo import SILO
from bench.faults.breakages._sealing_wire import WIRE

TESTS = (
    "tests/attacks",
    "tests/cipher",
    "tests/silo/test_lockout.py",
    "tests/silo/test_owner_limits.py",
    "tests/silo/test_owner_policy.py",
    "--ignore=tests/cipher/test_cost.py",
    "--ignore=tests/attacks/test_real_processes.py",
    "--ignore=tests/cipher/encoding/test_fuzz.py",
)

_EQUIVALENT = {
    "a-silo-tells-shares-of-itself": "No annex has shares for its own silo, so opening them is refused a line later",
    "shares-of-another-context-are-told": "The silo signed the list, and it signs none with annexes of another",
}
"""Why no test can see one."""

MUTANTS = tuple(
    Mutant(name, f"fedsync/{file}", before, after, _EQUIVALENT.get(name, ""))
    for file, changes in {**WIRE, **KEYS, **MASKS, **SILO, **SERVER}.items()
    for name, before, after in changes
)
