"""What README and the pages say can be done as they say it."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from fedsync.silo.owner.refusals import MEANINGS
from tests.test_deploy import takes

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
DOCS = ROOT / "docs"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted(DOCS.rglob("*.md"))]


def blocks(path: Path, language: str) -> list[tuple[str, str]]:
    """Title ("" without one) and text of the code blocks in a language."""
    pattern = rf"```{language}(?: title=\"([^\"]*)\")?\n(.*?)```"
    return re.findall(pattern, path.read_text(encoding="utf-8"), re.DOTALL)


def commands(path: Path) -> Iterator[str]:
    """The ``fedsync`` commands in a page's blocks."""
    text = path.read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(.*?)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        for line in block.replace("\\\n", " ").splitlines():
            if language in ("", "console") and re.match(r"(\$ )?fedsync [a-z]", line):
                yield line.removeprefix("$ ").partition(" #")[0].partition(" > ")[0]


def headings(path: Path) -> set[str]:
    """Anchors of a page, as GitHub and MkDocs make them of headings in plain words."""
    lines = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\s-]", "", line.lower()).strip().replace(" ", "-") for line in lines}


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.stem)
def test_every_relative_link_outside_the_site_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8"))
    relative = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert page != README or "docs/index.md" in relative
    for link in relative:
        path, _, anchor = link.partition("#")
        target = ROOT / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in headings(target), link


def test_files_that_pages_for_contributors_name_are_there() -> None:
    added = {"NAME.py", "data_quorum.py", "test_data_quorum.py", "window.py"}
    pages = ("extending.md", "extending-features.md", "internals/architecture.md")
    for page in (ROOT / "CONTRIBUTING.md", *(DOCS / name for name in pages)):
        named = re.findall(r"`(?:python )?([\w./-]+/[\w.-]+\.py)", page.read_text(encoding="utf-8"))
        missing = [name for name in named if not ((ROOT / name).exists() or (ROOT / "fedsync" / name).exists())]
        assert {Path(name).name for name in missing} <= added, page


def test_every_word_of_a_refusal_is_explained_as_the_log_explains_it() -> None:
    rows = [f"| {code.name} | {meaning} | {remedy} |" for code, (meaning, remedy) in MEANINGS.items()]
    assert "\n".join(rows) in (DOCS / "deployment" / "refusals.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_exist_with_their_options(page: Path) -> None:
    for command in commands(page):
        assert takes(shlex.split(command)[1:]), command


def test_commands_are_found() -> None:
    assert [command for command in commands(README) if command.startswith("fedsync run fsp --runtime virtual")]
    assert [command for command in commands(DOCS / "quick-start.md") if command.startswith("fedsync report")]


def test_figures_for_choosing_are_those_of_the_benchmarks() -> None:
    def rows(page: str, heading: str) -> dict[str, list[str]]:
        part = (DOCS / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1].split("\n##")[0]
        cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in part.splitlines() if "|" in line]
        return {row[0]: row[1:] for row in cells}

    measured = rows("benchmarks/time-to-target.md", "Results")
    # Ratios with their range, "1.38 (1.00-1.83)"; the row that they are to has seconds, "27.7 s".
    ratios = {name: ["1.00" if cell.endswith(" s") else cell[:4] for cell in row] for name, row in measured.items()}
    repeated = {name: row for name, row in rows("choosing.md", "By your machines").items() if name in measured}
    repeated.pop("strategy")
    assert len(repeated) > 5 and all(len(row) == 3 for row in repeated.values())
    for name, row in repeated.items():
        assert row == ratios[name][:3], f"choosing.md repeats other figures for {name}"


def test_compositions_are_those_of_the_shipped_files() -> None:
    (text,) = (text for title, text in blocks(DOCS / "compositions.md", "yaml") if title == "compositions")
    experts = [{"kind": "memoryless"}, {"kind": "ema"}]
    usual = {"predictor": {"kind": "mixture", "experts": experts, "forget": 0.05}, "balancer": {"kind": "fixed"}}
    shipped = {path.stem: yaml.safe_load(path.read_text(encoding="utf-8")) for path in ROOT.glob("strategies/*.yaml")}
    parts = ("predictor", "balancer", "barrier", "aggregation")
    wanted = {name: {part: whole[part] for part in parts} for name, whole in shipped.items() if name[-3:] != "-he"}
    assert {name: usual | found for name, found in yaml.safe_load(text).items()} == wanted


def test_examples_of_yaml_are_yaml() -> None:
    for page in PAGES:
        for _, text in blocks(page, "yaml"):
            assert isinstance(yaml.safe_load(text), dict), page
