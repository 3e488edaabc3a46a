"""What a checkpoint holds, class by class: who changes it raises the number of the format.

Then a checkpoint of before is refused in one sentence. Look at the difference, raise ``FORMAT`` and write it anew:

    python -m tests.golden.test_checkpoint
"""

import dataclasses
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest

from fedsync.observe.run_builder import measuring
from fedsync.server.checkpoints import FOLDER, FORMAT, _newest_first, _read, digest
from tests.flower.cut_off_runs import SILOS, cut_off, strategy_in
from tests.flower.grid import silos_in_this_process

GOLDEN = Path(__file__).parent / "checkpoint.txt"
RUNS: dict[str, list[str]] = {
    "bsp": [],
    "adam": ["server_optimizer={kind: fedadam}", "on_round={kind: decay}"],
    "krum": ["aggregation={kind: krum, malicious: 0}"],
}


def shape(value: object, name: str) -> Iterator[str]:
    """A line for each attribute that is reached, with its class: names, not values."""
    kind = type(value)
    if isinstance(value, np.ndarray):
        yield f"{name}: {value.dtype}[{value.ndim}]"
    elif isinstance(value, Mapping):
        named = name.endswith(("coordinator", "aggregator", "extensions")) or name.rpartition(".")[2] in RUNS
        yield f"{name}: {'names' if named else kind.__name__}"
        for key in sorted(value, key=str):
            yield from shape(value[key], f"{name}.{key if named else '*'}")
    elif isinstance(value, list | tuple | set | frozenset) and not hasattr(value, "_fields"):
        yield f"{name}: {kind.__name__}"
        for each in value:
            yield from shape(each, f"{name}.*")
    else:
        yield f"{name}: {kind.__name__}"
        fields = [each.name for each in dataclasses.fields(value)] if dataclasses.is_dataclass(value) else []
        for field in fields:
            yield from shape(getattr(value, field), f"{name}.{field}")


def written(folder: Path) -> str:
    """The shapes of the checkpoints of all runs, cut off when the second version is sent."""
    lines: dict[str, None] = {f"format {FORMAT}": None}
    for name, overrides in RUNS.items():
        strategy = strategy_in(folder / name, *overrides)
        cut_off(strategy, 2)
        checkpoint = _read(_newest_first(folder / name / FOLDER)[0], digest(measuring(strategy.config), SILOS))
        for line in (*shape(checkpoint.moment, name), *shape(checkpoint.origin, "origin")):
            lines[line] = None
    return "\n".join(lines) + "\n"


@pytest.mark.slow
def test_who_changes_what_a_checkpoint_holds_raises_its_format(tmp_path: Path) -> None:
    with silos_in_this_process():
        assert written(tmp_path) == GOLDEN.read_text(encoding="utf-8")


def main() -> None:
    with tempfile.TemporaryDirectory() as folder, silos_in_this_process():
        GOLDEN.write_text(written(Path(folder)), encoding="utf-8")


if __name__ == "__main__":
    main()
