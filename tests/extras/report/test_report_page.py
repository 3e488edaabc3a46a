"""The page: well-formed, loads nothing, says in words what figures show, and escapes what comes from a run."""

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from fedsync.extras.report.data import OrderSpan, RunData, read_run, read_runs
from fedsync.extras.report.drawing import draw
from fedsync.extras.report.drawing.timeline import timeline
from fedsync.extras.report.report_page import page
from fedsync.extras.report.results import amount
from fedsync.extras.report.style import COLOURS, GRID, HATCHES, INK, PAPER, inline, series, thin, to_svg
from fedsync.observe.rounds import RoundPoint
from tests.observe.runs import two_silos

VOID = {"meta", "link", "br"}


class Reader(HTMLParser):
    """Fails on tags that do not nest; keeps what the tests ask for."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.attributes: list[tuple[str, dict[str, str]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = {name: value or "" for name, value in attrs}
        self.attributes.append((tag, named))
        if "id" in named:
            self.ids.append(named["id"])
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else"

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    def of(self, tag: str) -> list[dict[str, str]]:
        return [named for name, named in self.attributes if name == tag]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunData]:
    folder = tmp_path_factory.mktemp("runs")
    two_silos(folder / "waits")
    two_silos(folder / "runs-on", barrier={"kind": "asp"}, stop={"rounds": 6})
    return read_runs([folder / "waits", folder / "runs-on"])


@pytest.fixture(scope="module")
def pages(runs: list[RunData]) -> dict[int, str]:
    """Drawn, which takes seconds."""
    return {1: page(runs[:1]), 2: page(runs)}


@pytest.fixture(scope="module")
def words_of(runs: list[RunData]) -> dict[int, str]:
    """The same pages with empty figures."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("fedsync.extras.report.report_page.to_svg", lambda figure: '<svg viewBox="0 0 1 1"></svg>')
        return {1: page(runs[:1]), 2: page(runs)}


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_page_is_well_formed_and_complete(pages: dict[int, str], count: int) -> None:
    read = Reader(pages[count])
    assert len(read.ids) == len(set(read.ids)), "ids are unique"
    targets = [link["href"][1:] for link in read.of("a")]
    assert targets == [
        "summary",
        "accuracy",
        "timeline",
        "results",
        "learning",
        "work",
        "waiting",
        "metrics",
        "end",
        "configuration",
    ]
    assert set(targets) <= set(read.ids)
    figures = read.of("svg")
    assert len(figures) == len(read.of("figure")) == 3 + count
    assert all(figure["role"] == "img" and len(figure["aria-label"]) > 30 for figure in figures)


@pytest.mark.slow
@pytest.mark.parametrize("count", [1, 2])
def test_the_page_loads_nothing(pages: dict[int, str], count: int) -> None:
    text, read = pages[count], Reader(pages[count])
    for tag, named in read.attributes:
        for name in ("src", "href", "data", "action", "xlink:href"):
            assert named.get(name, "#").startswith(("#", "data:")), f"<{tag} {name}={named[name]!r}>"
    assert read.of("script") == []
    assert "@import" not in text
    assert re.findall(r"url\((?!#)", text) == []
    assert "default-src 'none'" in text
    assert len(text.encode()) < 2_000_000


def test_much_memory_is_shown_in_megabytes() -> None:
    assert [amount("peak_memory_bytes", value) for value in (486_040_000.0, 7.0, None)] == ["486.04 MB", "7", "-"]
    assert amount("energy_j", 4.8604e8) == "4.8604e+08"


@pytest.mark.slow
def test_references_inside_figures_lead_somewhere(pages: dict[int, str]) -> None:
    text = pages[2]
    ids = set(Reader(text).ids)
    used = set(re.findall(r"url\(#([^)]*)\)", text)) | set(re.findall(r'href="#([^"]*)"', text))
    assert used <= ids


