"""The kernel's files are written by the tests, with values in the forms that the kernel writes."""

from pathlib import Path

import pytest

from fedsync.train.machine.resources import CpuLimit, MemoryLimit, find_limits

GIB = 2**30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def unified(root: Path, group: str = "/job", mount: str = "sys/fs/cgroup") -> Path:
    """A machine with control groups of version 2, two of them with limits; returns the inner one's folder."""
    write(
        root,
        {
            "proc/self/cgroup": f"0::{group}\n",
            f"{mount}/cgroup.controllers": "cpu memory\n",
            f"{mount}/job/cpu.max": "150000 100000\n",
            f"{mount}/job/cpu.stat": "usage_usec 2500000\nuser_usec 2000000\n",
            f"{mount}/job/memory.max": f"{4 * GIB}\n",
            f"{mount}/job/memory.current": f"{3 * GIB}\n",
            f"{mount}/job/memory.stat": f"anon {GIB}\ninactive_file {GIB}\n",
        },
    )
    return root / mount / "job"


def test_version_2(tmp_path: Path) -> None:
    folder = unified(tmp_path)
    (cpu,), (memory,) = find_limits(tmp_path)
    assert (cpu, memory) == (CpuLimit(folder), MemoryLimit(folder))
    assert cpu.processors() == 1.5
    assert cpu.used_s() == 2.5
    # 3 GiB of 4, of which 1 is cache.
    assert memory.share() == 0.5


def test_groups_around_the_own_one_limit_it_too(tmp_path: Path) -> None:
    folder = unified(tmp_path, "/job/inner")
    write(folder / "inner", {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "9\n"})
    assert find_limits(tmp_path) == ((CpuLimit(folder),), (MemoryLimit(folder),))


def test_version_2_beside_version_1(tmp_path: Path) -> None:
    folder = unified(tmp_path, mount="sys/fs/cgroup/unified")
    assert find_limits(tmp_path)[0] == (CpuLimit(folder),)


@pytest.mark.parametrize(("at_least", "share"), [(0.7, 0.5), (0.75, 0.75), (0.9, 0.75)])
def test_cache_is_looked_at_only_where_it_could_matter(tmp_path: Path, at_least: float, share: float) -> None:
    assert MemoryLimit(unified(tmp_path)).share(at_least) == share


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/job\n"},
        {"proc/self/cgroup": "nonsense\n\n::\n"},
        {"proc/self/cgroup": "0::/../../etc\n", "sys/fs/cgroup/cgroup.controllers": ""},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "", "sys/fs/cgroup/cpu.max": "a b\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "", "sys/fs/cgroup/cpu.max": "0 0\n"},
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cgroup.controllers": "", "sys/fs/cgroup/memory.max": "max\n"},
        {"proc/self/cgroup": "4:memory:/\n", "sys/fs/cgroup/memory/memory.limit_in_bytes": "9\n"},
    ],
)
def test_without_limits_there_are_none(tmp_path: Path, files: dict[str, str]) -> None:
    assert find_limits(write(tmp_path, files)) == ((), ())
