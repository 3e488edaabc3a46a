"""The road of one order gets no longer: files and functions of a steady round, which ``bench/cost/path.py`` counts."""

import pytest

from bench.cost.path import measure
from fedsync.cli import Runtime

MOST = {
    (Runtime.VIRTUAL, "plain"): (44, 285),
    (Runtime.VIRTUAL, "bfv"): (67, 488),
    (Runtime.LOCAL, "plain"): (88, 550),
    (Runtime.LOCAL, "bfv"): (111, 770),
}
"""Files and functions at most. Lower them when the road gets shorter. Some functions go by what ran before, and files
of real processes by chance, too: there is room for that."""

OPTIONAL = (
    *("survey", "bundle_objects", "relay", "masking/ma", "masking/a", "narx", "commands/", "ops/"),
    *(
        "local_baselines",
        "availability",
        "operator_execution",
        "cross_site",
        "steered",
        "fitting",
        "forecasts",
        "mixture",
    ),
)
"""Parts of the names of files that a plain BSP run has no use for."""


@pytest.mark.slow
@pytest.mark.parametrize(("runtime", "cipher"), MOST)
def test_the_road_of_one_order_gets_no_longer(runtime: Runtime, cipher: str) -> None:
    found = measure(runtime, cipher)
    files, functions = MOST[runtime, cipher]
    assert found["files"] <= files and found["functions"] <= functions, found["roles"]
    passed = {file for role in found["roles"].values() for file in role}
    assert not [file for file in passed for feature in OPTIONAL if feature in file]
