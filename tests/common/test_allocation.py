"""A process that serves for weeks gives back what it does not use."""

import platform
import subprocess
import sys

import pytest

from fedsync.common.allocation import MAPPED_BYTES

BLOCKS, BLOCK_BYTES = 200, 2 * MAPPED_BYTES

PROGRAM = f"""
import gc, sys
from pathlib import Path

from fedsync.common.allocation import settle

def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

if sys.argv[1] == "settled":
    settle()
for _ in range(3):  # after which the C library keeps blocks of this size
    del (freed := [bytearray(2**20)])[:]
blocks = [bytearray({BLOCK_BYTES}) for _ in range({BLOCKS})]
full = resident()
del blocks[::2]
print(full - resident(), gc.get_freeze_count(), *gc.get_threshold())
"""


def given_back(how: str) -> tuple[int, int, int]:
    """Bytes that the system has again of half of all blocks, objects that no collection looks at, first threshold."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True, check=True, timeout=60)
    freed, frozen, first, *_ = map(int, done.stdout.split())
    return freed, frozen, first


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library has another heap")
def test_what_is_freed_between_blocks_in_use_is_the_systems_again() -> None:
    half = BLOCKS // 2 * BLOCK_BYTES
    freed, frozen, first = given_back("settled")
    assert freed > 0.9 * half
    assert given_back("as-it-is")[0] < 0.5 * half, "then there is nothing to be done"
    assert frozen > 1000
    assert first > 1000