def test_the_summary_is_in_the_page(words_of: dict[int, str]) -> None:
    """By hand: 2 silos, 3 rounds of 2.5 s; a waits 4.5 s of 15 s, which is 30 %; 9 s of training are 60 %."""
    words = " ".join(" ".join(Reader(words_of[1]).words).split())
    for said in ("duration [s] 7.5", "rounds (commits) 3", "time spent waiting 30.0%", "time spent training 60.0%"):
        assert said in words
    assert "waits : 3 rounds done" in words
    assert "batch_size: 25" in words
    assert (
        "waits: reported by silos, whole run energy_j gpu_celsius peak_memory_bytes all 24 50 7 a 6 40 7 b 18 60 5"
        in words
    )


def test_what_differs_between_runs_is_listed(words_of: dict[int, str]) -> None:
    words = " ".join(" ".join(Reader(words_of[2]).words).split())
    assert "barrier.kind bsp asp" in words
    assert "stop.rounds 3 6" in words
    assert "local.steps 4" not in words


@pytest.mark.slow
def test_what_comes_from_a_run_is_escaped(runs: list[RunData]) -> None:
    evil = '</style><script>alert("x")</script><img src=x onerror=y>$mathdefault$&'
    silos = [{**silo, "name": evil} for silo in runs[0].summary["silos"][:1]]
    summary = {**runs[0].summary, "strategy": evil, "stopped_by": evil, "notes": [evil], "silos": silos}
    orders = tuple(replace(span, silo=evil) for span in runs[0].orders if span.silo == "a")
    bad = RunData(evil, summary, evil, (evil,), runs[0].points, orders)
    read = Reader(page([bad, runs[1]]))
    assert read.of("script") == read.of("img") == []
    assert evil in "".join(read.words)


@pytest.mark.usefixtures("undrawn")
def test_a_run_that_has_not_ended_says_so(runs: list[RunData], words_of: dict[int, str]) -> None:
    words = "".join(Reader(page([replace(runs[0], ended=False)])).words)
    assert "Not ended when this was written: waits" in words
    assert "Not ended" not in words_of[2]


@pytest.mark.slow
def test_a_long_run_is_thinned_and_says_so(runs: list[RunData]) -> None:
    spans = tuple(OrderSpan("ab"[i % 2], i, i + 1.0, 8 + i % 5, True, 0.5) for i in range(20_000))
    points = tuple(RoundPoint(float(i), 1.0 / (i + 1), i / 20_000) for i in range(20_000))
    long = replace(runs[0], label="long", orders=spans, points=points)
    text = page([long])
    assert len(text.encode()) < 2_000_000
    words = " ".join(Reader(text).words)
    assert "600 points, evenly spaced" in words
    assert "400 of " in words
    assert "of 20000.0 s" in words


@pytest.mark.slow
def test_the_page_is_the_same_each_time(runs: list[RunData], pages: dict[int, str]) -> None:
    assert page(runs) == pages[2]


def test_a_timeline_shows_each_kind_of_time(runs: list[RunData]) -> None:
    picture = timeline(runs[0])
    assert picture is not None
    assert "2 silos over 7.5 s, 6 orders, 0 without an update, 3 commits" in picture.alt
    assert "30% was waiting" in picture.alt


def test_commits_are_marks_at_the_foot_that_cross_nothing(runs: list[RunData]) -> None:
    picture = timeline(runs[0])
    assert picture is not None and "Marks at the bottom" in picture.caption
    (axes,) = picture.figure.axes
    assert [max(line.get_ydata()) for line in axes.lines] == [0.04] * 3


def test_a_timeline_without_orders_is_none(runs: list[RunData]) -> None:
    assert timeline(replace(runs[0], orders=())) is None


def test_losses_stand_in_where_nothing_was_evaluated(runs: list[RunData]) -> None:
    blind = replace(runs[0], points=tuple(point._replace(accuracy=None) for point in runs[0].points))
    picture = draw.progress([blind])
    assert picture is not None
    assert picture.title == "Training loss against time"
    idle = replace(blind, points=tuple(point._replace(loss=0.0) for point in blind.points))
    assert draw.progress([idle]) is None, "as in a run that trains nothing"
    assert draw.progress([replace(blind, points=())]) is None


