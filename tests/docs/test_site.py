"""The site builds without a warning, and loads nothing from a network."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # building the site takes seconds


class Loads(HTMLParser):
    """What a page has a browser load, and its pictures without words."""

    def __init__(self) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.wordless: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe", "source") and given.get("src"):
            self.addresses.append(given["src"] or "")
        if tag == "link" and "canonical" not in (given.get("rel") or ""):
            self.addresses.append(given.get("href") or "")
        if tag == "img" and not given.get("alt"):
            self.wordless.append(given.get("src") or "")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built once, which takes some seconds: a process of its own, with fourteen pages and the API's source to read."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert built.returncode == 0, built.stdout + built.stderr
    return folder


def test_every_page_is_there_and_nothing_else(site: Path) -> None:
    sources = [path.relative_to(ROOT / "docs").with_suffix(".html") for path in (ROOT / "docs").rglob("*.md")]
    assert sources
    for page in [*map(str, sources), "yaml/strategy.html", "yaml/silos.html", "yaml/start.html"]:
        assert (site / page).is_file(), page
    assert not (site / "generate").exists(), "code of the generator stays at home"


def test_nothing_is_loaded_from_elsewhere_and_every_picture_has_words(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 10
    for page in pages:
        loads = Loads()
        loads.feed(page.read_text(encoding="utf-8"))
        foreign = [address for address in loads.addresses if address.startswith(("http:", "https:", "//"))]
        assert not foreign and not loads.wordless, page
        own = [address for address in loads.addresses if not address.startswith("data:") and page.name != "404.html"]
        assert all((page.parent / address.partition("?")[0]).exists() for address in own), page


def test_the_api_page_has_every_public_name(site: Path) -> None:
    import fedsync

    text = (site / "api.html").read_text(encoding="utf-8")
    for name in fedsync.__all__:
        assert f'id="fedsync.{name}"' in text, name
