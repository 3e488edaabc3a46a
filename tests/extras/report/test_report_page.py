"""The page: well-formed, loads nothing, says in words what figures show, and escapes what comes from a run."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedsync.extras.report.data import OrderSpan, RunData, read_run, read_runs
from fedsync.extras.report.drawing import draw
from fedsync.extras.report.drawing.timeline import timeline
from fedsync.extras.report.report_page import page
from fedsync.extras.report.results import amount
from fedsync.extras.report.style import GRID, INK, PAPER, inline, to_svg
from fedsync.observe.rounds import RoundPoint
from tests.extras.report.make import Reader, change_header, said
from tests.observe.runs import two_silos


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    folder = tmp_path_factory.mktemp("runs")
    two_silos(folder / "waits")
    two_silos(folder / "runs-on", barrier={"kind": "asp"}, stop={"rounds": 6})
    return read_runs([folder / "waits", folder / "runs-on"])


@pytest.fixture(scope="module")
def words_of(runs: list[RunData]) -> dict[int, str]:
    """The same pages with empty figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsync.extras.report.report_page.to_svg", lambda figure: '<svg viewBox="0 0 1 1"></svg>')
        return {1: page(runs[:1]), 2: page(runs)}


CHAPTERS = ["summary", "accuracy", "timeline", "results", "learning"]
CHAPTERS += ["work", "waiting", "metrics", "end", "configuration"]


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_page_is_well_formed_complete_the_same_each_time_and_loads_nothing(runs: list[RunData], count: int) -> None:
    text = page(runs[:count])
    read = Reader(text)
    assert len(read.ids) == len(set(read.ids)), "ids are unique"
    assert [link["href"][1:] for link in read.of("a")] == CHAPTERS and set(CHAPTERS) <= set(read.ids)
    figures = read.of("svg")
    assert len(figures) == len(read.of("figure")) == 3 + count
    assert all(figure["role"] == "img" and len(figure["aria-label"]) > 30 for figure in figures)
    for tag, named in read.attributes:
        for name in ("src", "href", "data", "action", "xlink:href"):
            assert named.get(name, "#").startswith(("#", "data:")), f"<{tag} {name}={named[name]!r}>"
    assert read.of("script") == [] and "@import" not in text and "default-src 'none'" in text
    assert re.findall(r"url\((?!#)", text) == []
    used = [*re.findall(r"url\(#([^)]*)\)", text), *re.findall(r'href="#([^"]*)"', text)]
    assert set(used) <= set(read.ids), "references inside figures lead somewhere"
    assert len(text.encode()) < 2_000_000
    assert page(runs[:count]) == text


def test_much_memory_is_shown_in_megabytes() -> None:
    assert [amount("peak_memory_bytes", value) for value in (486_040_000.0, 7.0, None)] == ["486.04 MB", "7", "-"]
    assert amount("energy_j", 4.8604e8) == "4.8604e+08"


def test_the_summary_is_in_the_page_and_what_differs_between_runs(words_of: dict[int, str]) -> None:
    """By hand: 2 silos, 3 rounds of 2.5 s; a waits 4.5 s of 15 s, which is 30 %; 9 s of training are 60 %."""
    words, both = said(words_of[1]), said(words_of[2])
    for one in (
        *("duration [s] 7.5", "rounds (commits) 3", "time spent waiting 30.0%", "time spent training 60.0%"),
        *("waits : 3 rounds done", "batch_size: 25"),
        "waits: reported by silos, whole run energy_j gpu_celsius peak_memory_bytes all 24 50 7 a 6 40 7 b 18 60 5",
    ):
        assert one in words
    assert "barrier.kind bsp asp" in both and "stop.rounds 3 6" in both and "local.steps 4" not in both
    for text in words_of.values():
        titles = [title for title in re.findall(r"<figure[^>]*><h3>([^<]*)</h3>", text) if "ccuracy" in title]
        assert [title.lower() for title in titles if "balanced" not in title] == ["accuracy against time"]