def test_a_figure_can_be_a_file(runs: list[RunData]) -> None:
    picture = timeline(runs[0])
    assert picture is not None
    text = to_svg(picture.figure, PAPER, picture.alt)
    assert text.startswith("<?xml")
    assert f"<title>{picture.alt}</title>" in text


def test_the_page_colours_what_is_ink_grid_and_paper(runs: list[RunData]) -> None:
    picture = timeline(runs[0])
    assert picture is not None
    inside = inline(to_svg(picture.figure), "f1", "words")
    assert not any(colour in inside for colour in (INK, GRID, PAPER))
    assert "currentColor" in inside


def test_series_differ_by_more_than_colour() -> None:
    assert len({str(series(index)["linestyle"]) for index in range(len(COLOURS))}) == len(COLOURS)
    assert len(set(HATCHES)) == len(COLOURS)
    both = [(series(index)["color"], str(series(index)["linestyle"])) for index in range(3 * len(COLOURS))]
    assert len(set(both)) == len(both)


def test_eight_of_many_silos_have_lines_of_batch_sizes(runs: list[RunData]) -> None:
    names = tuple(f"silo-{number}" for number in range(9))
    spans = tuple(OrderSpan(name, at, at + 1.0, 8 + at) for name in names for at in range(3))
    many = draw.batch_sizes(replace(runs[0], silos=names, orders=spans))
    few = draw.batch_sizes(replace(runs[0], silos=names[:8], orders=spans))
    assert many is not None and few is not None
    assert len(many.figure.axes[0].lines) == 8 and many.caption.endswith("8 of 9 silos, evenly spaced.")
    assert few.caption == "Each step of a line is one order."


def test_thinning_keeps_the_ends() -> None:
    assert list(thin(range(100), 4)) == [0, 33, 66, 99]
    assert thin([1, 2, 3], 3) == [1, 2, 3]


@pytest.mark.usefixtures("undrawn")
def test_the_run_of_a_damaged_configuration_is_shown(tmp_path: Path) -> None:
    two_silos(tmp_path)
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    header = {**json.loads(lines[0]), "config": {"name": "old"}}
    (tmp_path / "journal.jsonl").write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    assert "old trained task digits at 2 silos" in " ".join("".join(Reader(page([read_run(tmp_path)])).words).split())


@pytest.mark.slow
def test_the_page_opens_with_what_was_trained_how_good_what_waiting_cost_and_what_failed(runs: list[RunData]) -> None:
    """By hand, as above: 30 % of all time is waiting, all of it a's: 4.5 s of 7.5 s."""
    silos = [{**silo, "failures": 2 if silo["name"] == "b" else 0} for silo in runs[0].summary["silos"]]
    summary = {**runs[0].summary, "silos": silos, "notes": ["b is out since round 2"]}
    text = page([replace(runs[0], summary=summary)])
    words = " ".join(" ".join(Reader(text).words).split())
    first = words[words.index("Summary") :]
    assert "at 2 silos: 3 rounds in 7.5 virtual seconds." in first[:400]
    assert "Waiting cost 30.0% of the silos' time; a waited longest, 4.5 s or 60.0% of the run." in first[:600]
    assert "Orders that failed: 2 of b. b is out since round 2" in first[:700]
    assert "No order failed." in page(runs[:1])
    lost = {**runs[0].summary, "lost": [{"silo": "b", "since_s": 5.0, "why": "it is gone"}]}
    gone = page([replace(runs[0], summary=lost)])
    assert "Missing from the result: b." in gone and "No order failed" not in gone
    assert [each for each in Reader(text).of("details") if "open" in each] == [], "figures and configuration are folded"


def test_there_is_one_figure_of_accuracy(words_of: dict[int, str]) -> None:
    for text in words_of.values():
        titles = [title for title in re.findall(r"<figure[^>]*><h3>([^<]*)</h3>", text) if "ccuracy" in title]
        assert [title.lower() for title in titles if "balanced" not in title] == ["accuracy against time"]
