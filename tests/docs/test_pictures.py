"""There is a timeline for every shipped strategy, and it is what the strategy does."""

import re
from pathlib import Path

import pictures
import pytest

from fedsync.extras.report.data import read_run

ROOT = Path(__file__).parents[2]


def test_every_shipped_strategy_has_one() -> None:
    shipped = {path.stem for path in (ROOT / "strategies").glob("*.yaml")}
    assert pictures.TIMELINES.keys() | pictures.SAME.keys() == shipped
    assert pictures.TIMELINES.keys().isdisjoint(pictures.SAME) and set(pictures.SAME.values()) <= set(
        pictures.TIMELINES
    )


def test_the_page_shows_all_of_them_and_they_are_small() -> None:
    page = (ROOT / "docs" / "concepts.md").read_text(encoding="utf-8")
    assert sorted(re.findall(r"\(pictures/([\w-]+)\.svg\)", page)) == sorted(pictures.TIMELINES)
    files = list(pictures.FOLDER.iterdir())
    assert {file.name for file in files} == {f"{name}.svg" for name in [*pictures.TIMELINES, pictures.COMPARISON]}
    assert all(file.stat().st_size < 100 * 1024 for file in files)


def test_drawn_anew_they_are_the_same_and_the_readmes_has_words(tmp_path: Path) -> None:
    pictures.draw("fedbuff", tmp_path / "fedbuff.svg")
    pictures.compare(tmp_path / f"{pictures.COMPARISON}.svg")
    for again in tmp_path.iterdir():
        committed = pictures.FOLDER / again.name
        same = again.read_text(encoding="utf-8") == committed.read_text(encoding="utf-8")
        assert same, f"draw {again.name} anew: python docs/generate/pictures.py"
    (words,) = re.findall(r"<title>(.*)</title>", (tmp_path / f"{pictures.COMPARISON}.svg").read_text(encoding="utf-8"))
    picture = f"![{words}]({(pictures.FOLDER / pictures.COMPARISON).relative_to(ROOT)}.svg)"
    assert picture in (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "other"), pictures.SAME.items())
def test_strategies_without_one_work_and_wait_as_the_named_other(name: str, other: str, tmp_path: Path) -> None:
    for each in (name, other):
        pictures.run(each, tmp_path / each, pictures.Timeline())
    mine, others = (read_run(tmp_path / each) for each in (name, other))
    assert mine.orders == others.orders
    assert [point.at_s for point in mine.points] == [point.at_s for point in others.points]