@pytest.mark.slow
def test_a_long_run_is_thinned_and_says_so(runs: list[RunData]) -> None:
    spans = tuple(OrderSpan("ab"[i % 2], i, i + 1.0, 8 + i % 5, True, 0.5) for i in range(20_000))
    points = tuple(RoundPoint(float(i), 1.0 / (i + 1), i / 20_000) for i in range(20_000))
    long = replace(runs[0], label="long", orders=spans, points=points)
    text = page([long])
    assert len(text.encode()) < 2_000_000
    assert all(part in said(text) for part in ("600 points, evenly spaced", "400 of ", "of 20000.0 s"))


def test_a_timeline_shows_each_kind_of_time_and_commits_as_marks_that_cross_nothing(runs: list[RunData]) -> None:
    picture = timeline(runs[0])
    assert picture is not None
    assert "2 silos over 7.5 s, 6 orders, 0 without an update, 3 commits" in picture.alt
    assert "30% was waiting" in picture.alt and "Marks at the bottom" in picture.caption
    (axes,) = picture.figure.axes
    assert [max(line.get_ydata()) for line in axes.lines] == [0.04] * 3
    assert timeline(replace(runs[0], orders=())) is None


def test_losses_stand_in_where_nothing_was_evaluated(runs: list[RunData]) -> None:
    blind = replace(runs[0], points=tuple(point._replace(accuracy=None) for point in runs[0].points))
    picture = draw.progress([blind])
    assert picture is not None
    assert picture.title == "Training loss against time"
    idle = replace(blind, points=tuple(point._replace(loss=0.0) for point in blind.points))
    assert draw.progress([idle]) is None, "as in a run that trains nothing"
    assert draw.progress([replace(blind, points=())]) is None


def test_a_figure_can_be_a_file_and_the_page_colours_what_is_ink_grid_and_paper(runs: list[RunData]) -> None:
    picture = timeline(runs[0])
    assert picture is not None
    text = to_svg(picture.figure, PAPER, picture.alt)
    assert text.startswith("<?xml") and f"<title>{picture.alt}</title>" in text
    inside = inline(to_svg(picture.figure), "f1", "words")
    assert not any(colour in inside for colour in (INK, GRID, PAPER)) and "currentColor" in inside


@pytest.mark.usefixtures("undrawn")
def test_the_run_of_a_damaged_configuration_is_shown_and_one_that_has_not_ended_says_so(tmp_path: Path) -> None:
    two_silos(tmp_path)
    change_header(tmp_path, lambda header: header.update(config={"name": "old"}))
    run = read_run(tmp_path)
    assert "old trained task digits at 2 silos" in " ".join("".join(Reader(page([run])).words).split())
    assert "Not ended when this was written: " in said(page([replace(run, ended=False)]))
    (tmp_path / "error.json").write_text('{"kind": "run", "message": "stopped by the operator"}')
    words = said(page([read_run(tmp_path)]))
    assert "The run has no regular end: stopped by the operator" in words and "Not ended" not in words


@pytest.mark.usefixtures("undrawn")
def test_the_page_opens_with_what_was_trained_how_good_what_waiting_cost_and_what_failed(runs: list[RunData]) -> None:
    """By hand, as above: 30 % of all time is waiting, all of it a's: 4.5 s of 7.5 s."""
    silos = [{**silo, "failures": 2 if silo["name"] == "b" else 0} for silo in runs[0].summary["silos"]]
    summary = {**runs[0].summary, "silos": silos, "notes": ["b is out since round 2"]}
    text = page([replace(runs[0], summary=summary)])
    words = said(text)
    first = words[words.index("Summary") :]
    assert "at 2 silos: 3 rounds in 7.5 virtual seconds." in first[:400]
    assert "Waiting cost 30.0% of the silos' time; a waited longest, 4.5 s or 60.0% of the run." in first[:600]
    assert "Orders that failed: 2 of b. b is out since round 2" in first[:700]
    assert "No order failed." in page(runs[:1]) and "Not ended" not in page(runs[:1])
    lost = {**runs[0].summary, "lost": [{"silo": "b", "since_s": 5.0, "why": "it is gone"}]}
    gone = page([replace(runs[0], summary=lost)])
    assert "Missing from the result: b." in gone and "No order failed" not in gone
    assert [each for each in Reader(text).of("details") if "open" in each] == [], "figures and configuration are folded"
