"""Draw the timelines of docs/concepts.md anew: ``python docs/generate/pictures.py``.

Each is of a virtual run without training of a shipped strategy. The same versions of everything give
the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

from fedsync.commands.report import FigureName, report
from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.sim.timing_only import run_timing

HERE = Path(__file__).parent
FOLDER = HERE.parent / "pictures"
MACHINES = HERE / "machines.yaml"


@dataclass(frozen=True, slots=True)
class Timeline:
    """How a picture comes about.

    Args:
        silos: silo file, or name of a shipped one.
        seconds: length of the run [s].
    """

    silos: str = str(MACHINES)
    seconds: int = 30


TIMELINES = {
    "bsp": Timeline(),
    "lb-bsp": Timeline(),
    "lb-bsp-gpu": Timeline("gpus", 300),
    "elastic": Timeline(),
    "fsp": Timeline(),
    "a-bsp": Timeline(),
    "lb-fsp-psp": Timeline(),
    "asp": Timeline(),
    "ssp": Timeline(),
    "pbsp": Timeline(),
    "pssp": Timeline(),
    "fedbuff": Timeline(),
    "fedcompass": Timeline(),
    "deadline": Timeline(),
}
"""By the name of the shipped strategy, in the order of the page."""

SAME = {
    "fedavg": "bsp",
    "fedasync": "asp",
    "lb-bsp-he": "lb-bsp",
    "fsp-he": "fsp",
    "pssp-he": "pssp",
}
"""Shipped strategies whose timeline is another one's, for they differ in weights or encryption alone."""


def run(name: str, folder: Path, timeline: Timeline) -> None:
    """Run a shipped strategy as its picture shows it, with its files in ``folder``."""
    config = StrategyConfig.load(name, ["stop.rounds=null", f"stop.seconds={timeline.seconds}"])
    run_timing(config, ClusterConfig.load(timeline.silos), folder)


def draw(name: str, path: Path) -> None:
    """Write the picture of a shipped strategy as an SVG file."""
    with TemporaryDirectory() as above:
        # A picture's title has the name of the run's folder.
        folder = Path(above) / name
        run(name, folder, TIMELINES[name])
        report([folder], out=path, figure=FigureName.TIMELINE)


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in TIMELINES:
        draw(each, FOLDER / f"{each}.svg")
