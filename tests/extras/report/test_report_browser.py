"""The page in a real browser, where there is one. It takes seconds: a browser starts."""

import html
import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.browser import find
from fedsync.extras.report.data import read_runs
from fedsync.extras.report.report_page import page
from tests.observe.runs import two_silos

BROWSER = find()

# Looks at the page in frames as wide as a screen and as a telephone, and writes down what it finds.
LOOK = """
const seen = [];
for (const frame of document.querySelectorAll("iframe")) {
  const inside = frame.contentDocument, root = inside.documentElement;
  const boxes = [...inside.querySelectorAll("figure svg")].map(svg => svg.getBoundingClientRect());
  const texts = [...inside.querySelectorAll("svg text")].map(text => text.getBoundingClientRect().height);
  seen.push({
    width: root.clientWidth, needed: root.scrollWidth, height: root.scrollHeight,
    figures: boxes.length, narrowest: Math.min(...boxes.map(box => box.width)),
    lowest: Math.min(...boxes.map(box => box.height)), letters: Math.min(...texts.filter(height => height > 0)),
    heading: inside.querySelector("h1").textContent,
  });
}
console.error("the console is heard");
document.getElementById("seen").textContent = JSON.stringify(seen);
"""


@pytest.mark.skipif(BROWSER is None, reason="no Chromium or Chrome on this machine")
def test_a_browser_lays_the_page_out_without_complaint(tmp_path: Path) -> None:
    two_silos(tmp_path / "one")
    two_silos(tmp_path / "two", barrier={"kind": "asp"}, stop={"rounds": 6})
    text = html.escape(page(read_runs([tmp_path / "one", tmp_path / "two"])))
    frames = "".join(f'<iframe width="{width}" height="900" srcdoc="{text}"></iframe>' for width in (1200, 400))
    looking = tmp_path / "looking.html"
    script = f'<script>addEventListener("load", () => {{ {LOOK} }})</script>'
    looking.write_text(f'<!DOCTYPE html><meta charset="utf-8">{script}<pre id="seen"></pre>{frames}')
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
    command = [str(BROWSER), *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", looking.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)

    heard = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert len(heard) == 1, heard
    assert "the console is heard" in heard[0]
    found = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout)
    assert found is not None
    seen: list[dict[str, Any]] = json.loads(html.unescape(found.group(1)))
    for frame in seen:
        assert frame["needed"] <= frame["width"], "nothing is wider than the page"
        assert frame["height"] > 2000
        assert frame["figures"] >= 8
        assert frame["narrowest"] > 300
        assert frame["lowest"] > 50
        assert frame["letters"] > 8, "readable"
        assert frame["heading"] == "Comparison of one, two"
    assert [frame["width"] for frame in seen] == [1200, 400]
