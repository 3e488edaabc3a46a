"""Draw the pictures of README and docs/concepts.md anew: ``python docs/generate/pictures.py``.

Each shows virtual runs, without training, of shipped strategies. The same versions of everything give
the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from pathlib import Path
from string import Template
from tempfile import TemporaryDirectory

from fedsync.config.cluster import ClusterConfig
from fedsync.config.strategy import StrategyConfig
from fedsync.extras.report.data import RunData, read_run
from fedsync.extras.report.drawing.timeline import timeline
from fedsync.extras.report.style import COLOURS, INK, PAPER, to_svg
from fedsync.simulation.timing_only import run_timing

HERE = Path(__file__).parent
FOLDER = HERE.parent / "pictures"
MACHINES = HERE / "machines.yaml"
DISTURBED = HERE / "disturbed.yaml"


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
    "lb-a-bsp": Timeline(str(DISTURBED)),
    "lb-fsp": Timeline(str(DISTURBED)),
    "lb-fsp-psp": Timeline(),
    "asp": Timeline(),
    "ssp": Timeline(),
    "pbsp": Timeline(),
    "pssp": Timeline(),
    "fedbuff": Timeline(),
    "fedcompass": Timeline(),
    "deadline": Timeline(),
    "quorum": Timeline(),
    "auto": Timeline(seconds=6),
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
        picture = timeline(read_run(folder))
        assert picture is not None
        path.write_text(to_svg(picture.figure, PAPER, picture.alt), encoding="utf-8")


COMPARISON = "fedavg-lb-bsp"
"""The first picture of README: who computes and who waits."""

ROUNDS = 8
LEFT, RIGHT, ROW, BAR = 78, 22, 23, 17
"""Margins, distance of rows and height of bars of the first picture [px]."""


def compare(path: Path, width: int = 880) -> None:
    """Write FedAvg's timeline above LB-BSP's: the same rounds on the same machines, on one axis."""
    with TemporaryDirectory() as above:
        runs = []
        for name in ("fedavg", "lb-bsp"):
            folder = Path(above) / name
            run_timing(StrategyConfig.load(name, [f"stop.rounds={ROUNDS}"]), ClusterConfig.load("hetero"), folder)
            runs.append(read_run(folder))
    seconds = max(order.end_s for run in runs for order in run.orders)
    scale = (width - LEFT - RIGHT) / seconds
    parts, top = [], 62
    for run, title in zip(
        runs, ("FedAvg: all silos do the same work", "LB-BSP: batch sizes follow the speeds"), strict=True
    ):
        parts += _panel(run, title, top, scale)
        top += 42 + ROW * len(run.silos)
    axis = top - 22
    parts.append(f'<path d="M{LEFT} {axis}H{width - RIGHT}" stroke="{INK}"/>')
    for tick in range(0, int(seconds) + 1, 10):
        x = LEFT + tick * scale
        parts.append(f'<path d="M{x:.1f} {axis}v5" stroke="{INK}"/>')
        parts.append(f'<text x="{x:.1f}" y="{axis + 19}" text-anchor="middle">{tick}{" s" if not tick else ""}</text>')
    captions = [f"{run.label}: {_seconds(run)}." for run in runs]
    colours = {"ink": INK, "paper": PAPER, "compute": COLOURS[0], "wait": COLOURS[4]}
    words = escape(" ".join(["Who computes and who waits.", *captions]))
    svg = _SVG.substitute(colours, width=width, height=axis + 30, words=words, parts="\n".join(parts))
    path.write_text(svg, encoding="utf-8")


def _seconds(run: RunData) -> str:
    return (
        f"{ROUNDS} rounds in {run.summary['seconds']:.1f} s, silos wait {run.summary['wait_fraction']:.0%} of the time"
    )


def _panel(run: RunData, title: str, top: int, scale: float) -> list[str]:
    """One run: a row a silo, from ``top`` [px] on; ``scale`` is pixels a second."""
    end_s = float(run.summary["seconds"])
    parts = [f'<text x="{LEFT}" y="{top - 9}"><tspan font-weight="bold">{title}.</tspan> {_seconds(run)}</text>']
    for row, silo in enumerate(run.silos):
        y = top + ROW * row
        parts.append(f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{escape(silo)}</text>')
        parts.append(_bar(0, end_s, y, scale, "wait"))
        parts += [
            _bar(order.begin_s, order.begin_s + order.compute_s, y, scale, "compute")
            for order in run.orders
            if order.silo == silo
        ]
    bottom = top + ROW * len(run.silos) - ROW + BAR
    for point in run.points:
        parts.append(
            f'<path d="M{LEFT + point.at_s * scale:.1f} {top - 3}V{bottom + 3}" stroke="{INK}" stroke-dasharray="4 2"/>'
        )
    return parts


def _bar(begin_s: float, end_s: float, y: int, scale: float, kind: str) -> str:
    x, wide = LEFT + begin_s * scale, (end_s - begin_s) * scale
    return f'<rect class="{kind}" x="{x:.1f}" y="{y}" width="{wide:.1f}" height="{BAR}"/>'


_SVG = Template("""\
<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 $width $height" width="$width" height="$height" role="img">
<title>$words</title>
<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">
<rect width="7" height="7" fill="$paper"/><path d="M0 0V7" stroke="$wait" stroke-width="3"/></pattern></defs>
<style>text{font:13px "Helvetica Neue",Arial,"DejaVu Sans",sans-serif;fill:$ink}
.compute{fill:$compute;stroke:$paper}.wait{fill:url(#hatch);stroke:$wait}</style>
<rect width="$width" height="$height" fill="$paper"/>
<rect class="compute" x="78" y="12" width="26" height="15"/><text x="111" y="24">computes</text>
<rect class="wait" x="198" y="12" width="26" height="15"/><text x="231" y="24">waits for others</text>
<path d="M368 11V28" stroke="$ink" stroke-dasharray="4 2"/><text x="377" y="24">commit: a new model version</text>
$parts
</svg>
""")


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for each in TIMELINES:
        draw(each, FOLDER / f"{each}.svg")
    compare(FOLDER / f"{COMPARISON}.svg")
