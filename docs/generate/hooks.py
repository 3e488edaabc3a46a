"""What MkDocs does besides: pages that are generated, and words for pictures."""

from __future__ import annotations

import html
import re
from pathlib import Path

import reference
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_PICTURE = re.compile(r"!\[\]\((pictures/[\w-]+\.svg)\)")
_TITLE = re.compile(r"<title>(.*?)</title>", re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the YAML reference."""
    for path, content in reference.pages().items():
        files.append(File.generated(config, path, content=content))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Give each picture the words that stand in it, for who does not see it."""

    def described(match: re.Match[str]) -> str:
        picture = (Path(config.docs_dir) / match.group(1)).read_text(encoding="utf-8")
        title = _TITLE.search(picture)
        words = " ".join(html.unescape(title.group(1)).split()) if title else ""
        return f"![{words}]({match.group(1)})"

    return _PICTURE.sub(described, markdown)


def on_page_content(content: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """A docstring's ``::``, before an example, is a colon to who reads the page."""
    return content.replace("::</p>", ":</p>")
